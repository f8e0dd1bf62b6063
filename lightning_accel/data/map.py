"""The user's own function as a transform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from lightning_accel.data import batch_paths
from lightning_accel.data.batch import ArrayBatch
from lightning_accel.data.batch_paths import Key, Path
from lightning_accel.data.transform import Transform


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
