"""Ranks with different numbers of batches end as they do without the plugin, and are told why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.scripts import SUPPORT, run_script

pytestmark = pytest.mark.medium

FIRST_TO_END = {"one ends first": 3, "one has none": 0}  # training batches of rank 1; rank 0 has 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of ``uneven_ranks.py`` left how each rank ended: what waits for a timeout fails them all."""
    folder = tmp_path_factory.mktemp("uneven_ranks")
    run_script(SUPPORT / "plugin" / "uneven_ranks.py", folder)
    return folder


def of_rank(folder: Path, run: str, rank: int) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((folder / f"{run}.{rank}.json").read_text())
    return outcome


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "run",
    [
        "plain, stopped by steps",
        "stopped by steps, ddp",
        "stopped by steps, accel_ddp",
        "stopped by steps, accel_fsdp",
    ],
)
def test_a_run_that_ends_after_as_many_steps_on_every_rank_ends_well(folder: Path, run: str, rank: int) -> None:
    """Epochs of 5 batches on rank 0 and of 3 on rank 1: the ranks step together, and their epochs end apart."""
    outcome = of_rank(folder, run, rank)
    assert (outcome["error"], outcome["steps"]) == ("", 6)


def test_an_epoch_that_others_do_not_end_is_measured_on_its_rank_alone(folder: Path) -> None:
    outcomes = [of_rank(folder, "stopped by steps, ddp", rank) for rank in (0, 1)]
    assert [[epoch["world_size"] for epoch in outcome["history"]] for outcome in outcomes] == [[1, 2], [1, 2]]
    assert [outcome["history"][0]["steps"] for outcome in outcomes] == [5, 3]
    assert outcomes[0]["history"][1] | {"epoch": 0} == outcomes[1]["history"][1] | {"epoch": 0}  # both stop there


def test_it_is_said_once_and_with_the_mend(folder: Path) -> None:
    (said,) = of_rank(folder, "stopped by steps, ddp", 1)["warnings"]
    assert said.startswith("Rank 1 ended epoch 0 after training batch 3 of this fit, and not all ranks did")
    assert "limit_train_batches" in said


@pytest.mark.parametrize("run", ["plain, one ends first", *FIRST_TO_END])
def test_a_rank_without_more_data_ends_and_the_other_fails_at_once(folder: Path, run: str) -> None:
    assert of_rank(folder, run, 1)["error"] == ""
    error = of_rank(folder, run, 0)["error"].lower()
    assert "connection closed" in error or "connection reset" in error


@pytest.mark.parametrize(("run", "batches"), FIRST_TO_END.items())
def test_the_error_names_the_rank_that_had_no_more(folder: Path, run: str, batches: int) -> None:
    error = of_rank(folder, run, 0)["error"]
    assert f"\nRank 1 ended an epoch after training batch {batches} of this fit, and rank 0 had more." in error


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_as_many_batches_are_put_together(folder: Path, rank: int) -> None:
    """Though their loaders have no length, by which they could know it beforehand."""
    outcome = of_rank(folder, "even", rank)
    assert [epoch["world_size"] for epoch in outcome["history"]] == [2, 2]
    assert outcome["history"] == of_rank(folder, "even", 1 - rank)["history"]
    assert "accel/samples_per_sec" in outcome["logged"]
    assert outcome["warnings"] == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("run", ["validated", "predicted"])
def test_a_rank_evaluates_what_it_has(folder: Path, run: str, rank: int) -> None:
    """One of them nothing, so that it has no verdict on anything that the other could wait for."""
    assert of_rank(folder, run, rank)["error"] == ""
