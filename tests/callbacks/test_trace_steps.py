"""TraceCallback: which steps it traces, where its files lie, and how it stays out of the way."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import TraceCallback
from lightning_accel.core.clocks import HostClock
from support.measured_runs import loader
from support.traced_runs import Blocks, fit, names, read, traced_steps

# -- which steps -----------------------------------------------------------------------------------------------------


def test_steps_that_follow_each_other_are_one_trace(make_trainer: Any) -> None:
    traces = TraceCallback(steps=[1, 4, 5, 8])
    fit(make_trainer, traces)
    assert traced_steps(traces) == [[1], [4, 5], [8]]


def test_a_number_of_steps_begins_with_the_twentieth(make_trainer: Any) -> None:
    traces = TraceCallback(steps=2)
    fit(make_trainer, traces, data=loader(30))
    assert traced_steps(traces) == [[20, 21]]


def test_steps_are_numbered_across_epochs(make_trainer: Any) -> None:
    traces = TraceCallback(steps=[4, 5])
    fit(make_trainer, traces, data=loader(4), max_epochs=2)
    assert traced_steps(traces) == [[4, 5]]


def test_validation_is_in_no_trace(make_trainer: Any) -> None:
    traces = TraceCallback(steps=range(3, 7))
    fit(make_trainer, traces, val_check_interval=4, validates=loader(2), num_sanity_val_steps=0)
    assert traced_steps(traces) == [[3, 4], [5, 6]]
    assert all(name.count("validation_step") == 0 for file in traces.files for name in names(read(file)))


def test_a_trace_that_validation_comes_before_begins_after_it(make_trainer: Any) -> None:
    traces = TraceCallback(steps=[5])
    fit(make_trainer, traces, val_check_interval=4, validates=loader(2), num_sanity_val_steps=0)
    assert traced_steps(traces) == [[5]]


def test_every_fit_has_traces_of_its_own(make_trainer: Any) -> None:
    traces = TraceCallback(steps=[2])
    for _ in range(2):
        fit(make_trainer, traces)
    assert traced_steps(traces) == [[2], [2]]
    assert len(set(traces.files)) == 2


class SetClock(HostClock):
    """Goes as the steps say: no test rests on how long one really takes."""

    now_ms = 0.0
    unit_ms = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.mark = lambda: self.now_ms


@pytest.fixture
def slow_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes steps take 10 ms, and some of them 31."""
    clock = SetClock()
    monkeypatch.setattr("lightning_accel.callbacks._fit_timeline.clock_for", lambda device: clock)

    def hook(*steps: int) -> Any:
        def takes(module: Any, batch_idx: int) -> None:
            clock.now_ms += 31 if batch_idx + 1 in steps else 10

        return takes

    hook.clock = clock  # type: ignore[attr-defined]
    return hook


def test_a_slow_step_has_the_next_ones_traced(make_trainer: Any, slow_at: Any) -> None:
    traces = TraceCallback(steps=2, on="slow")
    fit(make_trainer, traces, Blocks(slow_at(22)), loader(28))
    assert traced_steps(traces) == [[23, 24]]
    assert read(*traces.files)["lightning_accel"]["why"] == "step 22 took 31 ms, the median is 10 ms"


def test_slow_steps_are_traced_so_many_times_at_most(make_trainer: Any, slow_at: Any) -> None:
    traces = TraceCallback(steps=1, on="slow", at_most=2)
    fit(make_trainer, traces, Blocks(slow_at(20, 25, 30, 35)), loader(40))
    assert traced_steps(traces) == [[21], [26]]


def test_the_first_steps_are_slow_without_being_traced(make_trainer: Any, slow_at: Any) -> None:
    traces = TraceCallback(on="slow")
    fit(make_trainer, traces, Blocks(slow_at(1, 2, 5)), loader(24))
    assert traces.files == []


def test_a_validation_between_two_steps_makes_no_step_slow(make_trainer: Any, slow_at: Any) -> None:
    class Validates(Blocks):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            slow_at.clock.now_ms += 1_000

    traces = TraceCallback(on="slow")
    options = {"val_check_interval": 20, "validates": loader(1), "num_sanity_val_steps": 0}
    fit(make_trainer, traces, Validates(slow_at()), loader(24), **options)
    assert traces.files == []


def signals(at: int) -> Any:
    return lambda module, batch_idx: os.kill(os.getpid(), signal.SIGUSR2) if batch_idx + 1 == at else None


def test_a_signal_has_the_next_steps_traced(make_trainer: Any) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    traces = TraceCallback(steps=2, on="signal")
    fit(make_trainer, traces, Blocks(signals(at=3)))
    assert traced_steps(traces) == [[4, 5]]
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_handler_that_is_there_already_stays(make_trainer: Any, capfd: Any) -> None:
    came = []
    before = signal.signal(signal.SIGUSR2, lambda *_: came.append(1))
    try:
        plugin, traces = AccelPlugin(trust="checked"), TraceCallback(on="signal")
        fit(make_trainer, traces, Blocks(signals(at=3)), plugins=[plugin])
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert (came, traces.files) == ([1], [])
    assert any("SIGUSR2 has a handler already" in note for note in plugin.report.notes)


def test_a_fit_in_another_thread_goes_on_without_a_signal(make_trainer: Any) -> None:
    plugin, traces = AccelPlugin(trust="checked"), TraceCallback(on="signal")
    ended = []

    def run() -> None:
        fit(make_trainer, traces, plugins=[plugin])
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended
    assert any("only the main thread gets signals" in note for note in plugin.report.notes)


# -- where the files are ---------------------------------------------------------------------------------------------


def test_files_lie_in_the_folder_of_the_logger(make_trainer: Any, tmp_path: Path) -> None:
    traces = TraceCallback(steps=[2])
    trainer = fit(make_trainer, traces, logger=CSVLogger(tmp_path))
    (file,) = traces.files
    assert file.parent == Path(trainer.logger.log_dir) / "accel"
    assert file.name.endswith("-step2-rank0.json.gz")
    assert list(file.parent.glob(".*")) == []  # nothing temporary is left


def test_files_lie_in_the_default_folder_without_a_logger(make_trainer: Any, tmp_path: Path) -> None:
    traces = TraceCallback(steps=[2])
    fit(make_trainer, traces, default_root_dir=tmp_path)
    assert traces.files[0].parent == tmp_path / "accel"


def test_a_folder_that_cannot_be_written_is_said_once_and_the_run_goes_on(make_trainer: Any, tmp_path: Path) -> None:
    (tmp_path / "accel").write_text("a file where the folder would be")
    plugin, traces = AccelPlugin(trust="checked", report=False), TraceCallback(steps=[2, 4])
    trainer = fit(make_trainer, traces, default_root_dir=tmp_path, plugins=[plugin])
    assert trainer.global_step == 8
    assert traces.files == []
    assert len([note for note in plugin.report.notes if "could not be traced" in note]) == 1


def test_a_remote_folder_is_said_once(make_trainer: Any) -> None:
    plugin, traces = AccelPlugin(trust="checked", report=False), TraceCallback(steps=[2])
    fit(make_trainer, traces, default_root_dir="memory://somewhere", plugins=[plugin])
    assert any("writes to local folders" in note for note in plugin.report.notes)


def test_steps_that_a_fit_does_not_have_are_said(make_trainer: Any) -> None:
    plugin, traces = AccelPlugin(trust="checked", report=False), TraceCallback()
    fit(make_trainer, traces, plugins=[plugin])
    (note,) = (note for note in plugin.report.notes if "no step was traced" in note)
    assert "20 to 22" in note
    assert "ended after step 8" in note


def test_a_fit_that_ends_before_the_first_of_its_steps_leaves_no_trace(make_trainer: Any) -> None:
    plugin, traces = AccelPlugin(trust="checked", report=False), TraceCallback(steps=range(5, 8))
    fit(make_trainer, traces, plugins=[plugin], max_steps=4)
    assert traces.files == []
    assert any("ended after step 4" in note for note in plugin.report.notes)


# -- other profilers, errors -----------------------------------------------------------------------------------------


def test_beside_another_profiler_nothing_is_traced_and_the_other_is_whole(make_trainer: Any) -> None:
    plugin, traces = AccelPlugin(trust="checked", report=False), TraceCallback(steps=[2, 3])
    trainer = make_trainer(callbacks=[traces], plugins=[plugin])
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        trainer.fit(Blocks(), loader(4))
    assert traces.files == []
    assert len([note for note in plugin.report.notes if "another profiler is at work" in note]) == 1
    assert sum(event.name == "aten::linear" for event in theirs.events()) >= 12


def test_beside_lightnings_profiler_of_torch_nothing_is_traced(make_trainer: Any, tmp_path: Path) -> None:
    plugin, traces = AccelPlugin(trust="checked", report=False), TraceCallback(steps=[2, 3])
    # It would begin in the seventh step.
    later = PyTorchProfiler(dirpath=tmp_path, schedule=schedule(wait=5, warmup=1, active=1))
    fit(make_trainer, traces, plugins=[plugin], profiler=later)
    assert traces.files == []
    assert len([note for note in plugin.report.notes if "another profiler is at work" in note]) == 1


class Profiles(Callback):
    """Profiles the rest of step 4 and step 5."""

    def __init__(self, *, is_made_before: bool) -> None:
        self.is_made_before = is_made_before
        self.events: list[str] = []

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.is_made_before:
            self.theirs = torch.autograd.profiler.profile()

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Tensor) -> None:
        if trainer.global_step == 3:
            if not self.is_made_before:
                self.theirs = torch.autograd.profiler.profile()
            self.theirs.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 5:
            self.theirs.__exit__(None, None, None)
            self.events = [event.name for event in self.theirs.function_events]


@pytest.mark.parametrize("is_made_before", [False, True])
def test_a_profiler_that_begins_while_steps_are_traced_gets_its_way(make_trainer: Any, is_made_before: bool) -> None:
    plugin, traces = AccelPlugin(trust="checked", report=False), TraceCallback(steps=range(3, 7))
    theirs = Profiles(is_made_before=is_made_before)
    fit(make_trainer, traces, callbacks=[theirs], plugins=[plugin])
    assert "aten::linear" in theirs.events
    # What it has emptied is lost; else the trace is written as far as it goes, and goes on after the other one.
    assert traced_steps(traces) == ([[6]] if is_made_before else [[3], [6]])
    assert any("whose trace is lost" in note for note in plugin.report.notes) == is_made_before


def test_a_step_that_raises_is_in_the_trace_and_nothing_is_left_behind(make_trainer: Any) -> None:
    def fail(module: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise RuntimeError("the user's own")

    traces = TraceCallback(steps=range(3, 6))
    with pytest.raises(RuntimeError, match="the user's own"):
        fit(make_trainer, traces, Blocks(fail))
    (file,) = traces.files
    assert "step 4" in names(read(file))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": "slowly"}, "on='slowly'; did you mean 'slow'"),
        ({"steps": 0}, "steps=0: give how many steps"),
        ({"steps": []}, r"steps=\[\]: give how many steps"),
        ({"steps": [4], "on": "slow"}, r"steps=\[4\] with on='slow'"),
        ({"on": "slow", "at_most": 0}, "at_most=0: give how many traces"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TraceCallback(**options)
