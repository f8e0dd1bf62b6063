"""What a viewer of traces shows first: steps, phases and techniques on tracks of their own, each with its name."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import TraceCallback
from lightning_accel.callbacks._phase_patch import PARTS
from lightning_accel.callbacks._ranges import PHASES, PROCESS, STEPS, add_tracks
from lightning_accel.evidence.phase_names import DATA
from support.measured_runs import loader
from support.traced_runs import Blocks, fit, names, read


def tracks(trace: dict[str, Any]) -> dict[str, list[str]]:
    """Track → what is on it, of our process, in the order in which viewers show the tracks."""
    events = trace["traceEvents"]
    (process,) = (e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == PROCESS)
    ours = [event for event in events if event["pid"] == process]
    called = {event["tid"]: event["args"]["name"] for event in ours if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in ours if event["name"] == "thread_sort_index"}
    found: dict[str, list[str]] = defaultdict(list)
    for event in sorted(ours, key=lambda event: (order.get(event["tid"], 0), event["ts"])):
        if event["ph"] == "X":
            found[called[event["tid"]]].append(event["name"])
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of steps 6 and 7 of a run in which one block is checkpointed, and whole steps run under other techniques."""
    from lightning.pytorch import Trainer

    traces = TraceCallback(steps=[6, 7])
    memory = {"checkpoint": "full", "blocks": ["blocks.0"]}
    plugin = AccelPlugin(precision="bf16-mixed", memory=memory, trust="checked", report=False)
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
    folder = tmp_path_factory.mktemp("traced")
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[traces], plugins=[plugin], default_root_dir=folder, **quiet
    )
    trainer.fit(Blocks(), loader(8))
    return read(*traces.files)


def test_steps_and_phases_are_tracks(trace: dict[str, Any]) -> None:
    found = tracks(trace)
    assert list(found)[:2] == [STEPS, PHASES]
    assert found[STEPS] == ["step 6", "step 7"]
    assert found[PHASES] == 2 * [DATA, PARTS["batch_to_device"], "optimizer", "forward", "backward"]


def test_a_technique_is_a_track_of_the_modules_that_it_acts_on(trace: dict[str, Any]) -> None:
    assert tracks(trace)["gradient_checkpointing"] == ["blocks.0", "blocks.0"]


def test_a_technique_that_acts_on_whole_steps_is_a_track_of_steps(trace: dict[str, Any]) -> None:
    assert tracks(trace)["precision"] == ["step 6", "step 7"]


def test_ranges_stay_among_the_operations_of_their_thread(trace: dict[str, Any]) -> None:
    assert "blocks.0 [gradient_checkpointing]" in names(trace)
    assert names(trace).count("forward") == 2


def test_our_process_is_no_other_and_comes_first(trace: dict[str, Any]) -> None:
    events = trace["traceEvents"]
    (ours,) = (e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == PROCESS)
    others = {event["pid"] for event in events if event.get("cat") not in (PROCESS, None)}
    assert ours not in others
    places = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert min(places, key=lambda pid: places[pid]) == ours


def test_ranges_of_two_threads_which_may_overlap_are_on_two_tracks_of_one_name(tmp_path: Path) -> None:
    def ranged(thread: int, ts: float) -> dict[str, Any]:
        return {"ph": "X", "cat": "user_annotation", "name": "forward", "pid": 1, "tid": thread, "ts": ts, "dur": 5.0}

    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [ranged(1, 0.0), ranged(2, 3.0)]}, file)
    add_tracks(path, {"forward"}, {})
    events = read(path)["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == [PHASES, PHASES]
    assert len({event["tid"] for event in events if event.get("cat") == PROCESS}) == 2


def test_a_trace_without_ranges_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [], "lightning_accel": {"steps": []}}, file)
    add_tracks(path, {"forward"}, {})
    assert read(path) == {"traceEvents": [], "lightning_accel": {"steps": []}}


def test_a_trace_that_torch_has_not_written_as_json_is_kept_and_said(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, path: str) -> None:
        with gzip.open(path, "wt") as file:
            file.write('{"traceEvents": [{"dur": nan}]}')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", broken)
    plugin, traces = AccelPlugin(trust="checked", report=False), TraceCallback(steps=[2])
    fit(make_trainer, traces, plugins=[plugin])
    assert gzip.decompress(traces.files[0].read_bytes()) == b'{"traceEvents": [{"dur": nan}]}'
    assert any("has no tracks" in note for note in plugin.report.notes)
