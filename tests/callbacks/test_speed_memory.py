"""SpeedMemoryLogger in real training runs."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_accel.callbacks import SpeedMemoryLogger, _clocks, _instruments
from lightning_accel.callbacks._meters import LinuxProcessMemory
from lightning_accel.patch import PatchSet

BATCH_SIZE = 4
STEP_FLOPS = 2 * (2 * BATCH_SIZE * 8 * 2)  # forward, and the gradient of the weight

ALWAYS_LOGGED = {
    "accel/samples_per_sec",
    "accel/steps_per_sec",
    "accel/step_ms_p50",
    "accel/step_ms_p95",
    "accel/data_wait_frac",
    "accel/peak_memory_mib",
    "accel/host_rss_mib",
    "accel/tflops",
}


class SimulatedTime:
    """What the logger takes for the time, so that a busy machine changes nothing: it passes when a test says so."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def perf_counter_ns(self) -> int:
        return round(self.now_ms * 1e6)

    def advance(self, by_ms: float) -> None:
        self.now_ms += by_ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    simulated = SimulatedTime()
    monkeypatch.setattr(_clocks, "time", simulated)
    return simulated


class Vectors(Dataset[Tensor]):
    """``fetch`` is called for every batch's first sample."""

    def __init__(self, batches: int, fetch: Callable[[], None] = lambda: None) -> None:
        self.samples = batches * BATCH_SIZE
        self.fetch = fetch

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        if index % BATCH_SIZE == 0:
            self.fetch()
        return torch.ones(8)


class Stream(IterableDataset[Tensor]):
    """Has no length, so Lightning fetches a batch ahead."""

    def __init__(self, batches: int, fetch: Callable[[], None] = lambda: None) -> None:
        self.vectors = Vectors(batches, fetch)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.vectors[index] for index in range(len(self.vectors)))


def no_hook(module: Model, batch_idx: int) -> None:
    """At module level, because spawned processes unpickle it."""


class Model(LightningModule):
    """A linear layer. ``hook`` is called with the module and the batch's number before each step."""

    def __init__(self, hook: Callable[[Model, int], Any] = no_hook) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.hook = hook

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.hook(self, batch_idx) == "skip":
            return None
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def loader(batches: int = 8, data: Any = None) -> DataLoader[Any]:
    return DataLoader(Vectors(batches) if data is None else data, batch_size=BATCH_SIZE)


def fit(model: LightningModule, data: Any = None, *, fit_options: Any = None, **options: Any) -> SpeedMemoryLogger:
    """Trains on one CPU and returns the Trainer's logger, a new one unless ``callbacks`` has one."""
    callbacks = options.pop("callbacks", [])
    own = [callback for callback in callbacks if isinstance(callback, SpeedMemoryLogger)]
    measured = own[0] if own else SpeedMemoryLogger()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, **quiet, **options}
    trainer = Trainer(callbacks=callbacks if own else [measured, *callbacks], **settings)
    try:
        trainer.fit(model, loader() if data is None else data, **(fit_options or {}))
    finally:
        assert_nothing_left(trainer)
    return measured


def assert_nothing_left(trainer: Trainer) -> None:
    assert _get_current_dispatch_mode_stack() == []
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert not {"_on_before_fetch", "_on_after_fetch"} & set(vars(trainer.fit_loop.epoch_loop))


# Where it is logged


def test_every_logger_gets_every_metric_of_every_epoch(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, table = TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv", flush_logs_every_n_steps=1)
    measured = fit(Model(), max_epochs=2, logger=[board, table], log_every_n_steps=1)
    events = EventAccumulator(board.log_dir).Reload()
    assert {tag for tag in events.Tags()["scalars"] if tag.startswith("accel/")} == ALWAYS_LOGGED
    for name in ALWAYS_LOGGED:
        logged = [event.value for event in events.Scalars(name)]
        assert logged == pytest.approx([epoch.metrics()[name] for epoch in measured.history], rel=1e-6)
    header = (Path(table.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert set(header) >= ALWAYS_LOGGED


def test_without_a_logger_each_epoch_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Model(), max_epochs=2, logger=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("accel/")]
    assert len(lines) == 2
    for words in ("samples/s", "steps/s", "p95", "data wait", "peak", "high-water mark", "host RSS", "TFLOP/s"):
        assert words in lines[0]


def test_with_a_logger_nothing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Model(), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert "accel/" not in capsys.readouterr().out


def test_metrics_can_be_monitored(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, monitor="accel/samples_per_sec", mode="max")
    stopping = EarlyStopping(monitor="accel/peak_memory_mib", mode="max", patience=0, min_delta=1e9)
    measured = fit(Model(), max_epochs=5, callbacks=[checkpoints, stopping], enable_checkpointing=True)
    assert len(measured.history) == 2  # no gain in the second epoch
    assert checkpoints.best_model_score.item() == pytest.approx(max(e.samples_per_sec or 0 for e in measured.history))


def test_a_barebones_trainer_is_measured_and_not_logged_to(capsys: pytest.CaptureFixture[str]) -> None:
    measured = SpeedMemoryLogger()
    trainer = Trainer(barebones=True, accelerator="cpu", devices=1, max_epochs=1, callbacks=[measured])
    trainer.fit(Model(), loader())
    assert measured.last is not None
    assert measured.last.steps == 8
    assert "accel/" not in capsys.readouterr().out


def test_a_fast_development_run_works() -> None:
    assert len(fit(Model(), fast_dev_run=True).history) == 1


def test_validation_alone_is_not_measured() -> None:
    measured = SpeedMemoryLogger()
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[measured])
    trainer.validate(Model(), loader(), verbose=False)
    assert measured.history == []
    assert measured.last is None


# What is measured


def test_the_numbers_of_an_epoch_agree_with_each_other() -> None:
    epoch = fit(Model()).last
    assert epoch is not None
    assert (epoch.epoch, epoch.world_size, epoch.steps, epoch.samples) == (0, 1, 8, 32)
    assert epoch.steps_per_sec == pytest.approx(7 / epoch.train_seconds)  # one was slowed by counting FLOPs
    assert epoch.samples_per_sec == pytest.approx(BATCH_SIZE * epoch.steps_per_sec)
    assert 0 < epoch.step_ms_p50 <= epoch.step_ms_p95 <= 1e3 * epoch.train_seconds
    assert epoch.data_wait_frac is not None
    assert 0 < epoch.data_wait_frac < 1
    assert epoch.flops_per_step == STEP_FLOPS
    assert epoch.tflops == pytest.approx(STEP_FLOPS * epoch.steps_per_sec / 1e12)
    assert epoch.peak_memory_mib > 0
    assert epoch.host_rss_mib > 0
    assert (epoch.mfu, epoch.loss_scale, epoch.skipped_steps, epoch.energy_j_per_sample) == (None,) * 4


def test_fetching_is_waiting_and_the_step_is_not(clock: SimulatedTime) -> None:
    model = Model(lambda module, batch_idx: clock.advance(10))
    data = Vectors(5, fetch=lambda: clock.advance(30))
    for epoch in fit(model, loader(data=data), max_epochs=2).history:
        assert epoch.data_wait_frac == pytest.approx(0.75)
        assert (epoch.step_ms_p50, epoch.step_ms_p95) == pytest.approx((10, 10))
        assert epoch.steps_per_sec == pytest.approx(25)
        assert epoch.samples_per_sec == pytest.approx(100)


def test_a_loader_without_a_length_is_timed_as_well(clock: SimulatedTime) -> None:
    model = Model(lambda module, batch_idx: clock.advance(10))
    data = Stream(6, fetch=lambda: clock.advance(30))
    first, second = fit(model, loader(data=data), max_epochs=2).history
    # Lightning fetches the first batch of the first epoch before training starts, and always one batch ahead: the
    # third step, which is left out for its FLOPs, takes the fetch of the fourth batch with it.
    assert (first.train_seconds, second.train_seconds) == pytest.approx((5 * 0.01 + 4 * 0.03, 6 * 0.01 + 6 * 0.03))
    assert second.data_wait_frac == pytest.approx(0.75)
    assert first.steps == second.steps == 6


@pytest.mark.filterwarnings("ignore:.*dataloader_iter. ")
def test_a_step_that_fetches_for_itself_waits_inside(clock: SimulatedTime) -> None:
    class Fetching(Model):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            clock.advance(10)
            return self.layer(batch).sum()

    epoch = fit(Fetching(), loader(data=Vectors(5, fetch=lambda: clock.advance(30)))).last
    assert epoch is not None
    assert (epoch.steps, epoch.samples) == (5, 20)
    assert epoch.data_wait_frac == pytest.approx(0.75)
    assert epoch.step_ms_p50 == pytest.approx(10)


def test_validation_within_the_epoch_is_not_training_time(clock: SimulatedTime) -> None:
    class Validating(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            clock.advance(1000)

    model = Validating(lambda module, batch_idx: clock.advance(10))
    validation = {"val_dataloaders": loader(1)}
    epoch = fit(model, fit_options=validation, val_check_interval=2, num_sanity_val_steps=0).last
    assert epoch is not None
    assert epoch.steps == 8
    assert epoch.train_seconds == pytest.approx(7 * 0.01)


def test_saving_a_checkpoint_is_not_training_time(tmp_path: Path, clock: SimulatedTime) -> None:
    class SlowToSave(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            clock.advance(1000)

    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    model = SlowToSave(lambda module, batch_idx: clock.advance(10))
    epoch = fit(model, callbacks=[saving], enable_checkpointing=True).last
    assert epoch is not None
    assert epoch.train_seconds == pytest.approx(7 * 0.01)


def test_other_callbacks_between_steps_are_training_time(clock: SimulatedTime) -> None:
    class Slow(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            clock.advance(5)

    epoch = fit(Model(lambda module, batch_idx: clock.advance(10)), callbacks=[Slow()]).last
    assert epoch is not None
    assert epoch.train_seconds == pytest.approx(7 * 0.01 + 6 * 0.005)
    assert epoch.step_ms_p50 == pytest.approx(10)


def test_a_step_is_a_batch_under_gradient_accumulation() -> None:
    model = Model()
    epoch = fit(model, accumulate_grad_batches=4).last
    assert epoch is not None
    assert (epoch.steps, epoch.samples) == (8, 32)
    assert epoch.flops_per_step == STEP_FLOPS


def test_limited_epochs_count_what_they_trained_on() -> None:
    assert [(e.steps, e.samples) for e in fit(Model(), max_epochs=3, limit_train_batches=3).history] == [(3, 12)] * 3


def test_a_run_that_max_steps_ends_counts_its_part() -> None:
    assert [e.steps for e in fit(Model(), max_epochs=-1, max_steps=11).history] == [8, 3]


def test_manual_optimization_is_measured() -> None:
    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).sum())
            optimizer.step()

    epoch = fit(Manual()).last
    assert epoch is not None
    assert (epoch.steps, epoch.flops_per_step) == (8, STEP_FLOPS)


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_a_skipped_step_is_not_the_one_whose_flops_are_counted() -> None:
    epoch = fit(Model(lambda module, batch_idx: "skip" if batch_idx == 2 else None)).last
    assert epoch is not None
    assert epoch.flops_per_step == STEP_FLOPS


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 1},
        {"limit_train_batches": 2},
        {"max_steps": 1},
        {"limit_train_batches": 1, "max_epochs": 2},
    ],
    ids=str,
)
def test_a_very_short_run_is_measured_all_the_same(options: dict[str, Any]) -> None:
    measured = fit(Model(), **options)
    assert measured.last is not None
    assert measured.last.flops_per_step == STEP_FLOPS
    assert all((epoch.samples_per_sec or 0) > 0 for epoch in measured.history)


def test_the_trials_of_a_short_accelerated_run_are_not_taken_for_its_flops() -> None:
    class Plugin(Precision):
        """Stands for AccelPlugin, which tries its changes in the first two steps."""

    Plugin.__module__ = "lightning_accel.plugin"
    assert fit(Model(), limit_train_batches=2, plugins=[Plugin()]).history[0].flops_per_step is None
    assert fit(Model(), limit_train_batches=3, plugins=[Plugin()]).history[0].flops_per_step == STEP_FLOPS


def test_flops_are_counted_in_the_third_step_and_once() -> None:
    modes: list[int] = []
    model = Model(lambda module, batch_idx: modes.append(len(_get_current_dispatch_mode_stack())))
    fit(model, max_epochs=2)
    assert modes == [0, 0, 1] + [0] * 13


def test_the_peak_is_the_epochs_own() -> None:
    if not LinuxProcessMemory.is_permitted():
        pytest.skip("this system does not let a process reset its high-water mark")

    def allocate(module: Model, batch_idx: int) -> None:
        if module.current_epoch == 0:
            torch.ones(400 * 2**20, dtype=torch.uint8)

    first, second = fit(Model(allocate), max_epochs=2).history
    assert first.peak_memory_mib > second.peak_memory_mib + 200
    assert first.peak_memory_source == "process high-water mark, reset per epoch"


def test_batch_size_fn_is_asked() -> None:
    measured = SpeedMemoryLogger(batch_size_fn=lambda batch: 100)
    fit(Model(), callbacks=[measured])
    assert measured.last is not None
    assert measured.last.samples == 800


def test_a_batch_that_is_not_a_tensor_at_all(caplog: pytest.LogCaptureFixture) -> None:
    class Text(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(torch.ones(1, 8)).sum()

    words = fit(Text(), DataLoader(["a", "b", "c", "d", "e"], batch_size=2)).last
    assert words is not None
    assert words.samples == 5
    with caplog.at_level(logging.INFO):
        numbers = fit(Text(), DataLoader([1, 2, 3, 4], batch_size=None, collate_fn=int)).last
    assert numbers is not None
    assert numbers.steps == 4
    assert (numbers.samples, numbers.samples_per_sec) == (None, None)
    assert set(numbers.metrics()) == ALWAYS_LOGGED - {"accel/samples_per_sec"}


class CountingScaler(torch.amp.GradScaler):
    skipped_steps = 0

    def update(self, new_scale: Any = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        self.skipped_steps += self.get_scale() < before


def test_loss_scale_and_skipped_steps_are_of_the_epoch() -> None:
    class Overflowing(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.layer(batch).sum()
            return loss * math.inf if self.current_epoch == 1 and batch_idx < 2 else loss

    scaler = CountingScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    history = fit(Overflowing(), plugins=[plugin], max_epochs=3).history
    assert [epoch.loss_scale for epoch in history] == [1024, 256, 256]
    assert [epoch.skipped_steps for epoch in history] == [0, 2, 0]
    assert {"accel/loss_scale", "accel/skipped_steps"} <= set(history[0].metrics())


# How runs begin and end


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


def test_a_loop_without_fetch_hooks_only_loses_the_wait(monkeypatch: pytest.MonkeyPatch, clock: SimulatedTime) -> None:
    monkeypatch.setattr(_instruments, "_time_fetches", lambda trainer, clock: PatchSet())
    model = Model(lambda module, batch_idx: clock.advance(10))
    epoch = fit(model, loader(data=Vectors(5, fetch=lambda: clock.advance(30)))).last
    assert epoch is not None
    assert epoch.data_wait_frac is None
    # The first fetch is before the first mark, the third step's is left out with that step.
    assert epoch.train_seconds == pytest.approx(4 * 0.01 + 3 * 0.03)
    assert set(epoch.metrics()) == ALWAYS_LOGGED - {"accel/data_wait_frac"}


@pytest.mark.gpu
def test_on_cuda_the_allocator_and_the_devices_clock_are_asked(tmp_path: Path) -> None:
    def allocate(module: Model, batch_idx: int) -> None:
        if module.current_epoch == 0:
            torch.empty(256 * 2**20, dtype=torch.uint8, device=module.device)

    first, second = fit(Model(allocate), accelerator="cuda", max_epochs=2).history
    assert first.peak_memory_source == "device allocator's peak, reset per epoch"
    assert first.peak_memory_mib > 256 > second.peak_memory_mib
    assert first.flops_per_step == STEP_FLOPS
    assert first.steps == 8


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*[Ss]ynchronization debug mode is a prototype")
def test_on_cuda_nothing_synchronises_within_a_step() -> None:
    class Forbid(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            torch.cuda.set_sync_debug_mode("error")

    class Allow(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    measured = SpeedMemoryLogger()
    try:
        # The logger's own hooks run between those of the two.
        fit(Model(), accelerator="cuda", callbacks=[Forbid(), measured, Allow()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert measured.last is not None
    assert measured.last.steps == 8
