"""Live trials on several ranks: the same turns on all, decided by the slowest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.plugin.live_ranks import FAILING
from support.scripts import SUPPORT, run_script

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of ``live_ranks.py`` left what each rank saw."""
    folder = tmp_path_factory.mktemp("live_ranks")
    run_script(SUPPORT / "plugin" / "live_ranks.py", folder, LIGHTNING_ACCEL_CACHE=str(folder / "remembered"))
    return folder


def ranks(folder: Path, run: str) -> list[Any]:
    return [json.loads((folder / f"{run}.{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("run", ["faster on both", "faster on one", "too short", "uneven epochs"])
def test_all_ranks_take_the_same_turns(folder: Path, run: str) -> None:
    first, second = ranks(folder, run)
    assert first["seen"] == second["seen"]
    assert first["status"] == second["status"]


def test_what_is_faster_on_all_stays(folder: Path) -> None:
    first, _ = ranks(folder, "faster on both")
    assert first["seen"][-1] == "on"
    assert "over plain" in first["status"]


def test_what_one_rank_loses_by_goes(folder: Path) -> None:
    first, _ = ranks(folder, "faster on one")
    assert first["seen"][-1] == "off"


@pytest.mark.parametrize("run", FAILING)
def test_a_rank_that_repeats_a_step_without_edits_has_the_weights_of_the_others(folder: Path, run: str) -> None:
    first, second = ranks(folder, run)
    assert first["weights"] == second["weights"]
    assert "only an edit raises this" in second["note"]


@pytest.mark.parametrize("rank", [0, 1])
def test_no_trial_takes_the_number_format_that_shards_are_gathered_in(folder: Path, rank: int) -> None:
    outcome = ranks(folder, "sharded")[rank]
    assert outcome["is_on"]
    assert outcome["compared"]
    assert not any(name.startswith("precision") for name in outcome["compared"])


def test_a_short_run_tries_nothing(folder: Path) -> None:
    first, _ = ranks(folder, "too short")
    assert set(first["seen"]) == {"on"}


@pytest.mark.parametrize(("run", "steps"), [("known to be short", 20), ("known to be short, and uneven", 24)])
def test_a_run_that_is_known_to_be_short_is_plain_on_every_rank(folder: Path, run: str, steps: int) -> None:
    for status in ranks(folder, run):
        assert status == f"not tried: the run is too short: {steps} steps on 2 ranks"


@pytest.mark.parametrize("run", ["not known to be short", "asked for by name"])
def test_any_other_is_at_work_from_the_first_step(folder: Path, run: str) -> None:
    for status in ranks(folder, run):
        assert not status.startswith("not tried")
