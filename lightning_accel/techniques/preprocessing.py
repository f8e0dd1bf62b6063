"""Preprocessing in a plain loop: ``handle.batch(batch)`` applies the plan's transforms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from typing_extensions import Self, override

from lightning_accel.core.host import Host
from lightning_accel.core.options import Options
from lightning_accel.core.patch import Patch
from lightning_accel.core.ranks import has_ranks
from lightning_accel.core.tree import map_tensors
from lightning_accel.data import Position, Preprocess, Transform
from lightning_accel.data.transform_config import read_transforms
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.registry import register


@dataclass(frozen=True, kw_only=True, repr=False)
class PreprocessOptions(Options):
    """What batches go through.

    Attributes:
        transforms: Transforms of :mod:`lightning_accel.data` that batches go through on the device, each prepared while
            the one before it is trained on (in YAML mappings of ``class_path`` and ``init_args``).
    """

    transforms: Sequence[Transform | dict[str, Any]] | None = ()

    @override
    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", read_transforms(self.transforms))

    @classmethod
    @override
    def read(cls, value: Any, name: str = "") -> Self:
        return value if isinstance(value, cls) else cls(transforms=value)


@register("preprocess", options=PreprocessOptions, off=(), exactness="changes training")
class Preprocessing(Technique):
    """Transforms of :mod:`lightning_accel.data`, on every batch that the handle is given.

    Batches of the stage ``"train"`` are counted, and each has random numbers of its own; the others get what is
    deterministic.
    """

    traits = Traits(acts_without_sites=True, is_part_of_training=True)

    def __init__(self, settings: PreprocessOptions, context: BuildContext) -> None:
        self._transforms = cast(tuple[Transform, ...], settings.transforms)
        self._context = context
        self._preprocess: Preprocess | None = None
        self._batches = 0

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        self._preprocess = Preprocess(
            self._transforms,
            device=self._context.device,
            dtype=self._context.dtype,
            rank=dist.get_rank() if has_ranks() else 0,
        )
        self.run.status = self._preprocess.describe()
        if self._preprocess.complaint:
            self.run.warn(f"preprocess: {self._preprocess.complaint}. Until then NumPy does it on the host.")
        return ()

    @override
    def batch(self, batch: Any, stage: str) -> Any:
        assert self._preprocess is not None
        position = Position(training=stage == "train", batch_idx=self._batches)
        self._batches += stage == "train"
        batch = self._preprocess(batch, position)
        if self._preprocess.on_host:
            batch = map_tensors(lambda tensor: tensor.to(self._context.device), batch)
        return batch
