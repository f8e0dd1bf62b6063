"""Checkpoints of a sharded module: whole files like a plain Trainer's, or folders of shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accel.core.tree import leaves, map_leaves
from lightning_accel.lightning.packages import LightningOptimizer, ModelParallelStrategy, Strategy, own
from lightning_accel.resilience.atomic_checkpoint import AtomicCheckpointIO, begin_replacing, commit, discard
from lightning_accel.strategies.accelerated import Accelerated


class ShardedCheckpoints(Accelerated, ModelParallelStrategy):
    """The checkpointing of a strategy with a sharded module.

    Lightning's own strategy writes whole files too, but assigns wrong states when it loads an optimizer that does not
    hold all parameters in the model's order.
    """

    _saves_shards = False  # whether a checkpoint is a folder of shards
    _loads_whole_checkpoint = True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return self._loads_whole_checkpoint

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._saves_shards:
            return super().lightning_module_state_dict()
        state: dict[str, Any] = self.module.state_dict()
        parameters = {name: id(parameter) for name, parameter in self.module.named_parameters(remove_duplicate=False)}
        wholes: dict[int, Any] = {}  # tied weights share memory in the checkpoint too
        for name, value in state.items():
            identity = parameters.get(name, id(value))
            if identity not in wholes:
                wholes[identity] = gathered(value, keep=self.is_global_zero)
            state[name] = wholes[identity]
        return state if self.is_global_zero else {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._saves_shards:
            return super().optimizer_state(optimizer)
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state: dict[str, Any] = gathered(inner.state_dict(), keep=self.is_global_zero)
        return state if self.is_global_zero else {}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if not self._saves_shards:
            # Callbacks may hold sharded tensors too, such as averages of the weights.
            checkpoint = gathered(checkpoint, keep=self.is_global_zero)
            own(self, Strategy).save_checkpoint(self, checkpoint, filepath, storage_options)
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
        """Calls ``work`` on rank 0 only; returns its result, or raises its error, on every rank."""
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
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        self._loads_whole_checkpoint = not path.is_dir()
        if path.is_dir():
            try:
                return own(self, ModelParallelStrategy).load_checkpoint(self, path, weights_only)
            except CheckpointException as error:
                reason, _ = next(iter(error.failures.values()))
                raise RuntimeError(f"The checkpoint {path} is of another model: {reason}") from None
        if path.is_file() and type(self.checkpoint_io) is AtomicCheckpointIO:
            # The file is memory-mapped: each rank reads its shards only, and the ranks of a host share its pages.
            loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            return loaded
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._loads_whole_checkpoint:
            return
        own = self.module.state_dict()
        try:
            shards = {name: _as_sharded(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
            self.module.load_state_dict(shards, strict=strict)
        except RuntimeError as error:
            raise RuntimeError(
                f"The checkpoint is of another model: {error}\nLoad it into the model that saved it, or set"
                " strict_loading = False on the module for names that may differ."
            ) from None

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            # The groups have as many parameters, in the same order, as in the saved optimizer.
            places = [place for group in state["param_groups"] for place in group["params"]]
            parameters = dict(
                zip(places, (p for group in optimizer.param_groups for p in group["params"]), strict=False)
            )
            shards = {
                place: {key: _as_sharded(value, parameters.get(place)) for key, value in values.items()}
                for place, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": shards})


def gathered(data: Any, *, keep: bool) -> Any:
    """Returns ``data``, of any structure, with each sharded tensor as a whole one on the CPU. A collective call.

    A rank without ``keep`` only takes part, and gets None for each sharded tensor.
    """

    def whole(tensor: DTensor) -> Tensor | None:
        full = tensor.full_tensor()
        return full.detach().cpu() if keep else None

    has_shards = any(isinstance(leaf, DTensor) for leaf in leaves(data))
    return map_leaves(whole, data, DTensor) if has_shards else data


def _as_sharded(value: Any, like: Any) -> Any:
    """Returns ``value`` sharded like ``like`` if both have the same shape; else ``value`` itself."""
    if not (isinstance(value, Tensor) and isinstance(like, DTensor) and value.shape == like.shape):
        return value
    if isinstance(value, DTensor):
        return value
    # Every rank has the whole tensor, so that nothing is sent.
    return distribute_tensor(value.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None)
