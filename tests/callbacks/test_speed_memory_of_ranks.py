"""One epoch's speed and memory over several ranks."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from lightning_accel.callbacks import EpochSpeed
from lightning_accel.callbacks._interval import RankEpoch, put_together, thinned
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.evidence.render import to_markdown
from lightning_accel.evidence.report_model import page_of
from support.measured_runs import ALWAYS_LOGGED
from support.scripts import SUPPORT, run_script

LOGGED_BY_SEVERAL_RANKS = {"accel/step_ms_p95_slowest_rank", "accel/before_backward_ms_p95_latest_rank"}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run of ``two_ranks.py`` left its numbers."""
    folder = tmp_path_factory.mktemp("two_ranks")
    run_script(SUPPORT / "callbacks" / "two_ranks.py", folder)
    return folder


def read_rank(folder: Path, rank: int) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text())
    return said


@pytest.mark.medium
def test_every_rank_has_the_numbers_of_all(two_ranks: Path) -> None:
    assert read_rank(two_ranks, 0) == read_rank(two_ranks, 1)
    assert set(read_rank(two_ranks, 0)["logged"]) == ALWAYS_LOGGED | LOGGED_BY_SEVERAL_RANKS


@pytest.mark.medium
def test_advice_is_that_of_rank_0(two_ranks: Path) -> None:
    """Ranks wait together, but each for a loader of its own: one run must not be given two kinds of advice."""
    advice = read_rank(two_ranks, 0)["advice"]
    assert "instead of num_workers=0" in advice[1]
    assert read_rank(two_ranks, 1)["advice"] == advice


@pytest.mark.medium
def test_ranks_are_put_together(two_ranks: Path) -> None:
    for epoch in read_rank(two_ranks, 0)["history"]:
        assert (epoch["world_size"], epoch["steps"], epoch["samples"]) == (2, 4, 4 * (1 + 2))
        assert epoch["flops_per_step"] == (2 * (2 * 8 * 2) + 2 * (2 * 2 * 8 * 2)) / 2  # the mean of one and two samples
        # A step of both ranks trains on three samples. They step together, so their rates are close, not equal.
        assert 2 < epoch["samples_per_sec"] / epoch["steps_per_sec"] < 4.5
        assert epoch["tflops"] == pytest.approx(2 * epoch["flops_per_step"] * epoch["steps_per_sec"] / 1e12)


@pytest.mark.medium
@pytest.mark.parametrize("run", ["slow loader", "slow forward"])
def test_the_rank_that_the_others_wait_for_is_named(two_ranks: Path, run: str) -> None:
    said = read_rank(two_ranks, 0)[run]
    assert said["latest_rank"] == 1
    assert said["before_backward_ms_p95_mean"] < said["before_backward_ms_p95"]
    assert (said["data_wait_ms"] > 2 * 30) == (run == "slow loader")  # two samples, and each sleeps so long
    assert "latest at backward rank 1: p95" in said["line"]


@pytest.mark.medium
def test_rank_zero_writes_for_all(two_ranks: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(two_ranks / "board")).Reload()
    history = read_rank(two_ranks, 0)["history"]
    for name in ("samples_per_sec", "peak_memory_mib"):
        logged = [event.value for event in events.Scalars(f"accel/{name}")]
        assert logged == pytest.approx([epoch[name] for epoch in history], rel=1e-6)


def rank_epoch(**values: Any) -> RankEpoch:
    numbers = dict.fromkeys(RankEpoch.__dataclass_fields__, 1.0)
    lists = {"step_ms": [1.0], "before_backward_ms": [1.0]}
    return RankEpoch(**{**numbers, **lists, **values})  # type: ignore[arg-type]


def together(*ranks: RankEpoch) -> EpochSpeed:
    speed = put_together(ranks)
    assert speed is not None
    return speed


def test_each_number_has_its_own_reduction() -> None:
    first = rank_epoch(samples_per_sec=10.0, steps_per_sec=2.0, peak_memory_mib=100.0, step_ms=[1.0, 2.0, 3.0])
    second = rank_epoch(samples_per_sec=30.0, steps_per_sec=4.0, peak_memory_mib=400.0, step_ms=[101.0, 102.0, 103.0])
    speed = together(first, second)
    assert (speed.samples_per_sec, speed.steps_per_sec, speed.peak_memory_mib) == (40, 3, 400)
    assert speed.step_ms_p50 == 52
    assert speed.stragglers is not None
    assert speed.stragglers.step_ms_p95 == pytest.approx(102.9)
    assert speed.stragglers.step_ms_p95_mean == pytest.approx((2.9 + 102.9) / 2)


def test_what_is_not_known_is_left_out() -> None:
    unknown = ("samples", "samples_per_sec", "flops_per_step", "energy_j")
    speed = together(rank_epoch(**dict.fromkeys(unknown)))
    assert (speed.samples, speed.samples_per_sec, speed.tflops, speed.mfu, speed.energy_j_per_sample) == (None,) * 5


def test_what_one_rank_does_not_know_is_known_of_none() -> None:
    """Else ranks would log different names, and wait for each other in vain."""
    speed = together(rank_epoch(), rank_epoch(samples_per_sec=None))
    assert speed.samples_per_sec is None
    assert "accel/samples_per_sec" not in speed.metrics()


def test_an_epoch_without_steps_is_none() -> None:
    assert put_together([rank_epoch(steps=0, step_ms=[])]) is None


def test_a_single_rank_is_not_compared() -> None:
    speed = together(rank_epoch())
    assert speed.stragglers is None
    assert not LOGGED_BY_SEVERAL_RANKS & set(speed.metrics())


def test_percentiles_of_a_million_steps_are_kept_by_a_few_thousand() -> None:
    kept = thinned(array("d", map(float, range(1_000_000))))
    assert len(kept) == 4096
    speed = together(rank_epoch(step_ms=kept))
    assert speed.step_ms_p50 == pytest.approx(500_000, rel=1e-3)
    assert speed.step_ms_p95 == pytest.approx(950_000, rel=1e-3)


@pytest.mark.medium
def test_the_report_of_several_ranks_is_one_and_says_who_held_up_the_others(two_ranks: Path) -> None:
    record = read_record(two_ranks / "board")
    page = page_of(record)
    assert len(list(two_ranks.glob("board/accel/*.jsonl"))) == 1
    assert page.machine["strategy"] == "DDPStrategy, 2 ranks"
    assert "slowest rank" in to_markdown(page).partition("| epoch |")[2].partition("\n")[0]
    assert {epoch["stragglers_slowest_rank"] for epoch in page.epochs} <= {0, 1}
