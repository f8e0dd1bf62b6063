"""The strategy ``accel_fsdp``: parameters, gradients and optimizer state sharded over the processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_accel.patch import AttributePatch
from lightning_accel.strategies.accelerated import Accelerated
from lightning_accel.strategies.atomic_checkpoint import AtomicCheckpointIO, begin_replacing, commit, discard
from lightning_accel.strategies.full_state import (
    full_model_state,
    gathered,
    load_full_model_state,
    load_full_optimizer_state,
)
from lightning_accel.strategies.scalars import ReplicatedScalars
from lightning_accel.strategies.sharding import Sharding, is_sharded, shard
from lightning_accel.techniques.mixed_precision import DTYPES

_MIXED = "got mixed torch.Tensor and DTensor"


class AccelFSDPStrategy(Accelerated, ModelParallelStrategy):
    """FSDP2 on a module as it is: ``Trainer(strategy="accel_fsdp")``.

    The repeated blocks are sharded one by one, then the rest, after AccelPlugin's edits (checkpointing, compilation)
    and before the optimizers are made. In the mixed precisions parameters are gathered in bfloat16 or float16 and
    gradients reduced in float32. A module whose ``configure_model`` has sharded it itself is left as it is.

    The module stays sharded after the run, as it may fit no single device; its whole weights are in the checkpoints,
    which are those of a plain Trainer.

    Args:
        blocks: What is sharded one by one: class names or module paths; empty: the repeated blocks.
        save_distributed_checkpoint: Whether a checkpoint is a folder to which every rank writes its shards (see
            :mod:`torch.distributed.checkpoint`), in place of one whole file that rank 0 writes. Both can be resumed on
            another number of processes.
        data_parallel_size: Processes to shard over; ``"auto"``: all.
        tensor_parallel_size: As in Lightning's strategy, for modules that parallelise themselves in
            ``configure_model``; others take 1.
        settings: Of :class:`~lightning.pytorch.strategies.ModelParallelStrategy`: ``timeout``,
            ``process_group_backend``.
    """

    strategy_name = "accel_fsdp"

    def __init__(
        self,
        *,
        blocks: Sequence[str] = (),
        save_distributed_checkpoint: bool = False,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **settings,
        )
        self._blocks = tuple(blocks)
        self._steps_through_root = False
        self._scalars: ReplicatedScalars | None = None
        self._loads_whole_checkpoint = True
        self.sharding: Sharding | None = None

    @override
    def setup_environment(self) -> None:
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.num_nodes * self.num_processes // int(self._tensor_parallel_size)
        super().setup_environment()

    # -- setting up --------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        _check_callbacks(trainer)
        if is_overridden("configure_model", module) and is_sharded(module):
            super().setup(trainer)
        else:
            self.accelerator.setup(trainer)
            if self._layer_sync and not is_sharded(module):
                self._layer_sync.apply(module)
            self.precision_plugin.convert_module(module)
            if not is_sharded(module):  # by an earlier run
                self._shard(module, trainer)
            self.model_to_device()
            self.barrier()
            is_fitting = trainer.state.fn == TrainerFn.FITTING
            if is_fitting:
                self._scalars = ReplicatedScalars(module, self.device_mesh["data_parallel"])
                with self._scalars.for_optimizers():
                    self.setup_optimizers(trainer)
            self.setup_precision_plugin()
            if is_fitting:
                _optimizers_to_device(self.optimizers, self.root_device)
        self._steps_through_root = isinstance(module, FSDPModule) and module.automatic_optimization

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise ValueError(
                "LBFGS works on all parameters as one vector, and accel_fsdp has them in shards of different sizes. Use"
                " strategy='accel_ddp', or another optimizer."
            )

    def _shard(self, module: LightningModule, trainer: Trainer) -> None:
        self.sharding = shard(
            module,
            self.device_mesh["data_parallel"],
            self.root_device,
            dtype=DTYPES.get(getattr(self.precision_plugin, "precision", "")),
            blocks=self._blocks,
            apart=not module.automatic_optimization,
            may_be_empty=trainer.ckpt_path is not None,
        )
        units = self.sharding.units
        ends = f" ({units[0]} to {units[-1]})" if units else ""
        self.note(f"accel_fsdp: {len(units)} blocks{ends} are gathered one by one, the rest together")
        for site, reason in self.sharding.left.items():
            self.note(f"accel_fsdp: {site} is not gathered by itself: it {reason}")
        if not self.sharding.units and len(self.sharding.roots) == 1:
            rank_zero_warn(
                f"accel_fsdp found no repeated blocks in {type(module).__name__}: the model is gathered as a whole in"
                " every step, and only gradients and optimizer state take less memory. Name its parts:"
                " strategy=AccelFSDPStrategy(blocks=['encoder', 'decoder'])."
            )

    # -- steps -------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", self.precision_plugin.train_step_context(), args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    def _step(self, name: str, context: AbstractContextManager[Any], args: Any, kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        step = getattr(module, name)
        with context:
            return _through_call(module, step, args, kwargs) if self._steps_through_root else step(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._scalars is not None:
            self._scalars.before_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._scalars is not None:
            self._scalars.after_backward()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if _MIXED in str(exception) and self.sharding is not None:
            exception.args = (
                f"{exception}\nEither the weights of a block were used without calling it (accel_fsdp sharded"
                f" {', '.join(self.sharding.units[:4]) or 'the module as a whole'}): call the block, or name what is"
                " called, strategy=AccelFSDPStrategy(blocks=['LayerClass']). Or something copied the module before it"
                " was sharded: copy its state_dict() later, or use strategy='accel_ddp'.",
            )

    # -- checkpoints -------------------------------------------------------------------------------------------

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
        folder = Path(self.broadcast(begin_replacing(target) if self.is_global_zero else target))
        try:
            super().save_checkpoint(checkpoint, folder, storage_options)
            self.barrier()
        except BaseException:
            if self.is_global_zero:
                discard(folder)
            raise
        if self.is_global_zero:
            commit(folder, target)
        self.barrier()

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        self._loads_whole_checkpoint = not path.is_dir()
        if path.is_dir():
            return super().load_checkpoint(path, weights_only)
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


def _check_callbacks(trainer: Trainer) -> None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} keeps a copy of the whole module, which it has made before accel_fsdp"
                " shards it. Use strategy='accel_ddp', or train without it."
            )


def _through_call(module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls ``method`` as if it were the module's forward, so that FSDP gathers what the module itself holds."""

    def run(*args: Any, **kwargs: Any) -> Any:
        as_method.undo()
        return method(*args, **kwargs)

    as_method = AttributePatch("", "step in place of forward", module, "forward", run)
    as_method.apply()
    try:
        return module(*args, **kwargs)
    finally:
        as_method.undo()
