"""In a fit with all that the package has, each method of Lightning's objects is patched once."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger, TraceCallback
from support.lightning_models import Supervised, cnn, images

MakeTrainer = Callable[..., Any]


class Looks(Callback):
    """Counts, within a fit, the functions of the package in every method of the Trainer's objects."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        loops = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.automatic_optimization
        for owner in (trainer, trainer.strategy, *loops, *trainer.loggers, pl_module):
            for name, value in vars(owner).items():
                if isinstance(value, types.MethodType):
                    ours = [one for one in _functions(value.__func__) if one.__module__.startswith("lightning_accel.")]
                    self.found[f"{type(owner).__name__}.{name}"] = len(ours)


def _functions(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def test_each_method_of_lightnings_is_patched_once(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    plugin = AccelPlugin(memory={"on_oom": "split"}, techniques={"memory_format": "channels_last"})
    callbacks = [TraceCallback(range(2, 4)), SpeedMemoryLogger(), looks := Looks()]
    trainer = make_trainer(plugins=[plugin], callbacks=callbacks, logger=CSVLogger(tmp_path), max_epochs=2)
    trainer.fit(Supervised(cnn()), images())
    assert {"training_step", "backward", "optimizer_step", "batch_to_device"} <= {
        name.rpartition(".")[2] for name in looks.found
    }
    assert {name: count for name, count in looks.found.items() if count != 1} == {}
