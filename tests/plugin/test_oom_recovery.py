"""A training step that runs out of memory, for real: the system refuses what torch's allocator asks for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_accel.evidence.record import FOLDER
from lightning_accel.evidence.record_reader import read_record
from support.plugin.memory_runs import LARGE, SMALL
from support.scripts import SUPPORT, run_script

pytestmark = [pytest.mark.numbers, pytest.mark.slow]

Said = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of ``memory_runs.py`` left what each came to."""
    folder = tmp_path_factory.mktemp("memory_runs")
    run_script(
        SUPPORT / "plugin" / "memory_runs.py",
        folder,
        LIGHTNING_ACCEL_CACHE=str(folder / "remembered"),
        OMP_NUM_THREADS="1",
    )
    return folder


@pytest.fixture
def said(folder: Path) -> Callable[[str], Said]:
    return lambda run: json.loads((folder / f"{run}.json").read_text())


ANSWERED = {
    "in its forward pass": "plain",
    "in its backward pass": "plain, with a greedy backward pass",
    "in its first step": "plain, first",
    "first of two that are added up": "plain, accumulating",
    "by hand": "plain",
}


# -- the run goes on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ANSWERED)
def test_a_step_that_runs_out_of_memory_runs_again_checkpointed(said: Callable[[str], Said], run: str) -> None:
    answered = said(run)
    assert answered["error"] is None
    assert answered["applied"]["gradient_checkpointing"] == 12
    assert answered["state"]["out_of_memory"] == [["gradient_checkpointing", "selective"]]


@pytest.mark.parametrize("run", ANSWERED)
def test_its_numbers_are_those_of_a_run_with_more_memory(said: Callable[[str], Said], run: str) -> None:
    """To the bit: dropout draws the same numbers, and what the failed step counted and logged is counted once."""
    answered, plain = said(run), said(ANSWERED[run])
    assert answered["losses"][-1] == plain["losses"][-1]
    for what in ("weights", "seen", "logged"):
        assert answered[what] == plain[what]


def test_the_log_says_at_once_what_was_put_on_and_later_what_it_costs(said: Callable[[str], Said]) -> None:
    answered = said("in its forward pass")
    put_on = "out of memory: memory=MemoryOptions(checkpoint='selective') put on at step 4: "
    (warning,) = answered["warned"]
    assert warning.startswith(f"{put_on}it needed more than")
    (note,) = answered["notes"]
    assert note.startswith(f"{put_on}peak ")
    assert "step " in note


def test_packing_that_was_not_enough_goes(said: Callable[[str], Said]) -> None:
    assert said("in its forward pass")["status"]["sparse_activations"].startswith("taken back: it was not enough")


def test_the_module_is_the_users_own_again_after_the_run(said: Callable[[str], Said]) -> None:
    assert said("in its forward pass")["left"] == 0


def test_a_resumed_run_has_what_was_put_on_from_its_first_step(said: Callable[[str], Said]) -> None:
    resumed = said("resumed")
    assert resumed["error"] is None
    assert resumed["warned"] == []
    assert resumed["applied"]["gradient_checkpointing"] == 12


def test_on_wish_a_batch_that_nothing_else_helps_goes_through_its_step_in_parts(said: Callable[[str], Said]) -> None:
    split, plain = said("split"), said("no blocks, with more memory")
    assert split["error"] is None
    ((name, most),) = split["state"]["out_of_memory"]
    assert name == "split"
    assert most < LARGE
    assert split["weights"] == pytest.approx(plain["weights"], rel=1e-5)
    (note,) = split["notes"]
    assert note.startswith(f"out of memory: batches in parts of at most {most} samples put on at step 4: peak ")
    assert "step " in note


# -- the run ends with a page -------------------------------------------------------------------------------------


def test_the_page_names_who_asked_and_who_held_what_and_what_would_fit(said: Callable[[str], Said]) -> None:
    page = said("no blocks")["error"].split("\n")
    assert page[0].startswith("[enforce fail at alloc_cpu")
    assert page[2].startswith("Training step 1 of epoch 0 ran out of memory in its forward pass: nothing is left")
    assert page[5].startswith("  inner.wide")
    held = [line.split("  ")[1] for line in page if line.endswith("iB")]
    assert held[:2] == ["activations, and all else in this process", "the batch"]
    assert {"parameters", "gradients"} <= set(held)
    assert page[-3].startswith("  AccelPlugin(memory=MemoryOptions(on_oom='split'))  # about ")
    assert page[-1].startswith("  DataLoader(batch_size=8192), Trainer(accumulate_grad_batches=2)  # about ")


def test_it_is_what_torch_raises_and_comes_from_what_torch_raised(said: Callable[[str], Said]) -> None:
    ended = said("no blocks")
    assert ended["kinds"][:2] == ["StepMemoryError", "RuntimeError"]
    assert ended["cause"] == "RuntimeError"


def test_the_page_says_what_was_put_on_in_vain(said: Callable[[str], Said]) -> None:
    page = said("nothing is enough")["error"]
    assert "\nWhat was put on before:\n  memory=MemoryOptions(checkpoint='full'): in force (12 sites)\n" in page


def test_gradients_of_earlier_batches_are_not_thrown_away(said: Callable[[str], Said]) -> None:
    page = said("second of three that are added up")["error"]
    assert "in its backward pass: its gradients were added to those of earlier batches" in page
    assert "AccelPlugin(memory=MemoryOptions(checkpoint='selective'))  # about" in page
    assert "YAML: memory: {checkpoint: selective}" in page
    assert "AccelPlugin(memory='90%'); plans the fastest mix that fits, block by block" in page
    assert "Trainer(accumulate_grad_batches=6)" in page


def test_blocks_that_a_recomputation_would_change_stay_and_the_page_says_why(said: Callable[[str], Said]) -> None:
    assert (
        "left alone: its forward changes 'calls', which recomputing would change again"
        in (said("blocks that count")["error"])
    )


def test_an_optimizers_step_is_not_taken_back(said: Callable[[str], Said]) -> None:
    page = said("optimizer")["error"]
    assert "in its optimizer's step: some of the gradients may have been applied" in page
    assert "  KeepsStates\n" in page
    assert "An optimizer with smaller states" in page


def test_a_validation_step_has_a_page_of_its_own(said: Callable[[str], Said]) -> None:
    page = said("evaluated")["error"]
    assert "A validation step ran out of memory" in page
    assert page.split("\n")[-1].startswith("  DataLoader(batch_size=8192)  # about ")


def test_of_several_ranks_the_one_without_memory_ends_with_a_page(said: Callable[[str], Said]) -> None:
    assert "several processes train together" in said("rank 1")["error"]
    assert said("rank 1")["applied"]["gradient_checkpointing"] == 0
    assert said("rank 0")["error"]


def test_of_several_ranks_the_one_without_memory_leaves_its_page_in_a_report(
    said: Callable[[str], Said], folder: Path
) -> None:
    (report,) = (folder / "rank 1" / FOLDER).glob("*.html")
    assert "Training step 4 of epoch 0 ran out of memory" in report.read_text()
    assert said("rank 1")["error"] == read_record(folder / "rank 1").page
    assert not (folder / "rank 0" / FOLDER).exists()  # there is no logger, and it had memory


# -- the error as it is -------------------------------------------------------------------------------------------


def test_switched_off_it_leaves_the_error_alone(said: Callable[[str], Said]) -> None:
    ended = said("off")
    assert ended["kinds"][0] == "RuntimeError"
    assert "ran out of memory" not in ended["error"]
    assert ended["applied"]["gradient_checkpointing"] == 0


def test_a_search_for_the_batch_size_finds_what_fits_without_an_answer(said: Callable[[str], Said]) -> None:
    """Checkpointed, the largest that it tries would have fitted."""
    searched = said("searched")
    assert searched["error"] is None
    assert SMALL < searched["batch_size"] < LARGE
