"""How live trials are measured: the loops of benchmarks/ in simulated time, and what is said of what they found."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan
from support.live_runs import OTHERS_OFF, SimulatedTime, Speed, simulated

STEP_MS = 10
ON, OFF = (("speed", "on"),), ()


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports one of the scripts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def loops(benchmark: Callable[[str], Any]) -> Any:
    return benchmark("_tuning_loop")


@pytest.fixture
def time(loops: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedTime]:
    """What the clocks of the trials and of the loops take for the time."""
    with simulated(1.5) as time:
        monkeypatch.setattr(time, "perf_counter", lambda: time.now_ms / 1e3, raising=False)
        monkeypatch.setattr(loops, "time", time)
        yield time


def task(loops: Any, time: SimulatedTime, *, is_plain: bool = False) -> Any:
    """Steps of 10 ms; of less where the arm is on."""
    module = nn.Linear(8, 2)

    def loss(batch: Tensor) -> Tensor:
        is_faster = not is_plain and Speed.latest.now == "on"
        time.advance(STEP_MS / (Speed.speedup if is_faster else 1.0))
        return module(batch).square().mean()

    return loops.Task(module, loss, itertools.repeat(torch.ones(4, 8)))


def side_by_side(loops: Any, time: SimulatedTime, steps: int) -> tuple[Any, Any]:
    plain = loops.PlainLoop(task(loops, time, is_plain=True))
    tuned = loops.TunedLoop(task(loops, time), Plan().replace(**OTHERS_OFF, trust="checked"), steps)
    both = loops.beside(plain, tuned, steps)
    tuned.close()
    return tuned, both


def test_trials_are_not_disturbed_by_a_loop_that_takes_turns_with_theirs(loops: Any, time: SimulatedTime) -> None:
    tuned, _ = side_by_side(loops, time, 200)
    assert loops.chosen(tuned.tuning) == ON
    assert tuned.tuning.whole.interval.ratio == pytest.approx(1.5, rel=0.02)


def test_what_trials_cost_is_in_the_ratio_to_plain(loops: Any, time: SimulatedTime) -> None:
    Speed.speedup = 0.5
    tuned, both = side_by_side(loops, time, 200)
    assert loops.chosen(tuned.tuning) == OFF
    slow_steps = sum(seconds > 1.5 * STEP_MS / 1e3 for seconds in both.other)
    assert slow_steps > 0
    assert sum(both.plain) / sum(both.other) == pytest.approx(200 / (200 + slow_steps), rel=0.01)
    assert both.over_all().startswith(f"{sum(both.plain) / sum(both.other):.3f}x")
    assert both.median() == pytest.approx(1, rel=0.02)
    assert both.by_tenths()[0] < 0.9
    assert both.by_tenths()[-1] == pytest.approx(1, rel=0.02)


def test_each_loop_takes_as_many_steps_as_the_other(loops: Any, time: SimulatedTime) -> None:
    tuned, both = side_by_side(loops, time, 100)
    assert len(both.plain) == len(both.other) == tuned.taken == 100
    assert 0 < tuned.settled_at <= 100


def test_the_search_finds_the_fastest_combination(loops: Any, time: SimulatedTime) -> None:
    loop = loops.AcceleratedLoop(task(loops, time), Plan().replace(**OTHERS_OFF, trust="checked"))
    found = loops.in_turns(loop, loops.all_combinations(loop.arms()), seconds=1)
    assert set(found) == {ON, OFF}
    assert max(found[ON]) < min(found[OFF])
    loop.close()


@pytest.mark.parametrize(("speedup", "kept"), [(1.1, ON), (1.0, OFF), (0.8, OFF)])
def test_the_greedy_search_keeps_what_is_faster_by_more_than_its_floor(
    loops: Any, time: SimulatedTime, speedup: float, kept: Any
) -> None:
    Speed.speedup = speedup
    loop = loops.AcceleratedLoop(task(loops, time), Plan().replace(**OTHERS_OFF, trust="checked"))
    assert loops.greedy(loop, loop.arms()) == (kept, 2 * loops.CHUNK)
    loop.close()


def test_a_run_is_over_when_it_has_settled_or_its_steps_are_taken(loops: Any, time: SimulatedTime) -> None:
    for steps, is_settled in ((400, True), (10, False)):
        loop = loops.AcceleratedLoop(task(loops, time), Plan().replace(**OTHERS_OFF), 400)
        found = loops.run_until_settled(loop, steps)
        assert (found.choices, found.is_settled) == (ON, is_settled)
        assert found.steps <= steps
        loop.close()


@pytest.mark.parametrize(("seconds", "is_settled"), [(1e9, True), (0.1, False)])
def test_what_trials_have_come_to_is_timed_in_a_loop_without_any(
    loops: Any, time: SimulatedTime, seconds: float, is_settled: bool
) -> None:
    plan = Plan().replace(**OTHERS_OFF)
    loop, found = loops.settled_loop(lambda: task(loops, time), plan, 400, seconds)
    assert (found.choices, found.is_settled) == (ON, is_settled)
    assert ("cut off" in str(found)) == (not is_settled)
    assert loop.handle.tuning is None
    before = len(Speed.latest.switches)
    for _ in range(300):  # of a loop with trials three pairs would look at the plain run
        loop.step()
    assert Speed.latest.now == "on"
    assert len(Speed.latest.switches) == before
    loop.close()


SECONDS = {(): 1.0, (("a", "on"),): 0.8, (("b", "on"),): 0.98, (("a", "on"), ("b", "on")): 0.79}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ((("a", "on"),), (("a", "on"),), "the same"),
        ((("a", "on"), ("b", "on")), (("a", "on"),), "the same but for b (1%)"),
        ((("b", "on"),), (("a", "on"), ("b", "on")), "not on a (24%)"),
        ((), (("c", "on"),), "not on c (not an arm of both)"),
    ],
)
def test_two_runs_have_to_agree_on_what_is_worth_more_than_5_percent(
    benchmark: Callable[[str], Any], first: Any, second: Any, said: str
) -> None:
    assert benchmark("tuning").agreement(first, second, SECONDS) == said


@pytest.mark.medium
def test_on_a_gpu_a_model_whose_package_is_missing_is_left_out(
    benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = benchmark("gpu_tuning")

    def linear(small: bool) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * script.SMALL_IMAGE**2, 1000))

    cases = {
        "linear": script.Case({"torch": linear}, 4, "image"),
        "other": script.Case({"not_installed": linear}, 4, "image"),
    }
    monkeypatch.setattr(script, "CASES", cases)
    monkeypatch.setattr(sys, "argv", ["gpu_tuning.py", "--dry-run", "--out", str(tmp_path)])
    script.main()
    (written,) = tmp_path.glob("gpu-tuning-*.json")
    runs = json.loads(written.read_text(encoding="utf-8"))["runs"]
    assert [(run["model"], run["precision"]) for run in runs] == [("linear", "auto"), ("linear", "32-true")]
    assert all(run["mfu"][0] > 0 for run in runs)
    assert "other: left out, none of not_installed is installed" in capsys.readouterr().out
