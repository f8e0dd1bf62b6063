"""Preprocessing in a plain loop: ``handle.batch(batch)`` applies the plan's transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_accel.core.tree import map_tensors
from lightning_accel.data import Position, Preprocess, Transform
from lightning_accel.techniques.base import Technique


class Preprocessing(Technique):
    """Transforms of :mod:`lightning_accel.data`, on every batch that the handle is given.

    Batches of the stage ``"train"`` are counted, and each has random numbers of its own; the others get what is
    deterministic.

    Args:
        transforms: In their order.
        device: Of the model.
        dtype: That the step computes in.
        channels_last: Whether image batches are wanted in that layout, asked at each.
    """

    name: ClassVar[str] = "preprocess"
    acts_without_sites: ClassVar[bool] = True

    def __init__(
        self,
        transforms: Sequence[Transform],
        device: torch.device,
        dtype: torch.dtype,
        channels_last: Callable[[], bool],
    ) -> None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._preprocess = Preprocess(transforms, device=device, dtype=dtype, channels_last=channels_last, rank=rank)
        self._device = device
        self._batches = 0
        self.status = self._preprocess.describe()
        if self._preprocess.complaint:
            self.complaints = (f"preprocess: {self._preprocess.complaint}. Until then NumPy does it on the host.",)

    @override
    def batch(self, batch: Any, stage: str) -> Any:
        position = Position(training=stage == "train", batch_idx=self._batches)
        self._batches += stage == "train"
        batch = self._preprocess(batch, position)
        return map_tensors(lambda tensor: tensor.to(self._device), batch) if self._preprocess.on_host else batch
