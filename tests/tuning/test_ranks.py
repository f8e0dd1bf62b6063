"""Live trials of two simulated machines that train together: all of them take the same turns, and decide the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.tuning.tuning_result import Tuning
from support.simulated_machine import SimulatedRun

Hook = Callable[[int, int], bool]


class SimulatedPeak(PeakMemory):
    """The most memory of a step, which is another with the arm."""

    def __init__(self, run: SimulatedRun, arm: str, on_mib: int) -> None:
        super().__init__(torch.device("cpu"))
        self.run, self.arm, self.on_mib = run, arm, on_mib

    def peak_bytes(self) -> int:
        return (self.on_mib if self.run.now[self.arm] == "on" else 1000) << 20

    def restart(self) -> None: ...


def together(
    runs: Sequence[SimulatedRun],
    *,
    gives_up: Hook = lambda rank, turn: False,
    loses: Hook = lambda rank, turn: False,
    on_mib: Sequence[int] | None = None,
) -> tuple[list[Tuning], list[list[dict[str, str]]]]:
    """Runs them in threads that meet wherever ranks gather; what each has settled, and what was on in each turn."""
    barrier, said = Barrier(len(runs), timeout=60), [None] * len(runs)

    def gather_of(rank: int) -> Callable[[Any], list[Any]]:
        def gather(mine: Any) -> list[Any]:
            said[rank] = mine
            barrier.wait()
            heard = list(said)
            barrier.wait()
            return heard

        return gather

    def train(rank: int) -> tuple[Tuning, list[dict[str, str]]]:
        run, seen = runs[rank], []
        peak = None if on_mib is None else SimulatedPeak(run, next(iter(run.now)), on_mib[rank])
        trials = run.trials(gather=gather_of(rank), peak=peak)
        for turn in range(run.turns):
            trials.begin()
            if gives_up(rank, turn):
                run.now = dict.fromkeys(run.now, "off")  # as the safety net does
                trials.give_up()
            if loses(rank, turn):
                run.lost.add("attention")
                run.now["attention"] = "off"
                trials.lose("attention")
            seen.append(dict(run.now))
            trials.took(run.step(turn))
        return trials.tuning, seen

    with ThreadPoolExecutor(len(runs)) as pool:
        tunings, seen = zip(*pool.map(train, range(len(runs))), strict=True)
    return list(tunings), list(seen)


def two(first: float, second: float, turns: int = 400) -> list[SimulatedRun]:
    return [SimulatedRun({"attention": speedup}, turns, seed=seed) for seed, speedup in enumerate((first, second))]


def test_they_take_the_same_turns_though_each_has_times_of_its_own() -> None:
    tunings, (first, second) = together(two(1.5, 1.3))
    assert first == second
    assert tunings[0] == tunings[1]
    assert tunings[0].choices == {"attention": "on"}


def test_they_go_by_the_slowest() -> None:
    """One rank gains by the arm, the other, which all wait for, does not."""
    tunings, (first, second) = together(two(1.5, 0.8))
    assert first == second
    assert [tuning.choices for tuning in tunings] == [{}, {}]


def test_a_rank_that_gives_up_has_all_of_them_run_as_the_user_wrote_it() -> None:
    tunings, seen = together(two(1.5, 1.5, 100), gives_up=lambda rank, turn: (rank, turn) == (1, 10))
    assert [tuning.choices for tuning in tunings] == [{}, {}]
    assert [rank[-1] for rank in seen] == [{"attention": "off"}] * 2


@pytest.mark.parametrize("at", [20, 33, 300])
def test_an_arm_that_one_rank_loses_is_lost_by_all_and_they_go_on_together(at: int) -> None:
    runs = [SimulatedRun({"attention": 1.5, "optimizer": 1.2}, 500, seed=seed) for seed in (0, 1)]
    tunings, (first, second) = together(runs, loses=lambda rank, turn: (rank, turn) == (1, at))
    assert [turn["optimizer"] for turn in first] == [turn["optimizer"] for turn in second]
    assert {turn["attention"] for turn in first[at + 8 :]} == {"off"}
    assert [tuning.choices for tuning in tunings] == [{"optimizer": "on"}] * 2


def test_memory_that_one_of_them_lacks_counts_for_all() -> None:
    """By the first rank's own peaks the arm would win; the second's say that it needs more, for a gain of 5%."""
    tunings, (first, second) = together(two(1.05, 1.05, 1000), on_mib=(1000, 1100))
    assert first == second
    assert [tuning.results["whole plan"].verdict for tuning in tunings] == ["needs more memory"] * 2
