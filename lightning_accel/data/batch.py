"""A batch on its way through transforms: of tensors, of arrays where these are asked for, of tensors at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_accel.data import batch_paths
from lightning_accel.data.batch_paths import Path
from lightning_accel.data.tensor_arrays import Array, Arrays


@dataclass(frozen=True, kw_only=True)
class Position:
    """A batch's place in a run.

    Random numbers are derived from it and not from a generator that is handed on: a batch gets the same ones
    whether it is prepared ahead or at once, and after a run was resumed in the middle of an epoch.

    Attributes:
        training: Whether it is trained on; elsewhere only what is deterministic is applied.
        epoch: The epoch's number, from 0.
        batch_idx: The batch's number within the epoch, from 0.
        loader_idx: Which of several loaders it comes from.
    """

    training: bool = True
    epoch: int = 0
    batch_idx: int = 0
    loader_idx: int = 0

    def ahead(self, batches: int) -> Position:
        """The place so many batches later in the same epoch."""
        return replace(self, batch_idx=self.batch_idx + batches)

    def generator(self, seed: int, rank: int = 0) -> np.random.Generator:
        """The random numbers of this batch: the same for the same place, seed and rank, unrelated for any other.

        Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
        """
        words = [seed % 2**64, rank, self.epoch, self.loader_idx, self.batch_idx]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


@dataclass(frozen=True)
class Finish:
    """How normalised images leave the chain."""

    dtype: torch.dtype
    memory_format: torch.memory_format  # of the images as the batch has them

    def of(self, images: Tensor) -> Tensor:
        if images.ndim != 4:  # a Map has made something else of them, or they were cut into windows
            return images.to(self.dtype)
        # With the dtype as it is, `to` alone would leave some layouts that are none of the two.
        return images.to(self.dtype, memory_format=self.memory_format).contiguous(memory_format=self.memory_format)


@dataclass(eq=False)
class ArrayBatch:
    """A batch whose parts become arrays when they are first asked for, and tensors again at the end."""

    structure: Any  # as it is now, of tensors and arrays
    arrays: Arrays  # the library to make arrays with, running
    rng: np.random.Generator | None  # the batch's random numbers; None where nothing random may happen
    channels: Mapping[Path, int]  # how many the images at a path have, where that is known
    # Whether the images at a path have their channels last. Settled when they are first looked at: a crop to three
    # columns must not make columns of what were channels.
    layouts: dict[Path, bool] = field(default_factory=dict, init=False)
    finishes: dict[Path, Finish] = field(default_factory=dict, init=False)  # of the images that were normalised
    _written: set[Path] = field(default_factory=set, init=False)  # among them parts of objects nobody can look into
    _read: dict[int, tuple[Array, Tensor]] = field(default_factory=dict, init=False)  # what was read, and what it was
    # Whose arrays are float32 because no array library has bfloat16.
    _bfloat16_paths: set[Path] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.xp = self.arrays.xp
        arrays = [part for _, part in batch_paths.parts_of(self.structure) if isinstance(part, self.xp.ndarray)]
        self._users_own = {id(array): array for array in arrays}  # these stay arrays

    def read(self, path: Path) -> Array:
        """The part at ``path`` as an array; bfloat16 as float32."""
        part = batch_paths.get(self.structure, path)
        if not isinstance(part, Tensor):
            return part
        array = self.arrays.array(part)
        self._read[id(array)] = array, part
        if part.dtype == torch.bfloat16:
            self._bfloat16_paths.add(path)
        return array

    def write(self, path: Path, value: Any, *, in_float32: bool = False) -> None:
        """Puts an array or a tensor at ``path``; ``in_float32``: of that dtype, even where there was bfloat16."""
        if in_float32:
            self._bfloat16_paths.discard(path)
        self._written.add(path)
        self.structure = batch_paths.put(self.structure, path, value)

    def tensor(self, path: Path) -> Tensor:
        """The part at ``path`` as a tensor, of the dtype that it came in."""
        part = batch_paths.get(self.structure, path)
        return part if isinstance(part, Tensor) else self._as_tensor(path, part)

    def as_arrays(self) -> Any:
        """The whole structure, with arrays for tensors from now on; those that no array can be made of stay."""
        for path, part in list(batch_paths.parts_of(self.structure)):
            if isinstance(part, Tensor):
                with suppress(TypeError, RuntimeError):  # sparse ones, float8 and their like
                    self.write(path, self.read(path))
        return self.structure

    def follow(self, before: Mapping[Path, Any]) -> None:
        """Finds normalised images again after the user's own function; ``before``: the parts that it was given."""
        after = dict(batch_paths.parts_of(self.structure))
        self.layouts = {path: layout for path, layout in self.layouts.items() if after.get(path) is before.get(path)}
        found: dict[Path, Finish] = {}
        for path, finish in self.finishes.items():
            places = [place for place, part in after.items() if part is before[path]]
            if not places and batch_paths.is_floating(after.get(path)):
                places = [path]  # computed from them, in all likelihood
            found |= dict.fromkeys(places, finish)
        self.finishes = found

    def finished(self) -> Any:
        """The structure with a tensor in the place of every array that a transform made, normalised images finished."""
        made = dict(batch_paths.parts_of(self.structure))
        for path in self._written - made.keys():
            with suppress(LookupError):  # a Map has taken it out again
                made[path] = batch_paths.get(self.structure, path)
        for path, part in made.items():
            if isinstance(part, self.xp.ndarray) and id(part) not in self._users_own:
                self.write(path, self._as_tensor(path, part))
        for path, finish in self.finishes.items():
            self.write(path, finish.of(self.tensor(path)))
        return self.structure

    def _as_tensor(self, path: Path, array: Array) -> Tensor:
        _, was = self._read.get(id(array), (None, None))
        if was is not None and was.dtype != torch.bfloat16:
            return was
        tensor = self.arrays.tensor(array)
        was_bfloat16 = was is not None or path in self._bfloat16_paths
        return tensor.bfloat16() if was_bfloat16 and tensor.dtype == torch.float32 else tensor
