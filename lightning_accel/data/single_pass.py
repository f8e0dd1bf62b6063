"""Crop, flip, normalise, cast and lay out in one pass over memory: what the pass is, how NumPy and how a GPU does it.

The GPU's kernel is ``single_pass.cu``, launched through CuPy. It multiplies and adds with one rounding (``fmaf``) where
NumPy rounds the product too: before the sum is rounded they differ by at most half a unit in the last place of the
product.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lightning_accel.data.tensor_arrays import Array

NumpyArray = np.ndarray[Any, Any]
Kind = Literal["float32", "float16", "bfloat16"]  # what a pass writes

SOURCE = Path(__file__).with_name("single_pass.cu")

# As single_pass.cu has them.
PIXELS, TURNS, MAX_THREADS = 4, 2, 128
INPUTS = {"uint8": "UInt8", "float32": "Float32"}
OUTPUTS: dict[Kind, str] = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}
CHANNEL_COUNTS = (1, 3, 4)  # these have kernels of their own; any other number shares one

WARP = 32
MAX_GRID_Y = 65535
MAX_PIXELS = 2**30  # of a sample's output: row and column are found in 32 bits


@dataclass(kw_only=True, eq=False)
class SinglePass:
    """What becomes of the pixels of one batch: ``out[n, c, i, j] = source * scale[c] + bias[c]``.

    The source is ``images[n, c, top[n] + i, left[n] + step[n] * j]``; where that lies outside of the image,
    ``out[n, c, i, j] = fill[c]``. All arrays are NumPy's: they are small, and drawn on the host. Transforms are put
    together by :meth:`crop`, :meth:`flip` and :meth:`normalize`, in the order in which these are called.
    """

    height: int  # of the output
    width: int
    top: NumpyArray  # (N,), int32: row in the image of the output's first row; negative where it lies in the padding
    left: NumpyArray  # (N,), int32: column in the image of the output's first column
    step: NumpyArray  # (N,), int32: 1, or -1 where the sample is flipped
    scale: NumpyArray  # (C,), float32
    bias: NumpyArray  # (C,), float32
    fill: NumpyArray  # (C,), float32: what padding becomes
    is_uint8: bool = False  # whether the images hold 0…255, which a normalisation takes as 0…1

    @classmethod
    def copying(cls, samples: int, channels: int, height: int, width: int, *, is_uint8: bool = False) -> SinglePass:
        """The pass that leaves images of this shape as they are."""
        return cls(
            height=height,
            width=width,
            top=np.zeros(samples, np.int32),
            left=np.zeros(samples, np.int32),
            step=np.ones(samples, np.int32),
            scale=np.ones(channels, np.float32),
            bias=np.zeros(channels, np.float32),
            fill=np.zeros(channels, np.float32),
            is_uint8=is_uint8,
        )

    def crop(self, top: NumpyArray, left: NumpyArray, height: int, width: int) -> None:
        """Takes ``height`` rows and ``width`` columns of each sample from ``(top, left)`` on; zeros lie outside."""
        self.top += top
        self.left += self.step * left
        self.height, self.width = height, width
        self.fill[:] = 0

    def flip(self, flags: NumpyArray) -> None:
        """Mirrors the samples whose flag is set."""
        self.left += np.where(flags, self.step * (self.width - 1), 0)
        self.step[flags] *= -1

    def normalize(self, scale: NumpyArray, bias: NumpyArray) -> None:
        """``value * scale + bias``, each per channel."""
        self.scale *= scale
        self.bias = self.bias * scale + bias
        self.fill = self.fill * scale + bias


def run_on_host(images: NumpyArray, single_pass: SinglePass, out: NumpyArray, *, kind: Kind) -> None:
    """The pass in NumPy: sample by sample and channel by channel, so that what is in between stays in the cache.

    The values are those of the transforms one by one, bit for bit. ``images``: ``(N, C, H, W)`` of uint8 or float32,
    in any layout; ``out``: ``(N, C, height, width)`` of ``kind``, in any layout; of uint16, the bits, for bfloat16.
    """
    _, channels, height, width = images.shape
    # A plane is put together here, whole, before it is written into a layout that may scatter it.
    plane = np.empty((single_pass.height, single_pass.width), np.float32)
    bits = np.empty(plane.shape, np.uint32)
    for sample, image in enumerate(images):
        top, left = int(single_pass.top[sample]), int(single_pass.left[sample])
        if single_pass.step[sample] == -1:  # forward through the mirrored image
            image, left = image[..., ::-1], width - 1 - left
        rows, from_rows = _overlap(top, single_pass.height, height)
        columns, from_columns = _overlap(left, single_pass.width, width)
        inside = plane[rows, columns]
        for channel in range(channels):
            if inside.size < plane.size:
                plane[...] = single_pass.fill[channel]
            pixels = image[channel, from_rows, from_columns]
            np.multiply(pixels, single_pass.scale[channel], out=inside, dtype=np.float32)
            np.add(inside, single_pass.bias[channel], out=inside)
            if kind == "bfloat16":
                out[sample, channel] = _as_bfloat16(plane, bits)
            else:
                with np.errstate(over="ignore"):  # to infinity, as torch does
                    out[sample, channel] = plane


def _as_bfloat16(values: NumpyArray, bits: NumpyArray) -> NumpyArray:
    """The bits of float32 ``values`` rounded to bfloat16, to even at ties, as uint16; overwrites ``bits``, uint32."""
    whole = values.view(np.uint32)
    np.right_shift(whole, 16, out=bits)
    np.bitwise_and(bits, 1, out=bits)
    np.add(bits, 0x7FFF, out=bits)
    np.add(bits, whole, out=bits)
    is_nan = np.isnan(values)
    if is_nan.any():
        bits[is_nan] = 0x7FC0_0000
    upper = 1 if sys.byteorder == "little" else 0
    return bits.view(np.uint16)[..., upper::2]


def _overlap(start: int, count: int, size: int) -> tuple[slice, slice]:
    """Which of ``count`` places from ``start`` on lie within ``size``: a slice of the count, and one of the places."""
    begin = min(max(-start, 0), count)
    end = max(min(size - start, count), begin)
    return slice(begin, end), slice(start + begin, start + end)


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
            arguments = (*pointers, *strides_given, np.int32(first), *numbers)
            kernel((launch.tiles, samples), (launch.threads,), arguments, shared_mem=launch.shared_bytes)

    return start


def run_on_gpu(images: Array, single_pass: SinglePass, out: Array, *, kind: Kind, channels_last: bool) -> None:
    """Makes ``single_pass`` of ``images`` into ``out``; arguments as for :func:`prepare`."""
    if out.size:
        prepare(images, single_pass, out, kind=kind, channels_last=channels_last)()


@functools.cache
def _kernel(specialisation: Specialisation) -> Any:
    """CuPy compiles it at its first launch on a device, and keeps the binary on disk."""
    import cupy

    return cupy.RawKernel(SOURCE.read_text(encoding="utf-8"), "single_pass", options=specialisation.options)
