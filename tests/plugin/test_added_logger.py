"""What a Trainer shows of the SpeedMemoryLogger that AccelPlugin has measure: nothing but what loggers are told."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.tuner import Tuner

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger
from support.lightning_models import Supervised, cnn, images

MakeTrainer = Callable[..., Any]


class Logging(Supervised):
    """Logs for the loggers, the callbacks and the progress bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


class Told(DummyLogger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, set[str]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((step, set(metrics)))


class Sees(Callback):
    """Keeps what a callback can see of the others, at the end of every step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        shown = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
        self.seen.append(([type(one) for one in trainer.callbacks], [set(each) for each in shown]))


def is_ours(name: str) -> bool:
    return name.startswith("accel/")


def everything_shown(make_trainer: MakeTrainer, folder: Path, **options: Any) -> Any:
    sees, told = Sees(), Told()
    kept = ModelCheckpoint(folder, save_last=True)
    settings = {"max_epochs": 2, "log_every_n_steps": 1, "enable_checkpointing": True}
    trainer = make_trainer(callbacks=[sees, kept], logger=told, **settings, **options)
    trainer.fit(Logging(cnn()), images(), images())
    sees.on_train_batch_end(trainer)
    saved = torch.load(folder / "last.ckpt", weights_only=False)["callbacks"]
    assert sees.seen[-1][1][0]  # else nothing was compared
    return (
        sees.seen,
        list(saved),
        [call for call in told.calls if not any(map(is_ours, call[1]))],
    )


def test_callbacks_metrics_checkpoints_and_calls_of_a_logger_are_as_plain(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    plain = everything_shown(make_trainer, tmp_path / "plain")
    seen, saved, told = everything_shown(make_trainer, tmp_path / "ours", plugins=[AccelPlugin()])
    assert seen == plain[0]
    assert [key.replace("ours", "plain") for key in saved] == plain[1]
    assert told == plain[2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_last_epoch_stands_in_the_event_file_at_the_step_of_the_users_own_metrics(
    make_trainer: MakeTrainer, accumulated: int
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger, plugin = TensorBoardLogger("."), AccelPlugin(precision="16-mixed")
    options = {"logger": logger, "max_epochs": 2, "accumulate_grad_batches": accumulated}
    make_trainer(plugins=[plugin], **options).fit(Logging(cnn()), images())
    events = EventAccumulator(logger.log_dir).Reload()
    names = {"samples_per_sec", "steps_per_sec", "step_ms_p50", "step_ms_p95"}
    names |= {"loss_scale", "skipped_steps"}
    for name in names:
        steps = [event.step for event in events.Scalars(f"accel/{name}")]
        assert steps == [event.step for event in events.Scalars("loss_epoch")][-1:]  # two epochs of milliseconds


def test_optimizers_that_a_module_steps_itself_are_logged_at_the_users_own_steps(make_trainer: MakeTrainer) -> None:
    class Manual(Logging):
        def __init__(self) -> None:
            super().__init__(cnn())
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]

    told = Told()
    make_trainer(plugins=[AccelPlugin()], logger=told, max_epochs=2).fit(Manual(), images())
    ours = [step for step, names in told.calls if "accel/samples_per_sec" in names]
    assert ours == [step for step, names in told.calls if "loss_epoch" in names][-1:]  # two epochs of milliseconds


def test_the_users_own_is_the_only_one_and_can_be_monitored(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    mine = SpeedMemoryLogger(batch_size_fn=lambda batch: 1)
    kept = ModelCheckpoint(tmp_path, monitor="accel/samples_per_sec", mode="max")
    stopping = EarlyStopping(monitor="accel/peak_memory_mib", mode="max", patience=0, min_delta=1e9)
    options = {"callbacks": [mine, kept, stopping], "enable_checkpointing": True, "max_epochs": 5}
    told = Told()
    make_trainer(plugins=[AccelPlugin()], logger=told, **options).fit(Supervised(cnn()), images())
    assert len(mine.history) == 2  # no gain in the second epoch
    assert kept.best_model_score is not None
    assert sum("accel/samples_per_sec" in names for _, names in told.calls) == 2


def test_log_false_tells_loggers_nothing(make_trainer: MakeTrainer) -> None:
    told = Told()
    make_trainer(plugins=[AccelPlugin(report=False)], logger=told, log_every_n_steps=1).fit(Logging(cnn()), images())
    assert told.calls
    assert not any(is_ours(name) for _, names in told.calls for name in names)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_runs_that_do_not_train_tell_loggers_nothing(make_trainer: MakeTrainer, stage: str) -> None:
    told = Told()
    getattr(make_trainer(plugins=[AccelPlugin()], logger=told), stage)(Supervised(cnn()), images())
    assert not any(is_ours(name) for _, names in told.calls for name in names)


def test_a_barebones_trainer_is_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(plugins=[AccelPlugin()], barebones=True, accelerator="cpu", max_epochs=1)
    trainer.fit(Supervised(cnn()), images())
    assert "accel/" not in capsys.readouterr().out


def test_a_second_fit_of_the_same_trainer_logs_its_own_epochs_alone(make_trainer: MakeTrainer) -> None:
    told, module = Told(), Supervised(cnn())
    trainer = make_trainer(plugins=[AccelPlugin()], logger=told)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, images())
    assert sum("accel/samples_per_sec" in names for _, names in told.calls) == 2


def test_a_logger_that_fails_ends_no_run_and_is_told_of_once(make_trainer: MakeTrainer) -> None:
    class Failing(Told):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            if any(name.startswith("accel/") for name in metrics):
                raise ConnectionError("nobody answers")

    after, plugin = Told(), AccelPlugin()
    make_trainer(plugins=[plugin], logger=[Failing(), after], max_epochs=3).fit(Supervised(cnn()), images())
    assert sum("nobody answers" in note for note in plugin.report.notes) == 1
    assert sum("accel/samples_per_sec" in names for _, names in after.calls) == 1


def test_no_folder_is_made_beside_a_logger_that_is_a_mock(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(plugins=[AccelPlugin()], logger=MagicMock(), default_root_dir=tmp_path).fit(
        Supervised(cnn()), images()
    )
    assert list(tmp_path.iterdir()) == list(Path.cwd().iterdir()) == []


def test_a_strategy_method_that_is_a_mock_stays_one_while_the_run_reads_it(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    class Reads(Callback):
        def on_train_end(self, trainer: Trainer, *_: Any) -> None:
            calls.append(trainer.strategy.backward.call_count)

    calls: list[int] = []
    plugin = AccelPlugin(precision="32-true", memory={"on_oom": "off"})
    trainer = make_trainer(plugins=[plugin], logger=CSVLogger(tmp_path), callbacks=[Reads()])
    trainer.strategy.backward = MagicMock(wraps=trainer.strategy.backward)
    trainer.fit(Supervised(cnn()), images())
    assert calls == [len(images())]


def test_a_clock_that_a_test_has_put_in_the_place_of_pythons_is_not_read(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MagicMock(return_value=0.0)
    plugin = AccelPlugin(techniques={"memory_format": "channels_last"})
    trainer = make_trainer(plugins=[plugin], logger=CSVLogger(tmp_path))
    with monkeypatch.context() as stopped:
        for name in ("perf_counter", "perf_counter_ns", "monotonic", "thread_time_ns"):
            stopped.setattr(time, name, read)
        trainer.fit(Supervised(cnn()), images())
    assert read.call_count == 0


def test_a_mock_in_the_place_of_an_optimizers_step_is_called_as_plain(make_trainer: MakeTrainer) -> None:
    with patch.object(torch.optim.SGD, "step", side_effect=lambda closure: closure()) as step:
        make_trainer(plugins=[AccelPlugin(precision="32-true")]).fit(Supervised(cnn()), images())
    assert step.call_count == len(images())


def test_a_search_for_a_learning_rate_leaves_the_list_of_callbacks_that_there_was(make_trainer: MakeTrainer) -> None:
    told, module = Told(), Supervised(cnn())
    module.lr = 0.1
    trainer = make_trainer(plugins=[AccelPlugin()], logger=told, callbacks=[Sees()])
    before = list(trainer.callbacks)
    Tuner(trainer).lr_find(module, images(), num_training=3)
    assert trainer.callbacks == before
    assert not told.calls


def test_a_search_within_a_fit_is_none_of_its_epochs(make_trainer: MakeTrainer) -> None:
    module, told = Supervised(cnn()), Told()
    module.lr = 0.1
    searches = LearningRateFinder(num_training_steps=3)
    make_trainer(plugins=[AccelPlugin()], logger=told, callbacks=[searches]).fit(module, images())
    assert sum("accel/steps_per_sec" in names for _, names in told.calls) == 1


def test_a_copy_of_the_loop_made_within_the_fit_is_not_listened_to(make_trainer: MakeTrainer) -> None:
    class Copies(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                copy.deepcopy(trainer.fit_loop).on_advance_end()

    told = Told()
    make_trainer(plugins=[AccelPlugin()], logger=told, callbacks=[Copies()]).fit(Supervised(cnn()), images())
    assert sum("accel/samples_per_sec" in names for _, names in told.calls) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fit_that_is_ended_leaves_loops_and_strategy_as_they_were(
    make_trainer: MakeTrainer, error: type[BaseException]
) -> None:
    class Failing(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise error
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(plugins=[AccelPlugin()])
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
            trainer.fit(Failing(cnn()), images())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    for owner in (trainer.fit_loop, trainer.fit_loop.epoch_loop.automatic_optimization, trainer.strategy):
        assert not [name for name, value in vars(owner).items() if hasattr(value, "__wrapped__")]
