"""TraceCallback: what its files hold, whatever the model and whatever acts on it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger, TraceCallback
from lightning_accel.callbacks._phase_patch import PARTS
from lightning_accel.evidence.phase_names import DATA
from lightning_accel.evidence.record_reader import read_record
from support.measured_runs import Model, loader
from support.traced_runs import Blocks, fit, names, ranges, read, traced_steps


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.layer(batch).sum())
        optimizer.step()
        optimizer.zero_grad()


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
    plugin = AccelPlugin(memory={"checkpoint": "full", "blocks": ["blocks.0"]}, trust="checked", report=False)
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
    fit(make_trainer, traces, Wide(), plugins=[AccelPlugin(precision="32-true", trust="checked", report=False)])
    operations = {event["name"] for event in read(*traces.files)["traceEvents"]}
    assert "aten::relu_" in operations
    assert "aten::relu" not in operations


def test_a_step_that_techniques_try_their_changes_on_can_be_traced(make_trainer: Any) -> None:
    """Names are no hooks, and no compiled code: the same is decided with them and without."""
    reports = []
    for callbacks in ([], [TraceCallback(steps=[1, 2])]):
        torch.manual_seed(0)
        plugin = AccelPlugin(
            memory={"checkpoint": "full"}, techniques={"inplace_activations": "auto"}, trust="checked", report=False
        )
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
    traces, measured = TraceCallback(steps=range(27, 32)), SpeedMemoryLogger()
    callbacks = [traces, measured] if is_first else [measured, traces]
    trainer = make_trainer(callbacks=callbacks, logger=CSVLogger(tmp_path))
    trainer.fit(Blocks(), loader(40))
    assert not PARTS.keys() & vars(trainer.strategy).keys()
    assert traced_steps(traces) == [[27, 28, 29, 30, 31]]
    (some,) = read_record(tmp_path).steps
    assert some.looked_at == 1
    assert set(some.parts_ms) >= {DATA, *PARTS.values()}


def test_accumulated_steps_are_traced(make_trainer: Any) -> None:
    traces = TraceCallback(steps=[5, 6])
    fit(make_trainer, traces, accumulate_grad_batches=2)
    found = names(read(*traces.files))
    assert [found.count(part) for part in ("forward", "backward", "optimizer")] == [2, 2, 1]


def test_memory_is_kept_while_a_gpu_is_traced_and_no_longer(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a device that is simulated: what torch would be asked, and the file."""
    switched: list[bool] = []
    recording = "lightning_accel.callbacks._recording"
    monkeypatch.setattr(f"{recording}.record_memory_history", lambda *, is_on: switched.append(is_on))
    monkeypatch.setattr(f"{recording}.memory_snapshot", lambda: {"device_traces": [[]], "at": list(switched)})
    monkeypatch.setattr(f"{recording}.has_memory_history", lambda device: True)
    traces = TraceCallback(steps=[2])
    fit(make_trainer, traces)
    assert switched == [True, False]
    assert [file.name.split("-")[0] for file in traces.files] == ["trace", "memory"]
    assert pickle.loads(traces.files[1].read_bytes()) == {"device_traces": [[]], "at": [True]}


@pytest.mark.needs_kernels("kernels in torch's profiler")
@pytest.mark.gpu
def test_a_gpu_has_its_kernels_and_its_memory_traced(make_trainer: Any) -> None:
    traces = TraceCallback(steps=[5, 6])
    fit(make_trainer, traces, accelerator="gpu")
    trace, memory = traces.files
    assert any(event.get("cat") == "kernel" for event in read(trace)["traceEvents"])
    assert pickle.loads(memory.read_bytes())["segments"]


def test_the_callback_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(TraceCallback(on="slow"))).files == []
