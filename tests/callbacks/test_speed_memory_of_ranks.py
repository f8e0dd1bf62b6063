"""One epoch's speed and memory over several ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accel.callbacks._epoch import EpochMeter, RankEpoch, put_together
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


def test_every_rank_has_the_numbers_of_all(two_ranks: Path) -> None:
    assert read_rank(two_ranks, 0) == read_rank(two_ranks, 1)
    assert set(read_rank(two_ranks, 0)["logged"]) == ALWAYS_LOGGED | LOGGED_BY_SEVERAL_RANKS


def test_advice_is_that_of_rank_0(two_ranks: Path) -> None:
    """Ranks wait together, but each for a loader of its own: one run must not be given two kinds of advice."""
    advice = read_rank(two_ranks, 0)["advice"]
    assert "instead of num_workers=0" in advice[1]
    assert read_rank(two_ranks, 1)["advice"] == advice


def test_ranks_are_put_together(two_ranks: Path) -> None:
    for epoch in read_rank(two_ranks, 0)["history"]:
        assert (epoch["world_size"], epoch["steps"], epoch["samples"]) == (2, 4, 4 * (1 + 2))
        assert epoch["flops_per_step"] == (2 * (2 * 8 * 2) + 2 * (2 * 2 * 8 * 2)) / 2  # the mean of one and two samples
        # A step of both ranks trains on three samples. They step together, so their rates are close, not equal.
        assert 2 < epoch["samples_per_sec"] / epoch["steps_per_sec"] < 4.5
        assert epoch["tflops"] == pytest.approx(2 * epoch["flops_per_step"] * epoch["steps_per_sec"] / 1e12)


@pytest.mark.parametrize("run", ["slow loader", "slow forward"])
def test_the_rank_that_the_others_wait_for_is_named(two_ranks: Path, run: str) -> None:
    said = read_rank(two_ranks, 0)[run]
    assert said["latest_rank"] == 1
    assert said["before_backward_ms_p95_mean"] < said["before_backward_ms_p95"]
    assert (said["data_wait_ms"] > 2 * 30) == (run == "slow loader")  # two samples, and each sleeps so long
    assert "latest at backward rank 1: p95" in said["line"]


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


def test_each_number_has_its_own_reduction() -> None:
    """Torchmetrics' own gathering, with a second rank simulated behind it."""
    first = rank_epoch(samples_per_sec=10.0, steps_per_sec=2.0, peak_memory_mib=100.0, step_ms=[1.0, 2.0, 3.0])
    second = rank_epoch(samples_per_sec=30.0, steps_per_sec=4.0, peak_memory_mib=400.0, step_ms=[101.0, 102.0])
    meters = [EpochMeter(), EpochMeter()]
    for meter, rank in zip(meters, (first, second), strict=True):
        meter.update(rank)
    others = iter([getattr(meters[1], name) for name in meters[1]._reductions])

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        other = next(others)
        return [value, other[0] if isinstance(other, list) else other]

    meters[0].sync(dist_sync_fn=gather, distributed_available=lambda: True)
    meters[0]._to_sync = False
    values = meters[0].compute()
    assert (values["samples_per_sec"], values["steps_per_sec"], values["peak_memory_mib"]) == (40, 3, 400)
    assert values["step_ms_p50"] == 3
    assert values["rows"][:, 0].tolist() == pytest.approx([2.9, 101.95])


def test_what_is_not_known_is_left_out() -> None:
    rank = rank_epoch(samples=math.nan, samples_per_sec=math.nan, flops_per_step=math.nan, energy_j=math.nan)
    about = {"epoch": 0, "world_size": 1, "peak_memory_source": "a test"}
    speed = put_together(rank, torch.device("cpu"), **about)
    assert speed is not None
    assert (speed.samples, speed.samples_per_sec, speed.tflops, speed.mfu, speed.energy_j_per_sample) == (None,) * 5


def test_a_single_rank_is_not_compared() -> None:
    speed = put_together(rank_epoch(), torch.device("cpu"), epoch=0, world_size=1, peak_memory_source="a test")
    assert speed is not None
    assert speed.slowest_rank is None
    assert not LOGGED_BY_SEVERAL_RANKS & set(speed.metrics())
    assert "rank" not in speed.line()


def test_percentiles_of_a_million_steps_are_kept_by_a_few_thousand() -> None:
    meter = EpochMeter()
    meter.update(rank_epoch(step_ms=[float(step) for step in range(1_000_000)]))
    assert sum(kept.numel() for kept in meter.step_ms) == 4096
    values = meter.compute()
    assert values["step_ms_p50"] == pytest.approx(500_000, rel=1e-3)
    assert values["step_ms_p95"] == pytest.approx(950_000, rel=1e-3)


# On a GPU
