"""The strategy ``accel_fsdp``: parameters, gradients and optimizer state sharded over the processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import LBFGS
from typing_extensions import override

from lightning_accel.core.checks import check_names
from lightning_accel.core.patch import AttributePatch
from lightning_accel.lightning.packages import (
    StochasticWeightAveraging,
    Strategy,
    Trainer,
    WeightAveraging,
    callbacks_of,
    in_use,
    is_overridden,
    own,
    rank_zero_warn,
)
from lightning_accel.lightning.private import layer_sync, set_data_parallel_size
from lightning_accel.strategies.accelerated import Accelerated
from lightning_accel.strategies.block_order import BlockOrder
from lightning_accel.strategies.scalars import ReplicatedScalars
from lightning_accel.strategies.sharded_checkpoints import ShardedCheckpoints
from lightning_accel.strategies.sharding import Sharding, is_sharded, shard, shardings
from lightning_accel.techniques.mixed_precision import DTYPES

_CALL_BLOCKS = (
    "Either the weights of a block were used without calling it: call the block, or name what is called,"
    " strategy=AccelFSDPStrategy(blocks=['LayerClass']). Or something copied the module before it was sharded: copy its"
    " state_dict() later. Or use strategy='accel_ddp'."
)
_NO_SHARDED_FORM = (
    "Torch has no form of this operation for sharded tensors. If it is the optimizer's, take another (AdamW, SGD), or"
    " use strategy='accel_ddp'."
)


class AccelFSDPStrategy(ShardedCheckpoints):
    """FSDP2 for an unchanged module: ``Trainer(strategy="accel_fsdp")``.

    The repeated blocks are sharded one by one, then the rest, after AccelPlugin's edits (checkpointing, compilation)
    and before the optimizers are made. In mixed precision, parameters are gathered in bfloat16 or float16 and gradients
    reduced in float32. A module that shards itself in ``configure_model`` is left unchanged.

    The module stays sharded after the run, as it may fit no single device. Checkpoints contain its whole weights and
    are those of a plain Trainer.

    Args:
        blocks: Class names or module paths of the blocks that are sharded one by one; if empty, the repeated blocks.
        save_distributed_checkpoint: Whether a checkpoint is a folder to which every rank writes its shards (see
            :mod:`torch.distributed.checkpoint`), in place of one whole file that rank 0 writes. Both can be resumed on
            another number of processes.
        data_parallel_size: The number of processes to shard over; ``"auto"``: all.
        tensor_parallel_size: As in Lightning's strategy, for modules that parallelise themselves in
            ``configure_model``; 1 for others.
        settings: Those of :class:`~lightning.pytorch.strategies.ModelParallelStrategy`: ``timeout``,
            ``process_group_backend``.
    """

    strategy_name = "accel_fsdp"
    explanations: ClassVar[Mapping[str, str]] = {
        **Accelerated.explanations,
        "got mixed torch.Tensor and DTensor": _CALL_BLOCKS,
        "does not have a sharding strategy registered": _CALL_BLOCKS,
        "Sharding propagation failed": _NO_SHARDED_FORM,
        "in-place operations that require placement changes": _NO_SHARDED_FORM,  # in torch 2.11
        "out of bounds for storage of size 0": "Weights were needed after their block had given them back: a gradient"
        " of gradients (create_graph=True) does that. Use strategy='accel_ddp'.",
    }

    def __init__(
        self,
        *,
        blocks: Sequence[str] = (),
        save_distributed_checkpoint: bool = False,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: int = 1,
        **settings: Any,
    ) -> None:
        allowed = ("process_group_backend", "timeout")
        check_names(settings, allowed=allowed, owner="AccelFSDPStrategy")
        in_use()
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            **settings,
        )
        if isinstance(blocks, str):
            raise TypeError(f"blocks={blocks!r} is a text: give a list of class names or module paths, [{blocks!r}].")
        self.timeout = settings.get("timeout")
        self._blocks = tuple(blocks)
        self._saves_shards = save_distributed_checkpoint
        self._sizes = data_parallel_size, tensor_parallel_size
        self._shards_itself = False  # whether the module shards itself in configure_model
        self._steps_through_root = False
        self._scalars: ReplicatedScalars | None = None
        self._order: BlockOrder | None = None
        self.sharding: Sharding | None = None

    @override
    def setup_environment(self) -> None:
        data_parallel_size, tensor_parallel_size = self._sizes
        if data_parallel_size == "auto":
            set_data_parallel_size(self, self.num_nodes * self.num_processes // tensor_parallel_size)
        super().setup_environment()

    # -- setting up --------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self.module
        _check_callbacks(trainer)
        self._scalars = None
        self._shards_itself = is_overridden("configure_model", module) and is_sharded(module)
        if self._shards_itself:
            super().setup(trainer)
        else:
            sync = layer_sync(self)
            if sync is not None and not is_sharded(module):
                sync.apply(module)
            own(self, Strategy).setup(self, trainer)  # ModelParallelStrategy.setup requires a configure_model
        self._steps_through_root = isinstance(module, FSDPModule) and module.automatic_optimization
        self._order = BlockOrder(module)

    @override
    def model_to_device(self) -> None:
        # By now AccelPlugin has made its edits. The optimizers are made later.
        if not self._shards_itself:
            if is_sharded(self.module):
                self._check_earlier()
            else:
                self._shard()
        super().model_to_device()
        self.barrier()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        if self._shards_itself:
            super().setup_optimizers(trainer)
        else:
            self._scalars = ReplicatedScalars(self.module, self.device_mesh["data_parallel"])
            with self._scalars.for_optimizers():
                super().setup_optimizers(trainer)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise ValueError(
                "LBFGS works on all parameters as one vector, and accel_fsdp has them in shards of different sizes. Use"
                " strategy='accel_ddp', or another optimizer."
            )

    def _check_earlier(self) -> None:
        """Raises an error if an earlier run sharded the module for another dtype, which is fixed."""
        self.sharding = shardings.get(self.module)
        gathered = self.sharding and self.sharding.dtype
        if gathered is not None and gathered != self._dtype:
            raise ValueError(
                f"An earlier run of accel_fsdp sharded the module to be gathered in {gathered}; this one is to compute"
                f" in {self._dtype or torch.float32}. Make a new module, and load that run's checkpoint into it."
            )

    def _shard(self) -> None:
        module = self.module
        if (tensor_parallel_size := self._sizes[1]) != 1:
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size} and no configure_model that parallelises"
                f" {type(module).__name__}: accel_fsdp shards data-parallel only. Leave it at 1, or write the hook."
            )
        self.sharding = shard(
            module,
            self.device_mesh["data_parallel"],
            self.root_device,
            dtype=self._dtype,
            blocks=self._blocks,
            apart=not module.automatic_optimization,
            may_be_empty=module.trainer.ckpt_path is not None,
        )
        units = self.sharding.units
        ends = f" ({units[0]} to {units[-1]})" if units else ""
        self.note(f"accel_fsdp: {len(units)} blocks{ends} are gathered one by one, the rest together")
        for site, reason in self.sharding.left.items():
            self.note(f"accel_fsdp: {site} is not gathered by itself: it {reason}")
        if not units and len(self.sharding.roots) == 1:
            rank_zero_warn(
                f"accel_fsdp found no repeated blocks in {type(module).__name__}: the model is gathered as a whole in"
                " every step, and only gradients and optimizer state take less memory. Name its parts:"
                " strategy=AccelFSDPStrategy(blocks=['encoder', 'decoder'])."
            )

    @property
    def _dtype(self) -> torch.dtype | None:
        return DTYPES.get(getattr(self.precision_plugin, "precision", ""))

    # -- steps -------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._order is not None:
            self._order.begin_step()
        with self.precision_plugin.train_step_context():
            return self._step(self.module.training_step, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._step(self.module.validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._step(self.module.test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._step(self.module.predict_step, args, kwargs)

    def _step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a step as the module's forward if that makes FSDP gather the module's own parameters."""
        if not self._steps_through_root:
            return step(*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            as_forward.undo()
            return step(*args, **kwargs)

        as_forward = AttributePatch("", "step in place of forward", self.module, "forward", run)
        as_forward.apply()
        try:
            return self.module(*args, **kwargs)
        finally:
            as_forward.undo()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._scalars is not None:
            self._scalars.before_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._order is not None:
            self._order.check()
        if self._scalars is not None:
            self._scalars.after_backward()

    @override
    def teardown(self) -> None:
        if self._order is not None:
            self._order.close()
            self._order = None
        super().teardown()


def _check_callbacks(trainer: Trainer) -> None:
    for callback in callbacks_of(trainer, WeightAveraging, StochasticWeightAveraging):
        raise ValueError(
            f"{type(callback).__name__} keeps a copy of the whole module, which it has made before accel_fsdp shards"
            " it. Use strategy='accel_ddp', or train without it."
        )
