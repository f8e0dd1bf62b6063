"""The demo: four runs that take turns, and a table that says what they measured, flattering nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("tensorboard")

from lightning_accel.claims.machine import machine, slug

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def demo() -> ModuleType:
    return __import__("demo")


@pytest.fixture
def comparison() -> ModuleType:
    return __import__("_comparison")


def a_turn(samples_per_sec: float, peak_memory_mib: float = 800.0) -> Any:
    """What SpeedMemoryLogger says of an epoch, as far as the demo reads it."""
    return SimpleNamespace(
        samples_per_sec=samples_per_sec,
        step_ms_p50=4000.0 / samples_per_sec,
        peak_memory_mib=peak_memory_mib,
        peak_memory_source="this process",
    )


def an_outcome(**changed: Any) -> Any:
    import _turns

    values = {"first_loss": 2.3, "final_loss": 0.5, "final_accuracy": 0.98, **changed}
    return _turns.Outcome(**values)


# -- taking turns ------------------------------------------------------------------------------------------------------


def test_the_side_that_goes_first_changes_from_round_to_round_and_the_first_round_does_not_count(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def take_turn(self) -> Any:
            order.append(self.name)
            return a_turn({"plain": 100.0, "fast": 150.0}[self.name])

    rounds = demo.take_turns({"a model": (Noting("plain"), Noting("fast"))}, 3)
    assert order == ["plain", "fast", "fast", "plain", "plain", "fast", "fast", "plain"]
    assert [(plain.samples_per_sec, fast.samples_per_sec) for plain, fast in rounds["a model"]] == [(100.0, 150.0)] * 3
    assert "not counted" in capsys.readouterr().out.splitlines()[0]


def a_job(folder: Path, **sizes: int) -> Any:
    import _turns

    options = {"epochs": 2, "check_val_every_n_epoch": 2, "limit_train_batches": 4, **sizes}
    return _turns.Job(name="digits", mode="plain", accelerator="cpu", log_dir=folder / "logs", options=options)


@pytest.mark.slow  # over ten seconds
def test_a_run_trains_an_epoch_a_turn_and_tells_what_it_measured(tmp_path: Path) -> None:
    from contextlib import closing

    import _turns

    with closing(_turns.Run(a_job(tmp_path, size=16, batch_size=8))) as run:
        run.wait_for_gate()
        turns = [run.take_turn(), run.take_turn()]
        outcome = run.outcome()
    assert [(turn.epoch, turn.steps) for turn in turns] == [(0, 4), (1, 4)]
    assert turns[1].samples_per_sec
    assert all(turn.peak_memory_mib > 100 for turn in turns)
    assert outcome.final_loss != outcome.first_loss


def test_a_run_that_breaks_off_ends_the_demo_with_what_it_printed(tmp_path: Path) -> None:
    import _turns

    run = _turns.Run(replace(a_job(tmp_path), worker="_no_worker"))
    with pytest.raises(SystemExit, match=r"(?s)digits, plain failed:.*ModuleNotFoundError: .*_no_worker"):
        run.wait_for_gate()
    run.close()


@pytest.mark.slow
def test_a_run_whose_demo_is_broken_off_ends_with_it(tmp_path: Path) -> None:
    """It waits at its gate, and Lightning has taken SIGTERM over: nothing but force ends it."""
    import _turns

    run = _turns.Run(a_job(tmp_path, size=16))
    run.wait_for_gate()
    run.close()
    assert run._process.exitcode is not None


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_round_s_with_its_least_and_its_most(comparison: ModuleType) -> None:
    """The last round was disturbed, and the medians of the sides would compare one round with another."""
    rounds = [(a_turn(100), a_turn(200)), (a_turn(50), a_turn(110)), (a_turn(100), a_turn(50))]
    line = comparison.compare(rounds, an_outcome(), an_outcome()).lines[0]
    assert (line.title, line.plain, line.accelerated) == ("samples/s", "100.0", "110.0")
    assert (line.ratio, line.spread) == ("2.00x", "0.50 to 2.20")


def test_loss_and_accuracy_are_those_of_the_end(comparison: ModuleType) -> None:
    found = comparison.compare(
        [(a_turn(100), a_turn(100))], an_outcome(), an_outcome(final_loss=0.51, final_accuracy=0.97)
    )
    lines = {line.title: (line.plain, line.accelerated, line.ratio) for line in found.lines}
    assert lines["loss before"] == ("2.300", "2.300", "")
    assert lines["loss after"] == ("0.500", "0.510", "+2.0%")
    assert lines["accuracy"] == ("98.0%", "97.0%", "-1.0 points")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([1.3] * 10, "faster in 10 of 10 rounds (1.30x the speed)"),
        ([1.3] * 9 + [0.7], "faster in 9 of 10 rounds (1.30x the speed)"),
        ([1.3] * 8 + [0.7] * 2, "no faster here (1.30x the speed, 0.70 to 1.30)"),
        ([1.02] * 10, "no faster here (1.02x the speed, 1.02 to 1.02)"),
        ([0.9] * 10, "SLOWER here in 10 of 10 rounds (0.90x the speed)"),
    ],
)
def test_what_is_not_clearly_faster_is_not_called_so(comparison: ModuleType, found: list[float], words: str) -> None:
    assert comparison.speed_words(found) == words


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([0.8] * 10, "0.80x the memory"),
        ([1.0] * 10, "no less memory here (1.00x)"),
        ([1.32] * 10, "MORE memory here (1.32x)"),
    ],
)
def test_memory_that_is_not_saved_is_said_to_be_so(comparison: ModuleType, found: list[float], words: str) -> None:
    assert comparison.memory_words(found) == words


def test_the_table_shows_every_line_and_then_what_it_amounts_to(
    demo: ModuleType, comparison: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = {"digits": [(a_turn(100), a_turn(250, 600))]}
    demo.show({"digits": comparison.compare(rounds["digits"], an_outcome(), an_outcome(final_loss=0.51))}, rounds)
    printed = capsys.readouterr().out
    for part in ("2.50x", "0.40x", "0.75x", "+2.0%", "98.0%", "32 a step: faster in 1 of 1 rounds", "this process"):
        assert part in printed


def test_the_table_does_without_rich(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    demo.print_table(("", "plain", "accelerated"), [("samples/s", "100.0", "90.0"), ("loss", "2", "3")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["samples/s", "100.0", "90.0"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(("option", "least"), [("--rounds", 1), ("--batches", 4)])
def test_the_demo_needs_something_to_measure(
    option: str, least: int, demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", f"{option}={least - 1}"])
    with pytest.raises(SystemExit):
        demo.main()
    assert f"{option} {least - 1}: there have to be {least} at least" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_ends_with_its_table_and_a_file_named_by_the_machine(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--rounds=2", "--batches=4", "--accelerator=cpu"]
    done = subprocess.run([*command, "--json=found"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("round 2 of 2", "samples/s", "step p50", "peak memory", "tensorboard", "precision:"):
        assert part in done.stdout
    written = json.loads((tmp_path / "found" / f"{slug(machine())}.json").read_text())
    assert written["models"].keys() == {"digits", "bytes_gpt"}
    for model in written["models"].values():
        turns = [turn for round_ in model["rounds"] for turn in round_.values()]
        assert len(turns) == 4
        assert all(turn["samples_per_sec"] > 0 and turn["peak_memory_mib"] > 100 for turn in turns)
        assert model["outcomes"]["accelerated"]["report"]["techniques"]["precision"]["status"]
    assert list(tmp_path.glob("demo_logs/*/*/*/events.out.tfevents.*"))
