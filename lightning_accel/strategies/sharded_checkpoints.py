"""The checkpoints of a sharded module: whole files as a plain Trainer's, or folders of shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accel.resilience.atomic_checkpoint import AtomicCheckpointIO, begin_replacing, commit, discard
from lightning_accel.strategies.full_state import (
    full_model_state,
    gathered,
    load_full_model_state,
    load_full_optimizer_state,
)


class ShardedCheckpoints(ModelParallelStrategy):
    """Mixed into a strategy whose module is sharded, before it.

    Lightning's own writes whole files too, but reads the states of optimizers that do not hold all parameters in the
    model's order into others.
    """

    _loads_whole_checkpoint = True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return self._loads_whole_checkpoint

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        return full_model_state(self.lightning_module, keep=self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state: dict[str, Any] = gathered(inner.state_dict(), keep=self.is_global_zero)
        return state if self.is_global_zero else {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if not self._save_distributed_checkpoint:
            # Callbacks may hold sharded tensors too, averages of the weights say.
            checkpoint = gathered(checkpoint, keep=self.is_global_zero)
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
            return
        target = Path(self.broadcast(filepath))
        folder = self._on_rank_0(lambda: begin_replacing(target))
        try:
            super().save_checkpoint(checkpoint, folder, storage_options)
            self.barrier()
        except BaseException:
            if self.is_global_zero:
                discard(folder)
            raise
        self._on_rank_0(lambda: commit(folder, target))

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns on rank 0, or raises there, on every rank."""
        result: Any = None
        if self.is_global_zero:
            try:
                result = work()
            except OSError as error:
                result = error
        result = self.broadcast(result)
        if isinstance(result, OSError):
            raise result
        return result

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        self._loads_whole_checkpoint = not path.is_dir()
        if path.is_dir():
            try:
                return ModelParallelStrategy.load_checkpoint(self, path, weights_only)
            except CheckpointException as error:
                reason, _ = next(iter(error.failures.values()))
                raise RuntimeError(f"The checkpoint {path} is of another model: {reason}") from None
        if path.is_file() and type(self.checkpoint_io) is AtomicCheckpointIO:
            # Mapped, not read: each rank takes its shards out of the file, and the ranks of a host share its pages.
            loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            return loaded
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._loads_whole_checkpoint:
            load_full_model_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_optimizer_state(optimizer, state)
