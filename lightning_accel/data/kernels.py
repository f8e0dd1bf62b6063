"""A single pass on a GPU: which kernel is compiled, how it is launched, and the launch through CuPy.

The kernel is ``single_pass.cu``. It multiplies and adds with one rounding (``fmaf``) where NumPy rounds the product
too: before the sum is rounded they differ by at most half a unit in the last place of the product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_accel.data.single_pass import Kind, NumpyArray, SinglePass
from lightning_accel.data.tensor_arrays import Array

SOURCE = Path(__file__).with_name("single_pass.cu")

# As single_pass.cu has them.
PIXELS, TURNS, MAX_THREADS = 4, 2, 128
INPUTS = {"uint8": "UInt8", "float32": "Float32"}
OUTPUTS: dict[Kind, str] = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}
CHANNEL_COUNTS = (1, 3, 4)  # these have kernels of their own; any other number shares one

WARP = 32
MAX_GRID_Y = 65535
MAX_PIXELS = 2**30  # of a sample's output: row and column are found in 32 bits


@dataclass(frozen=True, kw_only=True)
class Specialisation:
    """What a kernel is compiled for."""

    channels: int  # 0 for any number
    source: str  # dtype of the images
    kind: Kind  # dtype of the output
    channels_last: bool  # whether the channels of a pixel lie together in the output
    wide: bool  # whether offsets within a sample need 64 bits or may be negative

    @property
    def options(self) -> tuple[str, ...]:
        """For the compiler."""
        return (
            f"-DINPUT={INPUTS[self.source]}",
            f"-DOUTPUT={OUTPUTS[self.kind]}",
            f"-DCHANNELS={self.channels}",
            f"-DCHANNELS_LAST={str(self.channels_last).lower()}",
            f"-DOFFSET={'long long' if self.wide else 'unsigned int'}",
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a kernel is launched."""

    specialisation: Specialisation
    tiles: int  # blocks that make a sample, the grid's first dimension
    threads: int  # of a block
    shared_bytes: int  # of a block
    strides: tuple[int, ...]  # of the images, in elements: the kernel's arguments after the pointers
    numbers: tuple[int, ...]  # the kernel's arguments after the first sample's number
    samples: tuple[tuple[int, int], ...]  # first and number of every launch; several where the grid cannot hold all


def plan_launch(
    shape: Sequence[int],
    strides: Sequence[int],
    source: str,
    single_pass: SinglePass,
    *,
    kind: Kind,
    channels_last: bool,
) -> Launch:
    """How to make ``single_pass`` of images of this shape ``(N, C, H, W)``, with these strides in elements."""
    count, channels, in_height, in_width = shape
    height, width = single_pass.height, single_pass.width
    assert min(*shape, height, width) > 0, "nothing to make, or nothing to make it of"
    lengths = {len(single_pass.top), len(single_pass.left), len(single_pass.step)}
    levels = {len(single_pass.scale), len(single_pass.bias), len(single_pass.fill)}
    assert (lengths, levels) == ({count}, {channels}), "not of one sample each, or not of one channel each"
    if source not in INPUTS:
        raise TypeError(f"the fused kernel takes images of {' or '.join(INPUTS)}, these are {source}")
    if max(height * width, in_height, in_width) > MAX_PIXELS:
        raise ValueError(f"the fused kernel makes at most {MAX_PIXELS} pixels of a sample, asked was {height}x{width}")
    # A size of one may have any stride.
    reach = [(size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True)]
    specialisation = Specialisation(
        channels=channels if channels in CHANNEL_COUNTS else 0,
        source=source,
        kind=kind,
        channels_last=channels_last and channels > 1,  # a single channel lies the same way in both
        wide=min(reach) < 0 or sum(reach) >= 2**32,
    )
    pixels = height * width
    quads = -(-pixels // (PIXELS * TURNS))
    threads = min(MAX_THREADS, -(-quads // WARP) * WARP)  # small images are not to leave most of a block idle
    turn = threads * PIXELS
    staged = specialisation.channels if specialisation.channels_last else 0
    return Launch(
        specialisation=specialisation,
        tiles=-(-pixels // (turn * TURNS)),
        threads=threads,
        shared_bytes=turn * TURNS * staged * (4 if kind == "float32" else 2),
        strides=tuple(strides),
        numbers=(channels, in_height, in_width, height, width, turn // width, turn % width),
        samples=tuple((first, min(MAX_GRID_Y, count - first)) for first in range(0, count, MAX_GRID_Y)),
    )


def pack(single_pass: SinglePass) -> NumpyArray:
    """As bytes, for a single copy: top, left, step as ``(N, 3)`` int32; scale, bias, fill as ``(3, C)`` float32."""
    samples = np.stack([single_pass.top, single_pass.left, single_pass.step], axis=1).astype(np.int32, copy=False)
    levels = np.stack([single_pass.scale, single_pass.bias, single_pass.fill]).astype(np.float32, copy=False)
    return np.concatenate([samples.reshape(-1).view(np.uint8), levels.reshape(-1).view(np.uint8)])


def prepare(
    images: Array, single_pass: SinglePass, out: Array, *, kind: Kind, channels_last: bool
) -> Callable[[], None]:
    """Sends the parameters to the device; what is returned makes ``out``, as often as it is called.

    On CuPy's current stream, which has to be torch's. Waits for nothing: the host goes on at once. Both arrays are
    CuPy's: ``images``, ``(N, C, H, W)``, uint8 or float32, with any strides; ``out``, ``(N, C, height, width)`` of
    ``kind`` (uint16, the bits, for bfloat16), contiguous with the channels last or not, as ``channels_last`` says.
    """
    import cupy

    device = torch.device("cuda", images.device.id)
    # Torch sends the parameters and may reuse their memory once this stream is past the kernel.
    assert cupy.cuda.get_current_stream().ptr == torch.cuda.current_stream(device).cuda_stream, "two streams"
    itemsize = images.itemsize
    assert all(stride % itemsize == 0 for stride in images.strides)
    strides = [stride // itemsize for stride in images.strides]
    launch = plan_launch(images.shape, strides, images.dtype.name, single_pass, kind=kind, channels_last=channels_last)
    laid_out = out.transpose(0, 2, 3, 1) if channels_last else out
    assert laid_out.flags.c_contiguous, "the output's memory is not laid out as asked"

    # From pageable memory a copy waits for the device, from pinned memory it does not. Torch gives the pinned block to
    # nobody else until the copy is over, and the kernel runs on the same stream.
    parameters = torch.from_numpy(pack(single_pass)).pin_memory().to(device, non_blocking=True)
    samples_at = parameters.data_ptr()
    pointers = (images, np.uint64(samples_at), np.uint64(samples_at + 12 * images.shape[0]), out)
    strides_given = tuple(np.int64(stride) for stride in launch.strides)
    numbers = tuple(np.int32(number) for number in launch.numbers)
    kernel = _kernel(launch.specialisation)

    def start(parameters: torch.Tensor = parameters) -> None:  # holds the memory that `pointers` point to
        for first, samples in launch.samples:
            kernel(
                (launch.tiles, samples),
                (launch.threads,),
                (*pointers, *strides_given, np.int32(first), *numbers),
                shared_mem=launch.shared_bytes,
            )

    return start


def run(images: Array, single_pass: SinglePass, out: Array, *, kind: Kind, channels_last: bool) -> None:
    """Makes ``single_pass`` of ``images`` into ``out``; arguments as for :func:`prepare`."""
    if out.size:
        prepare(images, single_pass, out, kind=kind, channels_last=channels_last)()


@functools.cache
def _kernel(specialisation: Specialisation) -> Any:
    """CuPy compiles it at its first launch on a device, and keeps the binary on disk."""
    import cupy

    return cupy.RawKernel(SOURCE.read_text(encoding="utf-8"), "single_pass", options=specialisation.options)
