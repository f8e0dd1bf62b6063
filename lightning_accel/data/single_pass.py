"""Crop, flip, normalise, cast and lay out in one pass over memory: what the pass is, and how NumPy does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

NumpyArray = np.ndarray[Any, Any]
Kind = Literal["float32", "float16", "bfloat16"]  # what a pass writes


@dataclass(frozen=True, kw_only=True, eq=False)
class SinglePass:
    """What becomes of the pixels of one batch: ``out[n, c, i, j] = source * scale[c] + bias[c]``.

    The source is ``images[n, c, top[n] + i, left[n] + step[n] * j]``; where that lies outside of the image,
    ``out[n, c, i, j] = fill[c]``. All arrays are NumPy's: they are small, and drawn on the host.

    Attributes:
        height: Of the output.
        width: Of the output.
        top: Row in the image of the output's first row, ``(N,)``, int32; negative where the crop begins in the padding.
        left: Column in the image of the output's first column, ``(N,)``, int32.
        step: 1, or -1 where the sample is flipped, ``(N,)``, int32.
        scale: Per channel, ``(C,)``, float32.
        bias: Per channel, ``(C,)``, float32.
        fill: What padding becomes, per channel, ``(C,)``, float32.
    """

    height: int
    width: int
    top: NumpyArray
    left: NumpyArray
    step: NumpyArray
    scale: NumpyArray
    bias: NumpyArray
    fill: NumpyArray


class PassBuilder:
    """Puts transforms together into one :class:`SinglePass`, in the order in which they are called.

    Args:
        samples: How many images there are.
        channels: How many channels they have.
        height: Their rows.
        width: Their columns.
        is_uint8: Whether they hold 0…255, which is taken as 0…1.

    Attributes:
        height: The rows of the output so far.
        width: Its columns so far.
    """

    def __init__(self, samples: int, channels: int, height: int, width: int, *, is_uint8: bool) -> None:
        self.is_uint8 = is_uint8
        self.height, self.width = height, width
        self._top = np.zeros(samples, np.int32)
        self._left = np.zeros(samples, np.int32)
        self._step = np.ones(samples, np.int32)
        self._scale = np.ones(channels, np.float32)
        self._bias = np.zeros(channels, np.float32)
        self._fill = np.zeros(channels, np.float32)

    def crop(self, top: NumpyArray, left: NumpyArray, height: int, width: int) -> None:
        """Takes ``height`` rows and ``width`` columns of each sample from ``(top, left)`` on; zeros lie outside."""
        self._top = self._top + top
        self._left = self._left + self._step * left
        self.height, self.width = height, width
        self._fill = np.zeros_like(self._fill)

    def flip(self, flags: NumpyArray) -> None:
        """Mirrors the samples whose flag is set."""
        self._left = self._left + np.where(flags, self._step * (self.width - 1), 0)
        self._step = np.where(flags, -self._step, self._step)

    def normalize(self, scale: NumpyArray, bias: NumpyArray) -> None:
        """``value * scale + bias``, each per channel."""
        self._scale = self._scale * scale
        self._bias = self._bias * scale + bias
        self._fill = self._fill * scale + bias

    def build(self) -> SinglePass:
        return SinglePass(
            height=self.height,
            width=self.width,
            top=self._top.astype(np.int32),
            left=self._left.astype(np.int32),
            step=self._step.astype(np.int32),
            scale=self._scale.astype(np.float32),
            bias=self._bias.astype(np.float32),
            fill=self._fill.astype(np.float32),
        )


def run_on_host(images: NumpyArray, single_pass: SinglePass, out: NumpyArray, *, kind: Kind) -> None:
    """The pass in NumPy: sample by sample and channel by channel, so that what is in between stays in the cache.

    For uint8 the arithmetic is done once for each of the 256 values, and pixels are looked up: the values are those
    of the transforms one by one, bit for bit. (Compiled with Numba the same loops take three quarters of the time;
    see benchmarks/preprocessing.py.)

    Args:
        images: ``(N, C, H, W)`` of uint8 or float32, in any layout.
        single_pass: What to do.
        out: ``(N, C, height, width)``, in any layout; of uint16, the bits, for bfloat16.
        kind: The output's dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
    """
    _, channels, height, width = images.shape
    cast = _CASTS[kind]
    scale, bias, fill = single_pass.scale[:, None], single_pass.bias[:, None], cast(single_pass.fill)
    tables = cast(np.arange(256, dtype=np.float32) * scale + bias) if images.dtype == np.uint8 else None
    # A plane is put together here, whole, before it is written into a layout that may scatter it.
    plane = np.empty((single_pass.height, single_pass.width), out.dtype)
    looked_up = np.empty(plane.size, out.dtype)
    for sample in range(len(images)):
        rows, from_rows = _overlap(int(single_pass.top[sample]), 1, single_pass.height, height)
        columns, from_columns = _overlap(
            int(single_pass.left[sample]), int(single_pass.step[sample]), single_pass.width, width
        )
        inside = plane[rows, columns]
        for channel in range(channels):
            pixels = images[sample, channel, from_rows, from_columns]
            if inside.size < plane.size:
                plane[...] = fill[channel]
            if tables is None:
                inside[...] = cast(pixels * scale[channel] + bias[channel])
            else:
                found = plane if inside.size == plane.size else looked_up[: pixels.size].reshape(pixels.shape)
                # Every uint8 is an index of the table: "clip" only spares the check.
                np.take(tables[channel], pixels, out=found, mode="clip")
                if found is not plane:
                    inside[...] = found
            out[sample, channel] = plane


def _overlap(start: int, step: int, count: int, size: int) -> tuple[slice, slice]:
    """Which of ``count`` places ``start + step * i`` lie within ``size``: a slice of ``i``, and one of the places."""
    first, last = (-start, size - start) if step == 1 else (start - size + 1, start + 1)
    begin = min(max(first, 0), count)
    end = max(min(last, count), begin)
    if begin == end:
        return slice(0, 0), slice(0, 0)
    if step == 1:
        return slice(begin, end), slice(start + begin, start + end)
    stop = start - end
    return slice(begin, end), slice(start - begin, stop if stop >= 0 else None, -1)


def _as_bfloat16(values: NumpyArray) -> NumpyArray:
    """The bits of ``values``, float32, rounded to the nearest bfloat16, to even at ties; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _as_float16(values: NumpyArray) -> NumpyArray:
    with np.errstate(over="ignore"):  # to infinity, as torch does
        return values.astype(np.float16)


_CASTS = {"float32": lambda values: values.astype(np.float32), "float16": _as_float16, "bfloat16": _as_bfloat16}
