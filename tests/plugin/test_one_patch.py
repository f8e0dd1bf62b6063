"""In a fit with all that the package has, each method of Lightning's objects is patched once."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger, TraceCallback
from support.lightning_models import Supervised, cnn, images

ROOT = Path(__file__).parents[2]
FOLDERS = "lightning_accel/lightning", "lightning_accel/strategies", "callbacks"  # what knows Lightning

MakeTrainer = Callable[..., Any]


class Looks(Callback):
    """Counts, within a fit, the functions of the package in every method of the Trainer's objects."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        fit, epochs = trainer.fit_loop, trainer.fit_loop.epoch_loop
        loops = fit, epochs, epochs.automatic_optimization, epochs.batch_progress
        others = trainer.strategy, trainer.precision_plugin, trainer.profiler, *trainer.loggers, *trainer.callbacks
        for owner in (trainer, *others, *loops, pl_module):
            for name, value in vars(owner).items():
                edits = _edits(value.__func__) if isinstance(value, types.MethodType) else []
                if edits:
                    self.found[f"{type(owner).__name__}.{name}"] = len(edits)


class Hooks(Callback):
    """Has a hook that is to see weights in the user's layout."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None: ...


def _edits(function: Any) -> list[Any]:
    found = []
    while hasattr(function, "__wrapped__"):
        found += [function] if function.__module__.startswith("lightning_accel.") else []
        function = function.__wrapped__
    return found


def test_each_method_of_lightnings_is_patched_once(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    plugin = AccelPlugin(memory={"on_oom": "split"}, techniques={"memory_format": "channels_last"})
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints")
    callbacks = [TraceCallback(range(2, 4)), SpeedMemoryLogger(), checkpoints, Hooks(), looks := Looks()]
    options: dict[str, Any] = {"logger": CSVLogger(tmp_path), "enable_checkpointing": True, "max_epochs": 2}
    make_trainer(plugins=[plugin], callbacks=callbacks, **options).fit(Supervised(cnn()), images())
    patched = {name.rpartition(".")[2] for name in looks.found}
    assert {"training_step", "backward", "optimizer_step", "batch_to_device", "increment_completed"} <= patched
    assert {"ModelCheckpoint.on_train_batch_end", "PassThroughProfiler.profile"} <= looks.found.keys()
    assert {name: count for name, count in looks.found.items() if count != 1} == {}


def test_callbacks_that_the_user_wrote_are_not_patched(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(techniques={"memory_format": "channels_last"}, report=False)
    make_trainer(plugins=[plugin], callbacks=[Hooks(), looks := Looks()]).fit(Supervised(cnn()), images())
    assert {"Hooks", "Looks"}.isdisjoint(name.partition(".")[0] for name in looks.found)


def test_methods_of_lightnings_are_patched_in_one_file() -> None:
    sources = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
    assert len(sources) > 40
    assert [path.name for path in sources if "MethodPatch(" in path.read_text(encoding="utf-8")] == []
