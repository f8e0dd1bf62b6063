"""The host's waiting for a device, which is counted, and warned of or refused on wish."""

from __future__ import annotations

import warnings

from simulated_cuda import captures
from simulated_cuda.streams import TIMELINE, current_stream

SYNCHRONISATIONS: list[str] = []
"""The operations for which the host has waited for a device, in order."""

_sync_debug_mode = 0


def set_sync_debug_mode(mode: int) -> None:
    """As torch's: 1 warns of the host's waiting, 2 makes it an error."""
    global _sync_debug_mode
    _sync_debug_mode = mode


def get_sync_debug_mode() -> int:
    """As torch's."""
    return _sync_debug_mode


def begin_wait(operation_name: str, device: int) -> None:
    """The host is about to launch an operation and to wait for it on the current stream.

    Raises:
        RuntimeError: :func:`torch.cuda.set_sync_debug_mode` does not allow it, or a capture.
    """
    SYNCHRONISATIONS.append(operation_name)
    stream = current_stream(device)
    captures.wait_for_streams([stream])
    if _sync_debug_mode == 2:
        raise RuntimeError("called a synchronizing CUDA operation")
    if _sync_debug_mode == 1:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)


def end_wait(device: int) -> None:
    """The host waits for what the current stream has been given."""
    TIMELINE.wait_on_host([TIMELINE.mark(current_stream(device))])
