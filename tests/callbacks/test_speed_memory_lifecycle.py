"""SpeedMemoryLogger however a run begins and ends: resumed, repeated, interrupted, cut short."""

from __future__ import annotations

import copy
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_accel.callbacks import SpeedMemoryLogger
from support.measured_runs import ALWAYS_LOGGED, STEP_FLOPS, Model, fit, loader


class SaveAt(Callback):
    """Saves once, in the middle of the first epoch. Unlike ModelCheckpoint it leaves no state in the checkpoint."""

    def __init__(self, path: Path, batch_idx: int) -> None:
        self.path = path
        self.batch_idx = batch_idx

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_a_resumed_epoch_counts_what_is_left(tmp_path: Path) -> None:
    fit(Model(), callbacks=[SaveAt(tmp_path / "third.ckpt", 2)])
    resumed = fit(Model(), fit_options={"ckpt_path": tmp_path / "third.ckpt"}, max_epochs=2)
    assert [(epoch.epoch, epoch.steps) for epoch in resumed.history] == [(0, 5), (1, 8)]


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_a_checkpoint_resumes_without_the_logger(tmp_path: Path) -> None:
    fit(Model(), callbacks=[SaveAt(tmp_path / "third.ckpt", 2)])
    assert torch.load(tmp_path / "third.ckpt", weights_only=True)["callbacks"] == {}
    plain = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, max_epochs=1
    )
    plain.fit(Model(), loader(), ckpt_path=tmp_path / "third.ckpt")  # a missing callback would be a warning


def test_a_second_fit_starts_over_and_keeps_the_history() -> None:
    measured = SpeedMemoryLogger()
    for _ in range(2):
        fit(Model(), callbacks=[measured])
    assert [epoch.flops_per_step for epoch in measured.history] == [STEP_FLOPS] * 2


def test_a_callback_that_joins_late_works() -> None:
    """AccelPlugin adds it in ``convert_module``, after every callback's ``setup``."""
    measured = SpeedMemoryLogger()

    class Joining(Precision):
        def convert_module(self, module: nn.Module) -> nn.Module:
            assert isinstance(module, LightningModule)
            module.trainer.callbacks.insert(0, measured)
            measured.setup(module.trainer, module, "fit")
            return module

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, plugins=[Joining()], **quiet)  # type: ignore[arg-type]
    trainer.fit(Model(), loader())
    assert measured.last is not None
    assert set(trainer.callback_metrics) >= ALWAYS_LOGGED


@pytest.mark.parametrize("batch_idx", [1, 2, 3])
def test_an_exception_leaves_nothing_behind(batch_idx: int) -> None:
    def fail(module: Model, index: int) -> None:
        if index == batch_idx:
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        fit(Model(fail))


def test_an_interrupt_leaves_nothing_behind() -> None:
    def interrupt(module: Model, index: int) -> None:
        if index == 2:
            raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            fit(Model(interrupt))
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on


def test_an_epoch_that_the_module_cuts_short_counts_its_part() -> None:
    class Stopping(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None  # in the very step whose FLOPs were to be counted

    history = fit(Stopping(), max_epochs=3).history
    assert [epoch.steps for epoch in history] == [2, 2, 2]


def test_an_epoch_without_steps_logs_nothing() -> None:
    class Refusing(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            return -1

    assert fit(Refusing()).history == []


def test_the_callback_can_be_copied_and_pickled() -> None:
    measured = SpeedMemoryLogger()
    pickle.loads(pickle.dumps(measured))
    fit(Model(), callbacks=[measured])
    assert copy.deepcopy(measured).history == pickle.loads(pickle.dumps(measured)).history == measured.history


def test_of_two_loggers_the_first_measures() -> None:
    first, second = SpeedMemoryLogger(), SpeedMemoryLogger()
    with pytest.warns(UserWarning, match="more than one SpeedMemoryLogger"):
        fit(Model(), callbacks=[first, second])
    assert (len(first.history), len(second.history)) == (1, 0)


def test_hooks_that_do_nothing_are_passed_over_while_it_measures() -> None:
    """Lightning enters the profiler for every hook of every callback, empty ones too, unless it is None."""
    measured, seen = SpeedMemoryLogger(), []
    fit(Model(lambda *_: seen.append((measured.on_after_backward, measured.on_before_backward))), callbacks=[measured])
    assert set(seen) == {(None, None)}
    assert not {"on_after_backward", "on_before_backward"} & set(vars(measured))


def test_hooks_that_a_subclass_or_a_user_gave_it_are_called() -> None:
    called = []

    class Mine(SpeedMemoryLogger):
        def on_after_backward(self, *_: Any) -> None:
            called.append("subclass")

    measured = Mine()
    measured.on_before_zero_grad = lambda *_: called.append("instance")  # type: ignore[method-assign]
    fit(Model(), loader(1), callbacks=[measured])
    assert called == ["instance", "subclass"]
