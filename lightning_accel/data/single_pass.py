"""Crop, flip, normalise, cast and lay out in one pass over memory: what the pass is, and how NumPy does it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

NumpyArray = np.ndarray[Any, Any]
Kind = Literal["float32", "float16", "bfloat16"]  # what a pass writes


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
