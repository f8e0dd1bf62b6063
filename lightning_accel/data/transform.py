"""What a transform is: a small settings object that changes one part of a batch, as arrays of NumPy or CuPy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
from typing_extensions import override

from lightning_accel.data import batch_paths
from lightning_accel.data.batch import ArrayBatch
from lightning_accel.data.batch_paths import Key, Path
from lightning_accel.data.single_pass import NumpyArray, SinglePass
from lightning_accel.data.tensor_arrays import Array, Arrays


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

    def _check(self, name: str, is_right: bool, allowed: str) -> None:
        """Raises a ``ValueError`` that names the setting and what is ``allowed``, unless it is right."""
        if not is_right:
            raise ValueError(f"{type(self).__name__}({name}={getattr(self, name)!r}): give {allowed}.")

    def _check_range(self, name: str, most: float = math.inf) -> None:
        """Makes the setting a pair of numbers, ``0 < smallest <= largest <= most``; else raises a ``ValueError``."""
        value = getattr(self, name)
        is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))
        self._check(name, is_pair, "two numbers, (smallest, largest)")
        smallest, largest = map(float, value)
        limit = "" if most == math.inf else f" <= {most:g}"
        self._check(name, 0 < smallest <= largest <= most, f"(smallest, largest), with 0 < smallest <= largest{limit}")
        object.__setattr__(self, name, (smallest, largest))

    def given(self) -> dict[str, Any]:
        """The settings that are not as they are by default."""
        values = {setting.name: (getattr(self, setting.name), setting.default) for setting in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def __repr__(self) -> str:
        hidden = {setting.name for setting in fields(self) if not setting.repr}
        shown = [f"{name}={value!r}" for name, value in self.given().items() if name not in hidden]
        return f"{type(self).__name__}({', '.join(shown)})"


class Shape(NamedTuple):
    """The shape of a batch of images: samples, channels, height, width."""

    samples: int
    channels: int
    height: int
    width: int

    def areas_and_ratios(
        self, rng: np.random.Generator, scale: Any, ratio: Any, size: int | tuple[int, int]
    ) -> tuple[NumpyArray, NumpyArray]:
        """Of random boxes: areas in pixels, uniform in ``scale`` of the image's; ratios, uniform in their logarithm."""
        (smallest, largest), (flattest, tallest) = scale, np.log(ratio)
        area = self.height * self.width * rng.uniform(smallest, largest, size)
        return area, np.exp(rng.uniform(flattest, tallest, size))


class Boxes(NamedTuple):
    """A part of each sample, in pixels, ``(N,)`` each."""

    top: NumpyArray
    left: NumpyArray
    height: NumpyArray
    width: NumpyArray


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
        """What is to happen to each sample, as NumPy arrays; None: nothing. A ValueError for a wrong shape."""

    @abstractmethod
    def apply(self, images: Array, drawn: Any, arrays: Arrays) -> Array:
        """The images ``(N, C, H, W)`` transformed as drawn."""

    @override
    def __call__(self, batch: ArrayBatch) -> None:
        self.change(batch, self.find(batch.structure))

    def change(self, batch: ArrayBatch, path: Path) -> Any:
        """Transforms the images at ``path``; returns what was drawn for them."""
        images, channels_last = self.images(batch, path)
        drawn = self.draw(Shape(*images.shape), batch.rng)
        if drawn is not None:
            images = self.apply(images, drawn, batch.arrays)
        batch.write(path, images.transpose(0, 2, 3, 1) if channels_last else images)
        return drawn

    def find(self, batch: Any) -> Path:
        """Where its images are in a batch."""
        return batch_paths.find_image(batch, type(self).__name__, self.key)

    def images(self, batch: ArrayBatch, path: Path) -> tuple[Array, bool]:
        """The images as ``(N, C, H, W)``, and whether their channels come last in the batch; checks them."""
        part = batch_paths.get(batch.structure, path)
        if part.ndim != 4:
            raise ValueError(
                f"{type(self).__name__}: the images have shape {tuple(part.shape)}; it takes four dimensions,"
                " (N, C, H, W) or (N, H, W, C). Map(lambda xp, x: x[:, None], key=...) adds an axis of one channel."
            )
        kind = batch_paths.kind_of(part)
        if kind not in self.dtypes and not (kind == "bfloat16" and "float32" in self.dtypes):
            mend = "" if "uint8" in self.dtypes else " Put Normalize before it."
            raise TypeError(f"{type(self).__name__}: the images are {kind}; it takes {', '.join(self.dtypes)}.{mend}")
        images = batch.read(path)
        if path not in batch.layouts:
            batch.layouts[path] = has_channels_last(images.shape, batch.channels.get(path))
        channels_last = batch.layouts[path]
        return (images.transpose(0, 3, 1, 2) if channels_last else images), channels_last


class FusibleTransform(ImageTransform):
    """A transform of images that can be part of a single pass."""

    @abstractmethod
    def compose(self, onto: SinglePass, drawn: Any) -> None:
        """As :meth:`apply`, in a single pass."""


@dataclass(frozen=True, repr=False)
class Map(Transform):
    """The user's own function of the whole batch, or of one part of it, with arrays for tensors.

    It may run on the pipeline's thread, beside the training step: what it draws from a global random generator comes
    in between what dropout draws there.

    Attributes:
        fn: ``fn(xp, batch)`` with ``xp`` ``numpy`` or ``cupy``: returns the batch, of as many samples. In YAML, where
            it can be imported from: ``package.module.function``.
        key: The one part that it is given, and whose place what it returns takes.
        training_only: Whether it is left out of validation, test and prediction.
    """

    fn: Callable[[Any, Any], Any]
    key: Key | None = field(default=None, kw_only=True)
    training_only: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"Map(fn={self.fn!r}): give a function of (xp, batch).")

    @override
    def __call__(self, batch: ArrayBatch) -> None:
        if self.training_only and batch.rng is None:
            return
        path = () if self.key is None else batch_paths.named(batch.structure, self.key, "Map")
        given = batch.as_arrays() if self.key is None else batch.read(path)
        parts_before = dict(batch_paths.parts_of(batch.structure))
        before = _samples(given)
        returned = self.fn(batch.xp, given)
        name = getattr(self.fn, "__qualname__", repr(self.fn))
        if returned is None:
            raise TypeError(f"Map({name}) returned None: it has to return the batch.")
        after = _samples(returned)
        is_alike = before.keys() == after.keys()
        pairs = [(before[path], after[path]) for path in before] if is_alike else []
        if not is_alike and not {*before.values()} & {*after.values()}:
            pairs = [(next(iter(before.values()), 0), next(iter(after.values()), 0))]
        for samples, returned_samples in pairs:
            if samples != returned_samples:
                raise ValueError(
                    f"Map({name}) was given {samples} samples and returned {returned_samples}:"
                    f" {batch_paths.described(returned)}. It has to return as many samples as it is given."
                )
        batch.write(path, returned)
        batch.follow(parts_before)


def _samples(batch: Any) -> dict[Path, int]:
    """The first dimension of every part that has one."""
    found = ((path, part) for path, part in batch_paths.parts_of(batch) if batch_paths.is_array(part) and part.ndim)
    return {path: int(part.shape[0]) for path, part in found}


def has_channels_last(shape: tuple[int, ...], channels: int | None = None) -> bool:
    """Whether images of this shape are ``(N, H, W, C)``; ``channels``: how many there are, where that is known."""
    usual = (1, 3, 4) if channels is None else (channels,)
    return shape[3] in usual and shape[1] not in usual


def per_sample(values: NumpyArray, arrays: Arrays) -> Array:
    """A value per sample, ``(N,)``, uploaded to broadcast against images."""
    return arrays.upload(values).reshape(-1, 1, 1, 1)


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether it is a finite number from ``least`` to ``most``, and no bool."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return is_one and least <= value <= most


def is_count(value: Any, least: int) -> bool:
    """Whether it is an integer of ``least`` or more, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
