"""Transforms of any numbers, not of images alone: noise, whitening, windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import Self, override

from lightning_accel.data import batch_paths
from lightning_accel.data.batch import ArrayBatch
from lightning_accel.data.batch_paths import Key, Path
from lightning_accel.data.single_pass import NumpyArray
from lightning_accel.data.tensor_arrays import Array
from lightning_accel.data.transform import Transform, has_channels_last, is_count, is_number
from lightning_accel.ops import gaussian, sliding
from lightning_accel.ops.arrays import tensor_as_numpy

_AT_A_TIME = 1 << 20  # pairs of numbers, so that what is in between stays small


@dataclass(frozen=True, repr=False)
class FeatureTransform(Transform):
    """A transform of floating-point numbers ``(N, …)``.

    Attributes:
        key: The part of the batch: a key of a dict, an index of a tuple, a path of both; None: the one image of
            floating point, or else the one part of floating point with two dimensions or more.
    """

    key: Key | None = field(default=None, kw_only=True)

    def find(self, batch: ArrayBatch) -> Path:
        """Where its part is in the batch."""
        return batch_paths.find_features(batch.structure, type(self).__name__, self.key)


@dataclass(frozen=True, repr=False)
class GaussianNoise(FeatureTransform):
    """Adds normal noise, other numbers in each sample; none where not training.

    Attributes:
        std: Of independent noise, in the units of the data at this place of the chain.
        cov: Or the noise's covariance, ``(D, D)``: over the last axis, for images over the channels.
    """

    std: float | None = None
    cov: Sequence[Sequence[float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.std is None) == (self.cov is None):
            raise ValueError(f"GaussianNoise(std={self.std!r}, cov={self.cov!r}): give one of the two.")
        self._check("std", self.std is None or is_number(self.std, least=0), "a number, 0 or more")
        if self.cov is not None:
            object.__setattr__(self, "cov", _numbers(self.cov))
            _ = self._factor

    @override
    def __call__(self, batch: ArrayBatch) -> None:
        if batch.rng is None:
            return
        path = self.find(batch)
        data = batch.read(path)
        noise = normal(batch.xp, int(batch.rng.integers(2**64, dtype=np.uint64)), data.shape)
        if self.std is not None:
            noise *= np.float32(self.std)
        else:
            factor = batch.arrays.upload(self._factor)
            noise = _over_features(noise, len(factor), "GaussianNoise(cov)", lambda rows: rows @ factor.T)
        batch.write(path, data + noise.astype(data.dtype))

    @cached_property
    def _factor(self) -> NumpyArray:
        return gaussian.cholesky(np.array(self.cov, np.float64), asker="GaussianNoise").astype(np.float32)


@dataclass(frozen=True, repr=False)
class Whiten(FeatureTransform):
    """Takes the mean away and the correlation out: afterwards, the features have covariance 1 over the data.

    ``L⁻¹ (x - mean)`` with ``L Lᵀ`` the covariance (Cholesky). The features are the last axis of ``(N, D)``; of
    ``(N, T, D)`` too, with a mean and a covariance for each of the ``T``; for images, the channels. Made with
    :meth:`fit`::

        Whiten.fit(loader, key="features")

    Attributes:
        mean: ``(D,)`` or ``(T, D)``.
        cov: ``(D, D)`` or ``(T, D, D)``.
    """

    mean: Any = field(repr=False)
    cov: Any = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "cov"):
            object.__setattr__(self, name, _numbers(getattr(self, name)))
        mean, cov = np.array(self.mean).shape, np.array(self.cov).shape
        if len(mean) not in (1, 2) or cov != (*mean, mean[-1]):
            raise ValueError(
                f"Whiten(mean of shape {mean}, cov of shape {cov}): give (D,) and (D, D), or (T, D) and (T, D, D)."
            )
        _ = self._fitted

    @classmethod
    def fit(cls, loader: Iterable[Any], *, key: Key | None = None, eps: float = 1e-5) -> Self:
        """Measures mean and covariance over one pass through ``loader``.

        Args:
            loader: Batches of tensors, as the Trainer gets them.
            key: The part of each batch, as for the transform itself.
            eps: Added to each feature's variance, as a part of it: without it, features that are constant or a
                combination of others have no inverse.

        Raises:
            ValueError: There are no batches, or they do not have one shape.
        """
        count, mean, scatter = 0, np.zeros(1), np.zeros(1)
        for batch in loader:
            rows = _rows(batch_paths.get(batch, batch_paths.find_features(batch, "Whiten.fit", key)))
            if not rows.size:
                continue
            if count and (*rows.shape[:-2], rows.shape[-1]) != mean.shape:
                raise ValueError(f"Whiten.fit: batches of different shapes: {mean.shape} features, then {rows.shape}.")
            # Joined as Chan, Golub and LeVeque (1979) do.
            added, centre = rows.shape[-2], rows.mean(axis=-2)
            rows = rows - centre[..., None, :]
            shift = centre - mean
            between = shift[..., :, None] * shift[..., None, :]
            scatter = scatter + rows.swapaxes(-1, -2) @ rows + between * (count * added / (count + added))
            mean = mean + shift * (added / (count + added))
            count += added
        if not count:
            raise ValueError("Whiten.fit: the loader gave no batch.")
        cov = scatter / max(count - 1, 1)
        variances = np.einsum("...ii->...i", cov)  # a view of the diagonals
        variances += eps * np.where(variances > 0, variances, 1)
        return cls(mean=mean, cov=cov, key=key)

    @override
    def __call__(self, batch: ArrayBatch) -> None:
        path = self.find(batch)
        data = batch.read(path)
        mean, matrix = map(batch.arrays.upload, self._fitted)
        if mean.ndim == 2:
            if data.shape[1:] != mean.shape:
                raise ValueError(f"Whiten: fitted on (N, {mean.shape[0]}, {mean.shape[1]}), given {data.shape}.")
            # (T, N, D) @ (T, D, D): one product for all T.
            white = ((data - mean).swapaxes(0, 1) @ matrix.swapaxes(1, 2)).swapaxes(0, 1)
        else:
            white = _over_features(data, len(mean), "Whiten", lambda rows: (rows - mean) @ matrix.T)
        batch.write(path, white.astype(data.dtype))

    @cached_property
    def _fitted(self) -> tuple[NumpyArray, NumpyArray]:
        """The mean, and the inverse of the covariance's Cholesky factor, float32."""
        factor = gaussian.cholesky(np.array(self.cov, np.float64), asker="Whiten")
        return np.array(self.mean, np.float32), np.linalg.inv(factor).astype(np.float32)


@dataclass(frozen=True, repr=False)
class SlidingWindow(FeatureTransform):
    """Cuts sequences ``(N, T, …)`` into windows ``(N, windows, size, …)``: a view, nothing is copied.

    Windows overlap where ``step`` is smaller than ``size``: what is written into one is then seen in others.

    Attributes:
        size: Of a window, in time steps.
        step: From the beginning of a window to that of the next.
    """

    size: int
    step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("size", "step"):
            self._check(name, is_count(getattr(self, name), least=1), "a number of time steps, 1 or more")

    @override
    def __call__(self, batch: ArrayBatch) -> None:
        path = self.find(batch)
        try:
            # By torch, which has views of every dtype.
            windows = sliding.windows(batch.tensor(path), self.size, self.step, axis=1)
        except ValueError as error:
            raise ValueError(f"{self!r}, of time steps along axis 1: {error}") from None
        batch.write(path, windows.movedim(-1, 2))


def _over_features(data: Array, features: int, owner: str, change: Callable[[Array], Array]) -> Array:
    """``change`` applied to rows of features ``(…, D)``: the last axis, or the channels of images."""
    axis = 1 if data.ndim == 4 and not has_channels_last(data.shape, features) else -1
    if data.shape[axis] != features:
        raise ValueError(f"{owner} is for {features} features, and the data has {data.shape[axis]}: {data.shape}.")
    moved = data.swapaxes(axis, -1)
    return change(moved).swapaxes(axis, -1)


def _rows(part: Tensor) -> NumpyArray:
    """A part of a batch as rows of features ``(…, N, D)``, float64."""
    data = tensor_as_numpy(part.detach().double().cpu())
    if data.ndim == 4:
        data = data if has_channels_last(data.shape) else data.transpose(0, 2, 3, 1)
        return data.reshape(-1, data.shape[-1])
    if data.ndim not in (2, 3):
        raise ValueError(f"Whiten: takes (N, D), (N, T, D) or images of four dimensions, given {data.shape}.")
    return data.swapaxes(0, 1) if data.ndim == 3 else data


def _numbers(values: Any) -> Any:
    """An array or nested lists as tuples of numbers: to be compared, written and read."""
    return _tuples(np.asarray(values, np.float64).tolist())


def _tuples(values: Any) -> Any:
    return tuple(map(_tuples, values)) if isinstance(values, list) else values


def normal(xp: Any, key: int, shape: tuple[int, ...]) -> Array:
    """Standard normal numbers of ``shape``, float32, the same for the same ``key`` of 64 bits.

    A counter run through SplitMix64's output function (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014), and pairs of what comes out through Box and Muller's transform (1958).
    """
    count = math.prod(shape)
    numbers = xp.empty(count + count % 2, np.float32).reshape(2, -1)
    pairs = numbers.shape[1]
    for begin in range(0, pairs, _AT_A_TIME):
        end = min(begin + _AT_A_TIME, pairs)
        bits = _mixed(xp.arange(begin, end, dtype=np.uint64), key)
        # 32 bits each, moved off zero, whose logarithm is none.
        radius = ((bits >> np.uint64(32)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
        turn = (bits & np.uint64(0xFFFFFFFF)).astype(np.float32) * np.float32(2 * math.pi * 2**-32)
        radius = xp.sqrt(-2 * xp.log(xp.minimum(radius, np.float32(1))))
        numbers[0, begin:end] = radius * xp.cos(turn)
        numbers[1, begin:end] = radius * xp.sin(turn)
    return numbers.reshape(-1)[:count].reshape(shape)


def _mixed(counter: Array, key: int) -> Array:
    """64 random bits for each number of the counter, which is overwritten."""
    counter *= np.uint64(0x9E3779B97F4A7C15)
    counter += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        counter ^= counter >> np.uint64(shift)
        counter *= np.uint64(factor)
    counter ^= counter >> np.uint64(31)
    return counter
