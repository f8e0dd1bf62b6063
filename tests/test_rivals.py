"""benchmarks/rivals.py: what its sides start from, what is said of a tool that is not there, and who is ahead."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import on_gpu

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports one of its modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.medium
def test_sides_start_alike_and_a_tool_that_is_not_there_is_said(
    part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own, as they are measured."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rounds, tables = part("_rivals_rounds"), part("_rivals_tables")
    options = rounds.Options(models=["mlp"], sides=["plain", "hand", "composer"], steps=4, rounds=1)
    (*_, measured) = rounds.measure(options)
    runs = {side: each for side, (each,) in measured.found["mlp"].items()}
    assert set(runs) == {"plain", "hand"}
    assert runs["hand"].first_loss == pytest.approx(runs["plain"].first_loss, rel=0.01)  # in bfloat16 where there is
    assert all(run.steps == 4 and list(run.after_s) == ["4"] and run.peak_mib > 50 for run in runs.values())
    assert [len(row) for row in tables.rows(measured)] == [len(tables.columns(measured))] * 2
    (line,) = tables.missing(measured)
    assert line.startswith("Composer: ")


@pytest.mark.medium
def test_a_side_trains_for_a_turn_when_it_is_told_to(
    part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rounds, turns = part("_rivals_rounds"), part("_rivals_turns")
    net, batches = rounds.CASES["mlp"].built("cpu", 2)
    torch.save((net.state_dict(), batches), tmp_path / "data.pt")
    asked = {"case": "mlp", "data": str(tmp_path / "data.pt"), "has_bf16": False, "device": "cpu"}
    with turns.Turns("hand", {**asked, "steps": 5, "marks": [], "limit_s": 60.0, "turn": 2}) as side:
        *in_turns, told = (side.turn() for _ in range(3))
    assert in_turns == [None, None]
    assert len(told["at_s"]) == 5


def test_the_clocks_of_a_side_stand_still_while_another_has_the_turn() -> None:
    program = """
import time

now_ns = 0
time.perf_counter_ns = time.monotonic_ns = lambda: now_ns
from _held_clocks import hold_clocks, standing

hold_clocks()
now_ns += 3_000_000_000
with standing():
    now_ns += 1_000_000_000_000
print(time.perf_counter(), time.perf_counter_ns(), time.monotonic(), time.monotonic_ns())
"""
    printed = subprocess.run([sys.executable, "-c", program], cwd=BENCHMARKS, check=True, capture_output=True).stdout
    assert printed.decode().split() == ["3.0", "3000000000"] * 2


def test_what_compiles_for_a_minute_is_measured_once(part: Callable[[str], Any]) -> None:
    rounds = part("_rivals_rounds")
    options = rounds.Options(models=["mlp"], sides=["plain", "hand-compile", "accel"], steps=4, rounds=2)
    assert list(map(options.sides_of, range(2))) == [["plain", "hand-compile", "accel"], ["plain", "accel"]]


def measured_runs(
    part: Callable[[str], Any], step_ms: dict[str, float] | None = None, **seconds: list[float | None]
) -> Any:
    """Of the MLP, by sides: what 1,000 steps took in each round (None: a run that was cut off), and a settled step."""
    rounds = part("_rivals_rounds")

    def run(side: str, taken: float | None) -> Any:
        after_s = {"100": 1.0} | ({} if taken is None else {"1000": taken})
        same = {"peak_mib": 1.0, "first_loss": 1.0, "last_loss": 0.5, "imports_s": 1.0, "torch": ""}
        ms = (step_ms or {}).get(side, 1.0)
        return rounds.Run(steps=1000 if taken else 150, after_s=after_s, step_ms=ms, **same)

    found = {"mlp": {side.replace("_", "-"): [run(side, taken) for taken in each] for side, each in seconds.items()}}
    options = rounds.Options(models=["mlp"], sides=list(found["mlp"]), steps=1000, rounds=3)
    return rounds.Measured(options=options, found=found)


def verdict_of(tables: Any, measured: Any) -> dict[str, str]:
    return dict(zip(tables.verdict_columns(measured), *tables.verdicts(measured), strict=True))


def test_the_verdict_is_over_the_best_other_side_by_rounds(part: Callable[[str], Any]) -> None:
    tables = part("_rivals_tables")
    measured = measured_runs(
        part, plain=[9.0, 9.0, 9.0], bf16=[12.0, 12.0, 12.0], hand_compile=[5.0, 8.0, 4.8], accel=[5.0, 10.0, 5.0]
    )
    best = part("_rivals_sides").SIDES["hand-compile"].title
    assert list(verdict_of(tables, measured).values())[:6] == [
        *("an MLP", best, "0.96x", "0.80 to 1.00", "0.97x: no", "2.40x")
    ]


def test_settled_steps_are_beside_the_side_that_is_fastest_then(part: Callable[[str], Any]) -> None:
    tables = part("_rivals_tables")
    measured = measured_runs(part, step_ms={"hand_compile": 0.8}, plain=[9.0], hand_compile=[20.0], accel=[8.0])
    verdict = verdict_of(tables, measured)
    assert verdict["the best other side"] == "plain Lightning"
    assert verdict["the best once settled"] == part("_rivals_sides").SIDES["hand-compile"].title
    assert verdict["settled, over it"] == "0.80x"


def test_an_expert_who_keeps_the_trainer_has_a_column(part: Callable[[str], Any]) -> None:
    tables = part("_rivals_tables")
    measured = measured_runs(part, lightning_hand=[8.0], hand=[6.0], accel=[8.0])
    assert verdict_of(tables, measured)["over Lightning, with an expert's changes"] == "1.00x"


def test_a_program_that_runs_once_more_is_no_rival_and_has_a_column(part: Callable[[str], Any]) -> None:
    tables = part("_rivals_tables")
    measured = measured_runs(part, plain=[8.0], accel=[8.0], accel_again=[5.0])
    verdict = verdict_of(tables, measured)
    assert verdict["the best other side"] == "plain Lightning"
    assert verdict["once more, over it"] == "1.60x"


@pytest.fixture
def turns(part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], Any]:
    """A side's turns, in whose process a script runs."""
    module = part("_rivals_turns")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "_rivals_turns.py"))

    def make(side: str, script: str) -> Any:
        (tmp_path / "_rivals_side.py").write_text(script, encoding="utf-8")
        return module.Turns(side, {"limit_s": 60.0, "turn": 2})

    return make


def test_a_program_that_runs_once_more_finds_what_it_has_left(turns: Callable[[str, str], Any]) -> None:
    script = """
import json, os, pathlib, sys

cache = pathlib.Path(os.environ["LIGHTNING_ACCEL_CACHE"])
found = cache.exists()
cache.mkdir(exist_ok=True)
pathlib.Path(sys.argv[2]).write_text(json.dumps({"at_s": [], "found": found}))
"""
    found = {}
    for name in ("accel", "accel-again"):
        with turns(name, script) as side:
            found[name] = side.turn()["found"]
    assert found == {"accel": False, "accel-again": True}


def test_a_side_that_dies_in_the_turn_of_another_is_said(turns: Callable[[str, str], Any]) -> None:
    script = """
import os, sys

print("\\nturn", flush=True)
sys.stderr.write("MemoryError: all of it was taken")
sys.stderr.flush()
os._exit(1)
"""
    with turns("plain", script) as side:
        assert side.turn() is None
        side._process.wait()
        assert side.turn() == {"failed": "MemoryError: all of it was taken"}


def test_a_run_that_was_cut_off_is_no_best_and_has_no_ratio(part: Callable[[str], Any]) -> None:
    tables = part("_rivals_tables")
    measured = measured_runs(part, plain=[9.0], bf16=[None], accel=[9.0])
    assert tables.best_other(measured, "mlp") == "plain"
    assert verdict_of(tables, measured)['over Lightning, `precision="bf16-mixed"`'] == ""
    (row,) = (row for row in tables.rows(measured) if "bf16" in row[1])
    assert row[4:8] == ["1.0", "cut off", "", ""]
    assert row[-2:] == ["", ""]  # its last loss is of another step


def test_a_gpu_measures_it_by_either_name() -> None:
    assert on_gpu.wanted("rivals") == on_gpu.wanted("gpu_rivals") == ["gpu_rivals"]
