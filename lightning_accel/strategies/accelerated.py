"""The common base of the strategies ``accel``, ``accel_ddp`` and ``accel_fsdp``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, cast, get_args

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from typing_extensions import override

from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.lightning.packages import (
    Accelerator,
    CheckpointIO,
    LightningModule,
    Precision,
    Strategy,
    TorchSyncBatchNorm,
    Trainer,
    classes,
    in_order_of,
    in_use,
    own,
    package_of,
)
from lightning_accel.lightning.plugin import AccelPlugin
from lightning_accel.lightning.private import layer_sync, replace_layer_sync
from lightning_accel.resilience.atomic_checkpoint import AtomicCheckpointIO
from lightning_accel.resilience.lost_ranks import Roster, name_lost_ranks
from lightning_accel.resilience.requeue import DeferredSignals, defer_signals
from lightning_accel.strategies.sync_batch_norm import AnyDeviceSyncBatchNorm
from lightning_accel.techniques.mixed_precision import PrecisionSetting

_PRECISIONS = get_args(PrecisionSetting)


class Accelerated(Strategy):
    """A mixin that precedes a Lightning strategy among the bases.

    It adds an ``AccelPlugin()`` if no precision plugin was given, feeds the loops through a
    :class:`~lightning_accel.data.DevicePipeline`, replaces checkpoints atomically, synchronises batch norms on CPUs
    too, handles SLURM's signals between two steps, and names the dead process when a run breaks off.
    """

    wants_pipeline = True  # read by lightning_accel.lightning.batch_transfer
    # Explanations that are added to torch's errors, by a part of their text.
    explanations: ClassVar[Mapping[str, str]] = {
        "Cannot copy out of meta tensor": "The module was made on the meta device: accel_fsdp gives it memory and"
        " values, the other strategies take one that has them."
    }

    timeout: timedelta | None = None  # of collective calls; torch's default if None
    _given_io: CheckpointIO | None = None
    _roster: Roster | None = None
    _deferred: DeferredSignals | None = None

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        # A Trainer sets this first. In a program with both packages, the strategy may have been made for either one.
        # The Trainer keeps the same object, and Python finds methods by its class alone.
        self.__class__ = in_order_of(package_of(accelerator) or in_use(), type(self))
        cast(Any, own(self, Strategy).accelerator).fset(self, accelerator)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        plugin = None if precision_plugin is None else _accelerating(precision_plugin, type(self).__name__)
        # mypy sees no setter through super().
        cast(Any, own(self, Strategy).precision_plugin).fset(self, plugin)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._given_io is None:
            self._given_io = AtomicCheckpointIO()
        return self._given_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._given_io = io
        if getattr(io, "checkpoint_io", io) is None:  # a wrapper without an inner one uses the strategy's
            cast(Any, io).checkpoint_io = AtomicCheckpointIO()

    @property
    def module(self) -> LightningModule:
        """Returns the module of the run."""
        assert self.lightning_module is not None
        return self.lightning_module

    def note(self, line: str) -> None:
        """Adds a line to the report of the run's AccelPlugin."""
        if isinstance(self.precision_plugin, AccelPlugin):
            self.precision_plugin.note(line)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # The process group may have ranks without a part in this run, as for a Trainer on one device after one on many.
        self._roster = Roster.gather() if getattr(self, "world_size", 1) > 1 else None
        if type(layer_sync(self)) in classes(TorchSyncBatchNorm):
            replace_layer_sync(self, AnyDeviceSyncBatchNorm())

    @override
    def process_dataloader(self, dataloader: object) -> object:
        _check_samples(dataloader)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # Lightning has registered its handlers only now, after the setup.
        self._deferred = defer_signals(self.module.trainer, self.timeout)

    @override
    def teardown(self) -> None:
        if self._deferred is not None:
            self._deferred.undo()
            self._deferred = None
        super().teardown()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if Path(checkpoint_path).is_dir():
            raise ValueError(
                f"{checkpoint_path} is a folder of shards, as accel_fsdp writes them: resume with strategy='accel_fsdp'"
                " or put them together: python -m lightning.fabric.utilities.consolidate_checkpoint FOLDER."
            )
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        for part, explanation in self.explanations.items():
            if part in str(exception):
                exception.args = (f"{exception}\n{explanation}",)
        if self._roster is not None:
            name_lost_ranks(exception, self._roster)


def _accelerating(plugin: Precision, strategy: str) -> Precision:
    """Returns ``plugin``, or an AccelPlugin for the Trainer's ``precision=`` if ``plugin`` was made from that."""
    if isinstance(plugin, AccelPlugin):
        return plugin
    asked = _precision_of_trainer()
    if asked is None and type(plugin) in classes(Precision):
        return AccelPlugin()
    if asked is None:
        rank_zero_info(f"{strategy}: {type(plugin).__name__} was given, so the run goes without an AccelPlugin.")
        return plugin
    precision: Any = "32-true" if type(plugin) in classes(Precision) else getattr(plugin, "precision", asked)
    if precision not in _PRECISIONS:
        raise ValueError(
            f"Trainer(precision={asked!r}) with {strategy}: its AccelPlugin takes {', '.join(map(repr, _PRECISIONS))}."
            " Choose one of these, or a strategy of Lightning's own."
        )
    return AccelPlugin(precision=precision)


def _precision_of_trainer() -> Any:
    """Returns the ``precision=`` of the Trainer under construction. None if none was given or no Trainer is being made.

    It reads the Trainer's frame. A strategy gets the plugin that Lightning made, which is the same for a requested
    ``"32-true"`` as for no request, which leaves the choice to us. Lightning stores neither; a test checks this.
    """
    of_trainer = [inspect.unwrap(kind.__init__).__code__ for kind in classes(Trainer)]
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in of_trainer:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get("precision")


def _check_samples(dataloader: object) -> None:
    """Raises a ``ValueError`` if a loader has fewer samples than processes."""
    if not isinstance(dataloader, DataLoader):
        return
    batches = dataloader.batch_sampler  # Lightning's own one for predictions may leave processes without samples
    sampler = batches.sampler if isinstance(batches, BatchSampler) else dataloader.sampler
    if not isinstance(sampler, DistributedSampler):
        return
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    if samples < sampler.num_replicas:
        raise ValueError(
            f"A loader's dataset ({type(sampler.dataset).__name__}) has {samples} samples for {sampler.num_replicas}"
            " processes: some would get none, and the others wait for them. Train on fewer devices, or with a larger"
            " dataset; if it is the validation set, that one."
        )
