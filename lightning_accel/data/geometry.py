"""Transforms that move pixels: crops and flips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from typing_extensions import override

from lightning_accel.data.single_pass import NumpyArray, SinglePass
from lightning_accel.data.tensor_arrays import Array, Arrays
from lightning_accel.data.transform import (
    Boxes,
    FusibleTransform,
    ImageTransform,
    Shape,
    is_count,
    is_number,
    per_sample,
)

_CHUNK_BYTES = 64 << 20  # so much of what is interpolated at a time
_ATTEMPTS = 10  # at a box that fits into the image, as in torchvision


@dataclass(frozen=True, repr=False)
class RandomCrop(FusibleTransform):
    """Cuts a window out of each image, elsewhere in each; the one in the middle where not training.

    Attributes:
        size: Of the window in pixels: one number, or ``(height, width)``.
        padding: How many rows and columns of zeros are put around the image before.

    Raises:
        ValueError: A number is out of range; or, on a batch, the window is larger than the padded images.
    """

    size: int | Sequence[int]
    padding: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "size", _size("RandomCrop", self.size))
        self._check("padding", is_count(self.padding, least=0), "a number of pixels, 0 or more")

    @override
    def draw(self, shape: Shape, rng: np.random.Generator | None) -> tuple[NumpyArray, NumpyArray]:
        height, width = cast(tuple[int, int], self.size)
        room = shape.height + 2 * self.padding - height, shape.width + 2 * self.padding - width
        if min(room) < 0:
            padded = f" with {self.padding} pixels of padding on each side" if self.padding else ""
            raise ValueError(
                f"RandomCrop(size={(height, width)}) is larger than the images, {shape.height}x{shape.width}{padded}:"
                " give a smaller size or more padding=, or enlarge the images first."
            )
        if rng is None:
            top, left = (np.full(shape.samples, round(space / 2)) for space in room)
        else:
            top, left = (rng.integers(0, space + 1, shape.samples) for space in room)
        return (top - self.padding).astype(np.int32), (left - self.padding).astype(np.int32)

    @override
    def apply(self, images: Array, drawn: tuple[NumpyArray, NumpyArray], arrays: Arrays) -> Array:
        xp, pad = arrays.xp, self.padding
        height, width = cast(tuple[int, int], self.size)
        if pad:
            images = xp.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        samples, channels, rows, columns = images.shape
        n, c, y, x = images.strides
        # Every place where the window could be, as a view; of which one for each sample is copied.
        shape = samples, rows - height + 1, columns - width + 1, channels, height, width
        windows = xp.lib.stride_tricks.as_strided(images, shape, (n, y, x, c, y, x))
        top, left = (arrays.upload(corner + pad) for corner in drawn)
        return windows[xp.arange(samples), top, left]

    @override
    def compose(self, onto: SinglePass, drawn: tuple[NumpyArray, NumpyArray]) -> None:
        onto.crop(*drawn, *cast(tuple[int, int], self.size))


@dataclass(frozen=True, repr=False)
class RandomHorizontalFlip(FusibleTransform):
    """Mirrors images left to right, each with probability ``p``; none where not training.

    Attributes:
        p: From 0 to 1.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("p", is_number(self.p, 0, 1), "a probability, from 0 to 1")

    @override
    def draw(self, shape: Shape, rng: np.random.Generator | None) -> NumpyArray | None:
        return None if rng is None else rng.random(shape.samples) < self.p

    @override
    def apply(self, images: Array, drawn: NumpyArray, arrays: Arrays) -> Array:
        flipped: Array = arrays.xp.where(per_sample(drawn, arrays), images[..., ::-1], images)
        return flipped

    @override
    def compose(self, onto: SinglePass, drawn: NumpyArray) -> None:
        onto.flip(drawn)


@dataclass(frozen=True, repr=False)
class RandomResizedCrop(ImageTransform):
    """Cuts a box of random area and shape out of each image and resizes it to one size.

    Where not training, the box is the largest one of the result's shape in the middle.

    Bilinear, with antialiasing where the box shrinks: each output pixel is the mean of the box's pixels under a
    triangle as wide as two output pixels. As a product with one matrix for the rows and one for the columns, that is
    the same for every sample's own box. The boxes are those of Szegedy et al., "Going deeper with convolutions",
    CVPR 2015. Uint8 stays uint8, rounded.

    Attributes:
        size: Of the result in pixels: one number, or ``(height, width)``.
        scale: The box's area as a part of the image's, ``(smallest, largest)``.
        ratio: Its width by its height, ``(smallest, largest)``.
    """

    size: int | Sequence[int]
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "size", _size("RandomResizedCrop", self.size))
        self._check_range("scale", most=1)
        self._check_range("ratio")

    @override
    def draw(self, shape: Shape, rng: np.random.Generator | None) -> Boxes:
        if rng is None:
            height, width = cast(tuple[int, int], self.size)
            return self._central(shape, np.full(shape.samples, width / height))
        tries = (_ATTEMPTS, shape.samples)
        area, ratio = shape.areas_and_ratios(rng, self.scale, self.ratio, tries)
        heights, widths = np.sqrt(area / ratio).round(), np.sqrt(area * ratio).round()
        fits = (heights >= 1) & (heights <= shape.height) & (widths >= 1) & (widths <= shape.width)
        first = fits.argmax(axis=0), np.arange(shape.samples)
        least, most = self.ratio
        fallback = self._central(shape, np.full(shape.samples, shape.width / shape.height).clip(least, most))
        heights = np.where(fits.any(axis=0), heights[first], fallback.height).astype(int)
        widths = np.where(fits.any(axis=0), widths[first], fallback.width).astype(int)
        top, left = rng.integers(0, shape.height - heights + 1), rng.integers(0, shape.width - widths + 1)
        return Boxes(top, left, heights, widths)

    @override
    def apply(self, images: Array, drawn: Boxes, arrays: Arrays) -> Array:
        xp = arrays.xp
        samples, channels, rows, columns = images.shape
        height, width = cast(tuple[int, int], self.size)
        top, left, box_height, box_width = (arrays.upload(values) for values in drawn)
        resized = xp.empty((samples, channels, height, width), images.dtype)
        sample_bytes = 4 * (channels * columns * (rows + height) + height * rows + width * columns)
        at_a_time = max(1, _CHUNK_BYTES // sample_bytes)
        for begin in range(0, samples, at_a_time):
            some = slice(begin, begin + at_a_time)
            down = _interpolation(xp, top[some], box_height[some], height, rows)
            across = _interpolation(xp, left[some], box_width[some], width, columns)
            values = down[:, None] @ images[some].astype(np.float32) @ across[:, None].swapaxes(2, 3)
            resized[some] = values.round().clip(0, 255) if images.dtype == np.uint8 else values
        return resized

    def _central(self, shape: Shape, ratio: NumpyArray) -> Boxes:
        """The largest box of this ``ratio`` of width to height in the middle."""
        height = np.minimum(shape.height, (shape.width / ratio).round().clip(1))
        width = np.minimum(shape.width, (shape.height * ratio).round().clip(1))
        return Boxes((shape.height - height) // 2, (shape.width - width) // 2, height, width)


def _interpolation(xp: Any, start: Array, extent: Array, count: int, size: int) -> Array:
    """The weights ``(N, count, size)`` that make ``count`` pixels of the ``extent`` pixels from ``start`` on."""
    start, extent = start.reshape(-1, 1, 1), extent.reshape(-1, 1, 1)
    stride = extent / count
    centres = start + (xp.arange(count).reshape(1, -1, 1) + 0.5) * stride - 0.5
    pixels = xp.arange(size).reshape(1, 1, -1)
    weights = (1 - abs(pixels - centres) / xp.maximum(stride, 1)).clip(0)
    weights = xp.where((pixels >= start) & (pixels < start + extent), weights, 0)
    return (weights / weights.sum(axis=2, keepdims=True)).astype(np.float32)


def _size(owner: str, size: Any) -> tuple[int, int]:
    sizes = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
    if len(sizes) != 2 or not all(is_count(pixels, least=1) for pixels in sizes):
        raise ValueError(f"{owner}(size={size!r}): give a number of pixels, or (height, width), each above 0.")
    return sizes
