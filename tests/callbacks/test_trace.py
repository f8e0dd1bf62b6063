"""TraceCallback: which steps it traces, what the files hold, and how it stays out of the way."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger, TraceCallback
from lightning_accel.callbacks._parts import DATA, PARTS
from lightning_accel.core import torch_private
from lightning_accel.core.clocks import StepClock
from lightning_accel.core.profilers import is_profiling
from lightning_accel.core.torch_private import compiled_call
from lightning_accel.evidence.record import read_record
from support.measured_runs import Model, loader


class Blocks(Model):
    """Two blocks of the same kind, and a head."""

    def __init__(self, hook: Any = lambda *_: None) -> None:
        super().__init__(hook)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.hook(self, batch_idx)
        return self.layer(self.blocks(batch)).sum()


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.layer(batch).sum())
        optimizer.step()
        optimizer.zero_grad()


def fit(make_trainer: Any, traces: TraceCallback, model: Model | None = None, data: Any = None, **options: Any) -> Any:
    """Trains, checks that nothing is left of the tracing, and returns the Trainer."""
    model = Blocks() if model is None else model
    validates = {"val_dataloaders": options.pop("validates")} if "validates" in options else {}
    trainer = make_trainer(callbacks=[traces, *options.pop("callbacks", [])], **options)
    strategy = trainer.strategy
    initialised = torch.autograd.profiler.profile.__init__
    try:
        trainer.fit(model, loader(8) if data is None else data, **validates)
    finally:
        assert not PARTS.keys() & vars(strategy).keys()
        assert not {"start", "stop"} & set(vars(trainer.profiler))
        assert all(compiled_call(module) is None for module in model.modules())
        assert torch.autograd.profiler.profile.__init__ is initialised
        assert not is_profiling()
    return trainer


def read(file: Path) -> dict[str, Any]:
    with gzip.open(file, "rt", encoding="utf-8") as text:
        found: dict[str, Any] = json.load(text)
    return found


def ranges(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Those with a name of ours or of somebody's, in the order in which they begin."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation" and event["ph"] == "X"]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def names(trace: dict[str, Any]) -> list[str]:
    return [event["name"] for event in ranges(trace)]


def traced_steps(traces: TraceCallback) -> list[list[int]]:
    return [read(file)["lightning_accel"]["steps"] for file in traces.files]


# -- what is in a trace ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of steps 5 and 6 of a plain run."""
    from lightning.pytorch import Trainer

    folder = tmp_path_factory.mktemp("traced")
    traces = TraceCallback(steps=range(5, 7))
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[traces], default_root_dir=folder, **quiet)
    trainer.fit(Blocks(), loader(8))
    return read(*traces.files)


def test_a_trace_names_the_steps_and_their_parts(trace: dict[str, Any]) -> None:
    found = [name for name in names(trace) if name in (DATA, *PARTS.values()) or name.startswith("step ")]
    # Lightning calls forward and backward from within the optimizer's step.
    parts = [DATA, PARTS["batch_to_device"], "optimizer", "forward", "backward"]
    assert found == ["step 5", *parts, "step 6", *parts]


def test_a_trace_names_modules_that_hold_others_or_have_weights(trace: dict[str, Any]) -> None:
    forward = ["blocks", "blocks.0", "blocks.0.0", "blocks.1", "blocks.1.0", "layer"]
    assert [name for name in names(trace) if name.startswith(("blocks", "layer"))] == 2 * forward


def test_ranges_lie_within_each_other_as_viewers_need_it(trace: dict[str, Any]) -> None:
    open_until: list[float] = []
    for event in ranges(trace):
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 0.01
        open_until.append(event["ts"] + event["dur"])


def test_operations_are_in_the_module_that_calls_them(trace: dict[str, Any]) -> None:
    (first, _) = (event for event in ranges(trace) if event["name"] == "blocks.1.0")
    inside = {
        event["name"]
        for event in trace["traceEvents"]
        if event.get("cat") == "cpu_op" and first["ts"] <= event["ts"] <= first["ts"] + first["dur"]
    }
    assert "aten::linear" in inside
    assert "aten::relu" not in inside


def test_a_trace_says_what_it_is_of(trace: dict[str, Any]) -> None:
    about = trace["lightning_accel"]
    assert about == {"steps": [5, 6], "why": "these steps were asked for", "rank": 0, "report": None}


def test_techniques_are_named_where_they_act(make_trainer: Any) -> None:
    traces = TraceCallback(steps=[6])
    plugin = AccelPlugin(gradient_checkpointing={"mode": "full", "blocks": ["blocks.0"]}, tune="off", log=False)
    fit(make_trainer, traces, plugins=[plugin])
    found = read(*traces.files)
    assert "blocks.0 [gradient_checkpointing]" in names(found)
    assert found["lightning_accel"]["report"]["techniques"]["gradient_checkpointing"]["on"]


def test_activations_go_on_working_in_place_in_a_traced_step(make_trainer: Any) -> None:
    """What counts references must find the frames that it knows, with nothing of ours in between."""

    class Wide(Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 2**14), nn.BatchNorm1d(2**14), nn.ReLU(), nn.Linear(2**14, 2))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).sum()

    traces = TraceCallback(steps=[6])
    fit(make_trainer, traces, Wide(), plugins=[AccelPlugin(tune="off", log=False, precision="32-true")])
    operations = {event["name"] for event in read(*traces.files)["traceEvents"]}
    assert "aten::relu_" in operations
    assert "aten::relu" not in operations


def test_a_step_that_techniques_try_their_changes_on_can_be_traced(make_trainer: Any) -> None:
    """Names are no hooks, and no compiled code: the same is decided with them and without."""
    reports = []
    for callbacks in ([], [TraceCallback(steps=[1, 2])]):
        torch.manual_seed(0)
        plugin = AccelPlugin(tune="off", log=False, inplace_activations="auto", gradient_checkpointing="full")
        make_trainer(callbacks=callbacks, plugins=[plugin]).fit(Blocks(), loader(4))
        reports.append({name: plugin.report.applied(name) for name in plugin.report.techniques})
    assert reports[0] == reports[1]


def test_compiled_blocks_are_named_and_not_compiled_anew(make_trainer: Any) -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = Blocks()
    model.blocks[0].forward = torch.compile(model.blocks[0].forward, backend=backend)  # type: ignore[union-attr]
    traces = TraceCallback(steps=[5])
    fit(make_trainer, traces, model)
    assert "blocks.0" in names(read(*traces.files))
    assert len(compiled) == 1


def test_manual_optimization_is_traced(make_trainer: Any) -> None:
    traces = TraceCallback(steps=[5])
    fit(make_trainer, traces, Manual())
    found = names(read(*traces.files))
    assert [found.count(part) for part in ("forward", "backward", "optimizer")] == [1, 1, 1]


@pytest.mark.parametrize("is_first", [True, False])
def test_steps_whose_parts_the_record_takes_can_be_traced(make_trainer: Any, tmp_path: Path, is_first: bool) -> None:
    """Both are told of a step's parts by one edit, whichever of them ends first."""
    traces, measured = TraceCallback(steps=range(14, 19)), SpeedMemoryLogger()
    callbacks = [traces, measured] if is_first else [measured, traces]
    trainer = make_trainer(callbacks=callbacks, logger=CSVLogger(tmp_path))
    trainer.fit(Blocks(), loader(40))
    assert not PARTS.keys() & vars(trainer.strategy).keys()
    assert traced_steps(traces) == [[14, 15, 16, 17, 18]]
    (some,) = read_record(tmp_path).steps
    assert some.looked_at == 2
    assert set(some.parts_ms) >= {DATA, *PARTS.values()}


def test_accumulated_steps_are_traced(make_trainer: Any) -> None:
    traces = TraceCallback(steps=[5, 6])
    fit(make_trainer, traces, accumulate_grad_batches=2)
    found = names(read(*traces.files))
    assert [found.count(part) for part in ("forward", "backward", "optimizer")] == [2, 2, 1]


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


class SetClock(StepClock):
    """Goes as the steps say: no test rests on how long one really takes."""

    now_ms = 0.0

    def mark(self) -> float:
        return self.now_ms

    def ms_between(self, earlier: float, later: float) -> float:
        return later - earlier


@pytest.fixture
def slow_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes steps take 10 ms, and some of them 31."""
    clock = SetClock()
    monkeypatch.setattr("lightning_accel.callbacks._fit_traces.clock_for", lambda device: clock)

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
        plugin, traces = AccelPlugin(tune="off"), TraceCallback(on="signal")
        fit(make_trainer, traces, Blocks(signals(at=3)), plugins=[plugin])
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert (came, traces.files) == ([1], [])
    assert any("SIGUSR2 has a handler already" in note for note in plugin.report.notes)


def test_a_fit_in_another_thread_goes_on_without_a_signal(make_trainer: Any) -> None:
    plugin, traces = AccelPlugin(tune="off"), TraceCallback(on="signal")
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
    plugin, traces = AccelPlugin(tune="off", log=False), TraceCallback(steps=[2, 4])
    trainer = fit(make_trainer, traces, default_root_dir=tmp_path, plugins=[plugin])
    assert trainer.global_step == 8
    assert traces.files == []
    assert len([note for note in plugin.report.notes if "could not be traced" in note]) == 1


def test_a_remote_folder_is_said_once(make_trainer: Any) -> None:
    plugin, traces = AccelPlugin(tune="off", log=False), TraceCallback(steps=[2])
    fit(make_trainer, traces, default_root_dir="memory://somewhere", plugins=[plugin])
    assert any("writes to local folders" in note for note in plugin.report.notes)


def test_steps_that_a_fit_does_not_have_are_said(make_trainer: Any) -> None:
    plugin, traces = AccelPlugin(tune="off", log=False), TraceCallback()
    fit(make_trainer, traces, plugins=[plugin])
    (note,) = (note for note in plugin.report.notes if "no step was traced" in note)
    assert "20 to 22" in note
    assert "ended after step 8" in note


# -- other profilers, errors -----------------------------------------------------------------------------------------


def test_beside_another_profiler_nothing_is_traced_and_the_other_is_whole(make_trainer: Any) -> None:
    plugin, traces = AccelPlugin(tune="off", log=False), TraceCallback(steps=[2, 3])
    trainer = make_trainer(callbacks=[traces], plugins=[plugin])
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        trainer.fit(Blocks(), loader(4))
    assert traces.files == []
    assert len([note for note in plugin.report.notes if "another profiler is at work" in note]) == 1
    assert sum(event.name == "aten::linear" for event in theirs.events()) >= 12


def test_beside_lightnings_profiler_of_torch_nothing_is_traced(make_trainer: Any, tmp_path: Path) -> None:
    plugin, traces = AccelPlugin(tune="off", log=False), TraceCallback(steps=[2, 3])
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
    plugin, traces = AccelPlugin(tune="off", log=False), TraceCallback(steps=range(3, 7))
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


def test_the_callback_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(TraceCallback(on="slow"))).files == []


def test_memory_is_kept_while_a_gpu_is_traced_and_no_longer(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a device that is simulated: what torch would be asked, and the file."""
    switched: list[bool] = []
    monkeypatch.setattr(torch_private, "record_memory_history", lambda *, is_on: switched.append(is_on))
    monkeypatch.setattr(torch_private, "memory_snapshot", lambda: {"device_traces": [[]], "at": list(switched)})
    monkeypatch.setattr("lightning_accel.callbacks._recording.has_memory_history", lambda device: True)
    traces = TraceCallback(steps=[2])
    fit(make_trainer, traces)
    assert switched == [True, False]
    assert [file.name.split("-")[0] for file in traces.files] == ["trace", "memory"]
    assert pickle.loads(traces.files[1].read_bytes()) == {"device_traces": [[]], "at": [True]}


@pytest.mark.gpu
def test_a_gpu_has_its_kernels_and_its_memory_traced(make_trainer: Any) -> None:
    traces = TraceCallback(steps=[5, 6])
    fit(make_trainer, traces, accelerator="gpu")
    trace, memory = traces.files
    assert any(event.get("cat") == "kernel" for event in read(trace)["traceEvents"])
    assert pickle.loads(memory.read_bytes())["segments"]


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
