"""benchmarks/rivals.py: what its sides start from, what is said of a tool that is not there, and who is ahead."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

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
def test_sides_that_have_settled_take_turns(part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settled = part("rivals_settled")
    found = settled.measure("mlp", ["plain", "hand"], steps=2, rounds=2)
    assert {side: len(seconds) for side, seconds in found.items()} == {"plain": 2, "hand": 2}
    assert settled.speed(found, "plain", "plain") == ("1.00x", "1.00 to 1.00")


def test_the_clocks_of_a_side_stand_still_while_another_has_the_turn() -> None:
    program = "import time; from _rivals_turns import *; hold_clocks()"
    program += "\nbegan = time.perf_counter(), time.monotonic_ns(); await_turn()"
    program += "\nprint(time.perf_counter() - began[0], (time.monotonic_ns() - began[1]) / 1e9)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=BENCHMARKS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "turn\n"
        time.sleep(2)
        told, _ = process.communicate("\n")
    assert all(float(seconds) < 1 for seconds in told.split())


def test_what_compiles_for_a_minute_is_measured_once(part: Callable[[str], Any]) -> None:
    rounds = part("_rivals_rounds")
    options = rounds.Options(models=["mlp"], sides=["plain", "hand-compile", "accel"], steps=4, rounds=2)
    assert list(map(options.sides_of, range(2))) == [["plain", "hand-compile", "accel"], ["plain", "accel"]]


def measured_runs(part: Callable[[str], Any], **seconds: list[float | None]) -> Any:
    """Of the MLP, by sides: what 1,000 steps took in each round; None is a run that was cut off."""
    rounds = part("_rivals_rounds")

    def run(taken: float | None) -> Any:
        after_s = {"100": 1.0} | ({} if taken is None else {"1000": taken})
        same = {"step_ms": 1.0, "peak_mib": 1.0, "first_loss": 1.0, "last_loss": 0.5, "imports_s": 1.0, "torch": ""}
        return rounds.Run(steps=1000 if taken else 150, after_s=after_s, **same)

    found = {"mlp": {side.replace("_", "-"): [run(taken) for taken in each] for side, each in seconds.items()}}
    options = rounds.Options(models=["mlp"], sides=list(found["mlp"]), steps=1000, rounds=3)
    return rounds.Measured(options=options, found=found)


def test_the_verdict_is_over_the_best_other_side_by_rounds(part: Callable[[str], Any]) -> None:
    tables = part("_rivals_tables")
    measured = measured_runs(
        part, plain=[9.0, 9.0, 9.0], bf16=[12.0, 12.0, 12.0], hand_compile=[5.0, 8.0, 4.8], accel=[5.0, 10.0, 5.0]
    )
    (verdict,) = tables.verdicts(measured)
    best = part("_rivals_sides").SIDES["hand-compile"].title
    assert verdict == ["an MLP", best, "0.96x", "0.80 to 1.00", "0.97x: no", "2.40x"]
    assert len(verdict) == len(tables.verdict_columns(measured))


def test_an_expert_who_keeps_the_trainer_has_a_column(part: Callable[[str], Any]) -> None:
    tables = part("_rivals_tables")
    measured = measured_runs(part, lightning_hand=[8.0], hand=[6.0], accel=[8.0])
    assert tables.verdict_columns(measured)[-1] == "over Lightning, with an expert's changes"
    assert tables.verdicts(measured)[0][-1] == "1.00x"


def test_a_program_that_runs_once_more_is_no_rival_and_has_a_column(part: Callable[[str], Any]) -> None:
    tables = part("_rivals_tables")
    measured = measured_runs(part, plain=[8.0], accel=[8.0], accel_again=[5.0])
    assert tables.verdict_columns(measured)[-1] == "once more, over it"
    assert tables.verdicts(measured)[0][1] == "plain Lightning"
    assert tables.verdicts(measured)[0][-1] == "1.60x"


def test_a_program_that_runs_once_more_finds_what_it_has_left(
    part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = part("_rivals_rounds")

    def process(name: str, side: str, data: Path, has_bf16: bool, options: Any, folder: Path) -> dict[str, Any]:
        found = [*folder.iterdir()]
        (folder / "left").touch()
        return {"at_s": [], "found": len(found)}

    monkeypatch.setattr(rounds, "_process", process)
    found = [rounds._one_run("mlp", side, Path(), False, None)["found"] for side in ("accel", "accel-again")]
    assert found == [0, 1]


def test_a_run_that_was_cut_off_is_no_best_and_has_no_ratio(part: Callable[[str], Any]) -> None:
    tables = part("_rivals_tables")
    measured = measured_runs(part, plain=[9.0], bf16=[None], accel=[9.0])
    assert tables.best_other(measured, "mlp") == "plain"
    assert tables.verdicts(measured)[0][-1] == ""
    (row,) = (row for row in tables.rows(measured) if "bf16" in row[1])
    assert row[3:7] == ["1.0", "cut off", "", ""]
    assert row[-2:] == ["", ""]  # its last loss is of another step


def test_a_gpu_measures_it_by_either_name() -> None:
    assert on_gpu.wanted("rivals") == on_gpu.wanted("gpu_rivals") == ["gpu_rivals"]
