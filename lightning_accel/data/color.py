"""Transforms that change each pixel by itself: normalisation and jitter of colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from typing_extensions import override

from lightning_accel.core.checks import check_choice
from lightning_accel.data.single_pass import NumpyArray, SinglePass
from lightning_accel.data.tensor_arrays import Array, Arrays
from lightning_accel.data.transform import FusibleTransform, ImageTransform, Shape, is_number, per_sample

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True, repr=False)
class Normalize(FusibleTransform):
    """``(image - mean) / std``, channel by channel; uint8 images are first brought from 0…255 to 0…1.

    Computed in float32. At the end of its chain, the images are given the dtype that steps compute in and, where
    the model is in channels_last, that layout.

    Attributes:
        mean: A number per channel, or one for all.
        std: Likewise, above 0.
        dtype: ``"auto"``: the dtype that steps compute in, where it was asked for by name (bfloat16 with
            ``precision="bf16-mixed"``); float32 with ``precision="auto"``, which a run may come back from.
            ``"float32"`` where the images are compared with something, as an autoencoder does.
    """

    mean: float | Sequence[float]
    std: float | Sequence[float]
    dtype: Literal["auto", "float32"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("Normalize(dtype)", self.dtype, ("auto", "float32"))
        for name in ("mean", "std"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        means, stds = np.size(self.mean), np.size(self.std)
        if 1 not in (means, stds) and means != stds:
            raise ValueError(
                f"Normalize: {means} means and {stds} stds."
                " Give as many of each as the images have channels, or one for all."
            )
        if not 0 < np.min(self.std) <= np.max(self.std) < np.inf:
            raise ValueError(f"Normalize(std={self.std!r}): every std has to be above 0.")

    @cached_property
    def channels(self) -> int | None:
        """How many channels it is for; None: any."""
        count = max(np.size(self.mean), np.size(self.std))
        return None if count == 1 else count

    @override
    def draw(self, shape: Shape, rng: np.random.Generator | None) -> Shape:
        if self.channels not in (None, shape.channels):
            raise ValueError(
                f"Normalize: {self.channels} means and stds for images of {shape.channels} channels,"
                f" {tuple(shape)}. Give as many as there are channels, or one for all."
            )
        return shape

    @override
    def apply(self, images: Array, drawn: Shape, arrays: Arrays) -> Array:
        affine = self._affine(is_uint8=images.dtype == np.uint8)
        scale, bias = (arrays.upload(values).reshape(1, -1, 1, 1) for values in affine)
        normalized = arrays.xp.multiply(images, scale, dtype=np.float32, casting="same_kind")
        normalized += bias
        return normalized

    @override
    def compose(self, onto: SinglePass, drawn: Shape) -> None:
        onto.normalize(*self._affine(onto.is_uint8))

    def _affine(self, is_uint8: bool) -> tuple[NumpyArray, NumpyArray]:
        """``scale`` and ``bias``, ``(C,)``, float32, so that ``image * scale + bias`` is normalised."""
        mean, std = np.atleast_1d(self.mean, self.std)
        if is_uint8 and mean.max() > 1:
            raise ValueError(
                f"Normalize(mean={self.mean}, std={self.std}) on uint8 images, which are taken as 0 to 1, not as 0 to"
                " 255: divide both by 255."
            )
        scale = 1 / (255 * std) if is_uint8 else 1 / std
        return scale.astype(np.float32), (-mean / std).astype(np.float32)


class Factors(NamedTuple):
    """How much of each there is to be in each sample, ``(N,)``; ``hue`` in turns of the colour circle."""

    brightness: NumpyArray
    contrast: NumpyArray
    saturation: NumpyArray
    hue: NumpyArray


@dataclass(frozen=True, repr=False)
class ColorJitter(ImageTransform):
    """Changes brightness, contrast, saturation and hue, in this order, by other factors in each image.

    Takes uint8, or floating point in [0, 1], and gives the same: put it before ``Normalize``. A setting ``s`` stands
    for factors from ``max(0, 1 - s)`` to ``1 + s``. Nothing happens where not training.

    Attributes:
        brightness: 0 or more; 0 leaves it alone.
        contrast: Likewise; blends with the mean of the image's grey values.
        saturation: Likewise; blends with the image in grey. Needs 3 channels.
        hue: From 0 to 0.5, in turns of the colour circle, added or taken away. Needs 3 channels.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in Factors._fields:
            most, allowed = (0.5, "from 0 to 0.5") if name == "hue" else (np.inf, "0 or more")
            self._check(name, is_number(getattr(self, name), 0, most), f"a number, {allowed}")

    @override
    def draw(self, shape: Shape, rng: np.random.Generator | None) -> Factors | None:
        if (self.saturation or self.hue) and shape.channels != 3:
            raise ValueError(
                f"ColorJitter(saturation={self.saturation}, hue={self.hue}): images of {shape.channels} channels have"
                " no colours to change. Give saturation=0 and hue=0, or images of 3 channels."
            )
        if rng is None:
            return None
        strengths = (self.brightness, self.contrast, self.saturation)
        limits = [*((max(0.0, 1 - s), 1 + s) for s in strengths), (-self.hue, self.hue)]
        return Factors(*(rng.uniform(low, high, shape.samples).astype(np.float32) for low, high in limits))

    @override
    def apply(self, images: Array, drawn: Factors, arrays: Arrays) -> Array:
        brightness, contrast, saturation, hue = (per_sample(factors, arrays) for factors in drawn)
        values = _in_unit_range(images)
        if self.brightness:
            values = (values * brightness).clip(0, 1)
        if self.contrast:
            values = _blended(values, _grey(values).mean(axis=(1, 2, 3), keepdims=True), contrast)
        if self.saturation:
            values = _blended(values, _grey(values), saturation)
        if self.hue:
            values = _turned(arrays.xp, values, hue)
        values = values.clip(0, 1)
        return ((values * np.float32(255)).round() if images.dtype == np.uint8 else values).astype(images.dtype)


def _in_unit_range(images: Array) -> Array:
    """The images as float32 in [0, 1]; uint8 is taken as 0…255, as it is everywhere in torchvision."""
    values = images.astype(np.float32)
    # Looked at on the host alone: on a GPU, that would wait for it.
    if images.dtype == np.uint8:
        values *= np.float32(1 / 255)
    elif isinstance(values, np.ndarray) and values.size and not 0 <= values.min() <= values.max() <= 1:
        raise ValueError(
            f"ColorJitter: the images reach from {values.min():.3g} to {values.max():.3g}; it takes uint8, or floating"
            " point from 0 to 1. Put it before Normalize, and give images of 0 to 255 as uint8."
        )
    return values


def _blended(values: Array, other: Array, share: Array) -> Array:
    return (other + (values - other) * share).clip(0, 1)


def _grey(values: Array) -> Array:
    """The brightness of each pixel, ``(N, 1, H, W)``."""
    if values.shape[1] != 3:
        return values.mean(axis=1, keepdims=True)
    red, green, blue = (values[:, i : i + 1] * np.float32(_LUMA[i]) for i in range(3))
    return red + green + blue


def _turned(xp: Any, values: Array, turns: Array) -> Array:
    """Colours ``(N, 3, H, W)`` turned on the circle, their lightness kept: to HSV and back (Smith, SIGGRAPH 1978)."""
    most, least = values.max(axis=1, keepdims=True), values.min(axis=1, keepdims=True)
    spread = most - least
    red, green, blue = (values[:, i : i + 1] for i in range(3))
    safe = xp.where(spread == 0, np.float32(1), spread)
    others = xp.where(most == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    sixths = xp.where(most == red, (green - blue) / safe, others) + 6 * turns
    # Each channel of a pure colour is a trapezium over the circle, and the channels stand two sixths apart.
    places = (sixths + (5 - 2 * xp.arange(3, dtype=np.float32)).reshape(1, 3, 1, 1)) % 6
    return most - spread * xp.minimum(places, 4 - places).clip(0, 1)


def _numbers(name: str, value: Any) -> float | tuple[float, ...]:
    is_many = isinstance(value, Iterable) and not isinstance(value, str)
    numbers = list(value) if is_many else [value]
    with suppress(TypeError, ValueError):
        numbers = [float(number) if not isinstance(number, str) else number for number in numbers]
    if not numbers or not all(isinstance(number, float) for number in numbers):
        wrong = TypeError if numbers else ValueError
        raise wrong(f"Normalize({name}={value!r}): give a number, or a list of one per channel.")
    return tuple(numbers) if is_many else numbers[0]
