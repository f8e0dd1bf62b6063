"""Copies from the host to a device, back, and between devices."""

from __future__ import annotations

import torch
from torch import Tensor

from simulated_cuda import captures, copies, memory
from simulated_cuda.streams import TIMELINE, Key, current_stream
from simulated_cuda.waits import begin_wait, end_wait
from simulated_cuda.wrappers import is_simulated, values_of


def copy_(target: Tensor, source: Tensor, is_async: bool) -> Tensor:
    """``target.copy_(source)``, one of which is the device's."""
    from_device, to_device = is_simulated(source), is_simulated(target)
    device = (source if from_device else target).device.index
    to = values_of(target) if to_device else target.detach()
    come_from = values_of(source) if from_device else source.detach()
    stream = current_stream(device)
    if from_device and to_device:
        if source.device != target.device:  # either side's current stream waits for the other's
            other = current_stream(target.device.index)
            TIMELINE.wait(stream, TIMELINE.mark(other))
        _launch_copy(stream, to, come_from, device)
        if source.device != target.device:
            TIMELINE.wait(other, TIMELINE.mark(stream))
        return target
    host = target if from_device else source
    # What has another dtype, or gaps, goes through memory of torch's own, which nobody can race for.
    is_pinned = host.layout == torch.strided and host.numel() > 0 and host.is_pinned()
    is_direct = is_pinned and host.dtype == (target if to_device else source).dtype and host.is_contiguous()
    if is_pinned and captures.of_stream(stream) is None:
        copies.deliver(host, stream, "reads" if to_device else "writes")
    if is_async and is_direct and from_device and captures.of_launch(stream) is None:
        memory.used_by_kernel("a copy to the host", stream, {memory.address_of(come_from)}, set())
        copies.to_host(stream, TIMELINE.launch(stream), to, come_from)
        return target
    if not is_async:
        begin_wait("aten::copy_", device)
    _launch_copy(stream, to, come_from, device)
    if not is_async:
        end_wait(device)
    if is_async and is_direct and captures.of_stream(stream) is None:
        copies.from_host(stream, TIMELINE.launch(stream), come_from)
    return target


def _launch_copy(stream: Key, to: Tensor, come_from: Tensor, device: int) -> None:
    capture = captures.of_launch(stream)
    if capture is not None:
        capture.recording.before([to])
    to.copy_(come_from)
    if capture is not None:
        capture.recording.add(torch.ops.aten.copy_.default, (to, come_from), {}, device, to)
    else:
        memory.used_by_kernel("a copy", stream, {memory.address_of(come_from)}, {memory.address_of(to)})
