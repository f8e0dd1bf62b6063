"""What a transform is: a small settings object that changes one part of a batch, as arrays of NumPy or CuPy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
from typing_extensions import override

from lightning_accel.data import parts
from lightning_accel.data.arrays import Array, Arrays
from lightning_accel.data.batch import ArrayBatch
from lightning_accel.data.parts import Key, Path
from lightning_accel.data.single_pass import NumpyArray, PassBuilder


@dataclass(frozen=True)
class Transform(ABC):
    """One step of preprocessing. Applied to whole batches on the device, by :class:`~lightning_accel.data.Preprocess`.

    Subclasses are frozen dataclasses: their fields are their settings, in code and in YAML alike.
    """

    def __post_init__(self) -> None:
        for setting in fields(self):  # a number of NumPy's would not be written to YAML
            value = getattr(self, setting.name)
            if isinstance(value, np.generic | np.ndarray):
                object.__setattr__(self, setting.name, value.tolist())

    @abstractmethod
    def __call__(self, batch: ArrayBatch) -> None:
        """Changes ``batch``. Without random numbers, only what is deterministic happens."""

    def __repr__(self) -> str:
        given = {
            setting.name: getattr(self, setting.name)
            for setting in fields(self)
            if setting.repr and getattr(self, setting.name) != setting.default
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


class Shape(NamedTuple):
    """The shape of a batch of images: samples, channels, height, width."""

    samples: int
    channels: int
    height: int
    width: int


@dataclass(frozen=True, repr=False)
class ImageTransform(Transform):
    """A transform of images ``(N, C, H, W)`` or ``(N, H, W, C)``.

    The channels are the last axis where that has 1, 3 or 4 entries and the second does not; a chain with
    :class:`~lightning_accel.data.Normalize` goes by how many means that has.

    Attributes:
        key: The part of the batch: a key of a dict, an index of a tuple, a path of both; None: the evident image.
    """

    key: Key | None = field(default=None, kw_only=True)

    dtypes: ClassVar[tuple[str, ...]] = ("uint8", "float16", "float32", "float64")

    @abstractmethod
    def draw(self, shape: Shape, rng: np.random.Generator | None) -> Any:
        """What is to happen to each sample, as NumPy arrays; None: nothing.

        Raises:
            ValueError: Images of this shape cannot be transformed so.
        """

    @abstractmethod
    def apply(self, images: Array, drawn: Any, arrays: Arrays) -> Array:
        """The images ``(N, C, H, W)`` transformed as drawn."""

    @override
    def __call__(self, batch: ArrayBatch) -> None:
        path = self.find(batch.structure)
        images, channels_last = self.images(batch, path)
        drawn = self.draw(Shape(*images.shape), batch.rng)
        if drawn is not None:
            images = self.apply(images, drawn, batch.arrays)
        batch.write(path, images.transpose(0, 2, 3, 1) if channels_last else images)

    def find(self, batch: Any) -> Path:
        """Where its images are in a batch."""
        if self.key is not None:
            return parts.named(batch, self.key, type(self).__name__)
        return parts.evident_image(batch, type(self).__name__)

    def images(self, batch: ArrayBatch, path: Path) -> tuple[Array, bool]:
        """The images as ``(N, C, H, W)``, and whether their channels come last in the batch.

        Raises:
            ValueError: The part does not have four dimensions.
            TypeError: Its dtype is none that this transform takes.
        """
        part = parts.get(batch.structure, path)
        if part.ndim != 4:
            raise ValueError(
                f"{type(self).__name__}: the images have shape {tuple(part.shape)}; it takes four dimensions,"
                " (N, C, H, W) or (N, H, W, C). Map(lambda xp, x: x[:, None], key=...) adds an axis of one channel."
            )
        kind = parts.kind_of(part)
        if kind not in self.dtypes and not (kind == "bfloat16" and "float32" in self.dtypes):
            raise TypeError(self.refusal(kind))
        images = batch.read(path)
        if path not in batch.layouts:
            batch.layouts[path] = has_channels_last(images.shape, batch.channels.get(path))
        channels_last = batch.layouts[path]
        return (images.transpose(0, 3, 1, 2) if channels_last else images), channels_last

    def refusal(self, kind: str) -> str:
        """Why images of dtype ``kind`` cannot be taken, and what can be done."""
        return f"{type(self).__name__}: the images are {kind}; it takes {', '.join(self.dtypes)}."


class FusibleTransform(ImageTransform):
    """A transform of images that can be part of a single pass."""

    @abstractmethod
    def compose(self, onto: PassBuilder, drawn: Any) -> None:
        """As :meth:`apply`, in a single pass."""


def has_channels_last(shape: tuple[int, ...], channels: int | None = None) -> bool:
    """Whether images of this shape are ``(N, H, W, C)``; ``channels``: how many there are, where that is known."""
    usual = (1, 3, 4) if channels is None else (channels,)
    return shape[3] in usual and shape[1] not in usual


def per_sample(values: NumpyArray, arrays: Arrays, dims: int = 4) -> Array:
    """A value per sample, ``(N,)``, uploaded to broadcast against ``dims`` dimensions."""
    return arrays.upload(values).reshape(-1, *[1] * (dims - 1))


def per_channel(values: NumpyArray, arrays: Arrays) -> Array:
    """A value per channel, ``(C,)`` or one for all, uploaded to broadcast against ``(N, C, H, W)``."""
    return arrays.upload(values.astype(np.float32)).reshape(1, -1, 1, 1)


def in_float32(owner: str, images: Array, change: Callable[[Array], Array]) -> Array:
    """Changes images as float32 in [0, 1], and gives them back in the dtype that they came in, clipped to its range.

    Uint8 is taken as 0…255 and rounded, as it is everywhere in torchvision.

    Raises:
        ValueError: Images of floating point go beyond that range (looked at on the host alone).
    """
    is_uint8 = images.dtype == np.uint8
    values = images.astype(np.float32)
    if is_uint8:
        values *= np.float32(1 / 255)
    # On a GPU, looking at them would wait for it.
    elif isinstance(values, np.ndarray) and values.size and not 0 <= values.min() <= values.max() <= 1:
        raise ValueError(
            f"{owner}: the images reach from {values.min():.3g} to {values.max():.3g}; it takes uint8, or floating"
            " point from 0 to 1. Put it before Normalize, and give images of 0 to 255 as uint8."
        )
    values = change(values).clip(0, 1)
    if is_uint8:
        values = (values * np.float32(255)).round()
    return values.astype(images.dtype)


def uniform(rng: np.random.Generator, limits: Any, size: int | tuple[int, int]) -> NumpyArray:
    """Numbers between two ``limits``, equally likely."""
    smallest, largest = limits
    return rng.uniform(smallest, largest, size)


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_probability(owner: str, name: str, value: Any) -> None:
    """Raises a ``ValueError`` unless ``value`` is a number from 0 to 1."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"{owner}({name}={value!r}): a probability is a number from 0 to 1.")


def check_range(owner: str, name: str, value: Any, *, most: float = math.inf) -> tuple[float, float]:
    """``value`` as a pair of finite numbers above 0, the first not larger than the second, nor that than ``most``.

    Raises:
        ValueError: It is not.
    """
    numbers = tuple(value) if isinstance(value, list | tuple) else ()
    if len(numbers) != 2 or not all(is_number(number) for number in numbers):
        raise ValueError(f"{owner}({name}={value!r}): give two numbers, (smallest, largest).")
    if not 0 < numbers[0] <= numbers[1] <= most:
        limit = "" if most == math.inf else f" <= {most:g}"
        raise ValueError(f"{owner}({name}={value!r}): give (smallest, largest), with 0 < smallest <= largest{limit}.")
    return float(numbers[0]), float(numbers[1])
