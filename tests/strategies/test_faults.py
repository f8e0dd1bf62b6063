"""A run broken off names the rank it lost, and goes on from its checkpoint as one never broken off, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.scripts import SUPPORT, run_script
from support.strategies.faults import BATCHES, JOB_ID, KILLS, REQUEUES, STEPS_TO_A_CHECKPOINT, STRATEGIES, Fault
from support.strategies.zoo import VARIANTS

pytestmark = [pytest.mark.numbers, pytest.mark.medium]


def launched(which: str, folder: Path) -> Path:
    run_script(SUPPORT / "strategies" / "faults.py", folder, which)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched("quick", tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched("slow", tmp_path_factory.mktemp("slow"))


@pytest.fixture
def folder(fault: Fault, request: pytest.FixtureRequest) -> Path:
    """Where the runs of ``faults.py`` left what each rank got."""
    folder: Path = request.getfixturevalue("slow" if fault.is_slow else "quick")
    return folder


def of_rank(folder: Path, run: str, rank: int) -> dict[str, Any]:
    left = folder / f"{run}.{rank}.pt"
    assert left.exists(), f"rank {rank} of {run} did not end by itself:\n" + left.with_suffix(".log").read_text()
    said: dict[str, Any] = torch.load(left)
    return said


def ranks_of(fault: Fault) -> range:
    return range(STRATEGIES[fault.strategy][0])


def batches_in_checkpoint(fault: Fault) -> int:
    """How many batches the run had trained on that the resumed one does not see again."""
    if fault.killed is not None:
        return STEPS_TO_A_CHECKPOINT
    to_a_step = VARIANTS[fault.variant][0].get("accumulate_grad_batches", 1)
    return -(-(fault.during + 1) // to_a_step) * to_a_step


def of(faults: list[Fault]) -> pytest.MarkDecorator:
    marked = [pytest.param(one, id=str(one), marks=[pytest.mark.slow] if one.is_slow else []) for one in faults]
    return pytest.mark.parametrize("fault", marked)


each_kill, each_requeue, each = of(KILLS), of(REQUEUES), of(KILLS + REQUEUES)


@each_kill
def test_the_rank_that_is_left_names_the_one_that_was_killed(folder: Path, fault: Fault) -> None:
    assert fault.killed is not None
    error = of_rank(folder, f"{fault}, broken", 1 - fault.killed)["error"]
    assert f"Rank {fault.killed} (pid" in error
    assert "has died" in error


@each_requeue
def test_the_job_is_requeued_once(folder: Path, fault: Fault) -> None:
    assert (folder / str(fault) / "scontrol.txt").read_text() == f"requeue {JOB_ID}\n"
    assert [path.name for path in (folder / str(fault)).glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]


@each_requeue
def test_a_requeued_job_ends_in_the_step_after(folder: Path, fault: Fault) -> None:
    said = [of_rank(folder, f"{fault}, broken", rank) for rank in ranks_of(fault)]
    assert {one["error"] for one in said} == {"SIGTERMException: "}
    assert len({len(one["losses"]) for one in said}) == 1
    assert len(said[0]["losses"]) < BATCHES


@each
def test_the_resumed_run_has_the_losses_of_one_never_broken_off(folder: Path, fault: Fault) -> None:
    for rank in ranks_of(fault):
        expected = of_rank(folder, fault.undisturbed, rank)["losses"]
        assert len(expected) == BATCHES
        assert of_rank(folder, f"{fault}, resumed", rank)["losses"] == expected[batches_in_checkpoint(fault) :]


@each
def test_the_resumed_run_has_the_weights_of_one_never_broken_off(folder: Path, fault: Fault) -> None:
    for rank in ranks_of(fault):
        expected = of_rank(folder, fault.undisturbed, rank)["weights"]
        found = of_rank(folder, f"{fault}, resumed", rank)["weights"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@each
def test_signal_handlers_are_given_back(folder: Path, fault: Fault) -> None:
    for rank in ranks_of(fault):
        if rank != fault.killed:
            assert of_rank(folder, f"{fault}, broken", rank)["gave handlers back"]
        assert of_rank(folder, f"{fault}, resumed", rank)["gave handlers back"]
