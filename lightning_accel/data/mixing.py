"""Transforms that cover parts of images, or blend each image with another of its batch, and their labels alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
from typing_extensions import override

from lightning_accel.data import batch_paths
from lightning_accel.data.batch import ArrayBatch
from lightning_accel.data.batch_paths import Key, Path
from lightning_accel.data.single_pass import NumpyArray
from lightning_accel.data.tensor_arrays import Array, Arrays
from lightning_accel.data.transform import Boxes, ImageTransform, Shape, is_count, is_number, per_sample


@dataclass(frozen=True, repr=False)
class RandomErasing(ImageTransform):
    """Covers a rectangle in each image, with probability ``p``; nothing where not training.

    Zhong et al., "Random erasing data augmentation", AAAI 2020.

    Attributes:
        p: From 0 to 1.
        scale: The rectangle's area as a part of the image's, ``(smallest, largest)``.
        ratio: Its height by its width, ``(smallest, largest)``.
        value: What covers it, in the units of the images at this place of the chain.
    """

    p: float = 0.5
    scale: Sequence[float] = (0.02, 0.33)
    ratio: Sequence[float] = (0.3, 3.3)
    value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("p", is_number(self.p, 0, 1), "a probability, from 0 to 1")
        self._check("value", is_number(self.value), "a number")
        self._check_range("scale", most=1)
        self._check_range("ratio")

    @override
    def draw(self, shape: Shape, rng: np.random.Generator | None) -> Boxes | None:
        if rng is None:
            return None
        area, ratio = shape.areas_and_ratios(rng, self.scale, self.ratio, shape.samples)
        is_erased = rng.random(shape.samples) < self.p
        height = np.sqrt(area * ratio).round().clip(1, shape.height) * is_erased
        width = np.sqrt(area / ratio).round().clip(1, shape.width) * is_erased
        top = rng.integers(0, shape.height - height.astype(int) + 1)
        left = rng.integers(0, shape.width - width.astype(int) + 1)
        return Boxes(top, left, height, width)

    @override
    def apply(self, images: Array, drawn: Boxes, arrays: Arrays) -> Array:
        if images.dtype == np.uint8 and self.value not in range(256):
            raise ValueError(
                f"RandomErasing(value={self.value}) on uint8 images, which hold whole numbers from 0 to 255:"
                " give one of these, or put Normalize before it."
            )
        return arrays.xp.where(_mask(drawn, images.shape, arrays), images.dtype.type(self.value), images)


class Blend(NamedTuple):
    """Which sample each one is blended with, and how much of itself it keeps, ``(N,)`` each."""

    partner: NumpyArray
    kept: NumpyArray
    boxes: Boxes | None = None


@dataclass(frozen=True, repr=False)
class _Blending(ImageTransform):
    """What MixUp and CutMix share: the labels, blended as the images were."""

    alpha: float = 1.0
    num_classes: int | None = None
    label_key: Key | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("alpha", is_number(self.alpha) and self.alpha > 0, "a number above 0")
        is_known = self.num_classes is None or is_count(self.num_classes, least=1)
        self._check("num_classes", is_known, "the number of classes, 1 or more")

    @override
    def __call__(self, batch: ArrayBatch) -> None:
        if batch.rng is None:
            return
        name, path = type(self).__name__, self.find(batch.structure)
        label_path = batch_paths.find_label(batch.structure, name, path, self.num_classes, self.label_key)
        labels, samples = self._probabilities(batch, label_path), len(batch_paths.get(batch.structure, path))
        if len(labels) != samples:
            raise ValueError(f"{name}: {len(labels)} labels for {samples} images.")
        drawn = self.change(batch, path)
        kept, partner = map(batch.arrays.upload, (drawn.kept.astype(np.float32)[:, None], drawn.partner))
        batch.write(label_path, labels * kept + labels[partner] * (1 - kept))

    @override
    def draw(self, shape: Shape, rng: np.random.Generator | None) -> Blend:
        assert rng is not None
        return Blend(rng.permutation(shape.samples), rng.beta(self.alpha, self.alpha, shape.samples))

    def _probabilities(self, batch: ArrayBatch, path: Path) -> Array:
        """The labels as ``(N, num_classes)``, float32."""
        name, labels = type(self).__name__, batch.read(path)
        if labels.ndim == 2:
            if self.num_classes not in (None, labels.shape[1]):
                raise ValueError(
                    f"{name}(num_classes={self.num_classes}): the labels have {labels.shape[1]} probabilities each."
                )
            return labels.astype(np.float32)
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise TypeError(
                f"{name}: the labels are {labels.dtype} {labels.shape};"
                " it takes (N,) of integers, or (N, num_classes) of probabilities."
            )
        if self.num_classes is None:
            raise ValueError(
                f"{name} turns the labels into probabilities, and has to know of how many classes:"
                f" {name}({self.alpha}, num_classes=10), say."
            )
        # On a GPU, looking at them would wait for it; the loss looks at them there.
        if batch.xp is np and labels.size and not 0 <= labels.min() <= labels.max() < self.num_classes:
            raise ValueError(
                f"{name}(num_classes={self.num_classes}): the labels reach from {labels.min()} to {labels.max()};"
                f" allowed: 0 to {self.num_classes - 1}."
            )
        return (labels[:, None] == batch.xp.arange(self.num_classes)).astype(np.float32)


@dataclass(frozen=True, repr=False)
class MixUp(_Blending):
    """Blends each image with another of the batch, and their labels alike; nothing where not training.

    The labels become probabilities ``(N, num_classes)``, float32, as ``cross_entropy`` takes them. Takes floating
    point: put it after ``Normalize``. Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018; with a
    share of its own for each sample.

    Attributes:
        alpha: The shares are drawn from Beta(alpha, alpha): near 0 or 1 when it is small.
        num_classes: How many classes the labels are of; None where they are probabilities already.
        label_key: As ``key``, for the labels.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("float16", "float32", "float64")

    @override
    def apply(self, images: Array, drawn: Blend, arrays: Arrays) -> Array:
        kept = per_sample(drawn.kept.astype(images.dtype), arrays)
        return images * kept + images[arrays.upload(drawn.partner)] * (1 - kept)


@dataclass(frozen=True, repr=False)
class CutMix(_Blending):
    """Puts a rectangle of another image of the batch into each, and blends the labels by its area.

    Nothing where not training. The labels become probabilities, as with :class:`MixUp`. Yun et al., "CutMix:
    regularization strategy to train strong classifiers with localizable features", ICCV 2019; with a rectangle of
    its own for each sample.

    Attributes:
        alpha: The share of the image that is kept is drawn from Beta(alpha, alpha).
        num_classes: How many classes the labels are of; None where they are probabilities already.
        label_key: As ``key``, for the labels.
    """

    @override
    def draw(self, shape: Shape, rng: np.random.Generator | None) -> Blend:
        assert rng is not None
        partner, kept, _ = super().draw(shape, rng)
        side = np.sqrt(1 - kept)
        edges = []
        for size in (shape.height, shape.width):
            centre, extent = rng.integers(0, size, shape.samples), (side * size).astype(int)
            begin = centre - extent // 2
            edges += [begin.clip(0), (begin + extent).clip(0, size) - begin.clip(0)]
        top, height, left, width = edges
        # What lies outside of the image is not put in: the labels go by what is.
        kept = 1 - height * width / (shape.height * shape.width)
        return Blend(partner, kept, Boxes(top, left, height, width))

    @override
    def apply(self, images: Array, drawn: Blend, arrays: Arrays) -> Array:
        assert drawn.boxes is not None
        return arrays.xp.where(_mask(drawn.boxes, images.shape, arrays), images[arrays.upload(drawn.partner)], images)


def _mask(boxes: Boxes, shape: tuple[int, ...], arrays: Arrays) -> Array:
    """Which pixels of images ``(N, C, H, W)`` lie inside, ``(N, 1, H, W)``, bool."""
    top, left, height, width = (per_sample(values.astype(np.int32), arrays) for values in boxes)
    rows = arrays.xp.arange(shape[2]).reshape(1, 1, -1, 1)
    columns = arrays.xp.arange(shape[3]).reshape(1, 1, 1, -1)
    return (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)
