"""Several processes train, evaluate and resume as one process does with the same global batches, to 1e-5 in float32."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.scripts import SUPPORT, run_script
from support.strategies.ranks import (
    MODELS,
    SAVED,
    Row,
    checkpoint_of,
    evaluations,
    fits,
    is_slow,
    reference,
    resumptions,
    variations,
)
from support.strategies.zoo import VARIANTS

pytestmark = [pytest.mark.numbers, pytest.mark.medium]

TOLERANCE = 1e-5  # of the number itself, or where that is less than one, of one


class Runs:
    """What the ranks of ``ranks.py`` left in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of_rank(self, row: Row, rank: int) -> dict[str, Any]:
        """What one rank of ``row`` got; fails with what it printed where it got an error, or hung."""
        left = self.folder / f"{row}.{rank}.pt"
        said: dict[str, Any] = torch.load(left, weights_only=False) if left.exists() else {"error": "left nothing"}
        if "error" in said:
            printed = left.with_suffix(".log").read_text()
            pytest.fail(f"rank {rank} of {row}: {said['error']}\n{printed[-5000:]}", pytrace=False)
        return said

    def of_all(self, row: Row) -> list[dict[str, Any]]:
        return [self.of_rank(row, rank) for rank in range(row.world_size)]

    def losses(self, row: Row) -> Tensor:
        """The loss of every step, the mean over the ranks."""
        return torch.tensor([said["losses"] for said in self.of_all(row)]).mean(0)


def launched(which: str, folder: Path) -> Runs:
    run_script(SUPPORT / "strategies" / "ranks.py", folder, which, timeout_s=900)
    return Runs(folder)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return launched("quick", tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return launched("slow", tmp_path_factory.mktemp("slow"))


@pytest.fixture
def runs(row: Row, request: pytest.FixtureRequest) -> Runs:
    runs: Runs = request.getfixturevalue("slow" if is_slow(row) else "quick")
    return runs


def each(rows: Iterable[Row]) -> pytest.MarkDecorator:
    marked = [pytest.param(row, id=str(row), marks=[pytest.mark.slow] if is_slow(row) else []) for row in rows]
    return pytest.mark.parametrize("row", marked)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


TRAINED = [*fits(), *variations(), *(row for row in evaluations() if row.does == "fit twice")]


@each(TRAINED)
def test_losses_are_those_of_one_process(runs: Runs, row: Row) -> None:
    assert_same(runs.losses(row), runs.losses(reference(row)))


@each(TRAINED)
def test_weights_and_statistics_are_those_of_one_process(runs: Runs, row: Row) -> None:
    expected = runs.of_rank(reference(row), 0)["weights"]
    for said in runs.of_all(row):
        assert_same(said["weights"], expected)


@each(row for row in fits() if row.variant in ("checkpointing", "all"))
def test_checkpointing_is_in_force(runs: Runs, row: Row) -> None:
    blocks = 5 if row.kind == "gan" else 3
    assert all(len(said["checkpointed"]) == blocks for said in runs.of_all(row))


@each(row for row in TRAINED if row.strategy == "accel_fsdp")
def test_each_rank_holds_its_share_of_the_parameters(runs: Runs, row: Row) -> None:
    """Frozen ones too; what is left over are dimensions that the number of ranks does not divide."""
    shares = [said["share_held"] for said in runs.of_all(row)]
    assert sum(shares) == pytest.approx(1)
    assert max(shares) < 1.5 / row.world_size


@each(row for row in TRAINED if row.strategy == "accel_ddp")
def test_gradients_go_through_ddp(runs: Runs, row: Row) -> None:
    assert {said["wrapper"] for said in runs.of_all(row)} == {"DistributedDataParallel"}


@each(row for row in evaluations() if row.does == "fit and evaluate")
def test_validation_before_and_test_after_a_fit_give_what_one_process_gives(runs: Runs, row: Row) -> None:
    expected = runs.of_rank(reference(row), 0)
    for said in runs.of_all(row):
        assert_same(said["validated"], expected["validated"])
        assert_same(said["tested"], expected["tested"])


@each(row for row in evaluations() if row.does == "fit and evaluate")
def test_the_ranks_predict_together_what_one_process_predicts(runs: Runs, row: Row) -> None:
    shares = [said["predicted"] for said in runs.of_all(row)]
    assert_same(torch.stack(shares, dim=1).flatten(0, 1), runs.of_rank(reference(row), 0)["predicted"])


@each(resumptions())
def test_a_resumed_run_goes_on_as_one_that_was_never_stopped(runs: Runs, row: Row) -> None:
    expected = runs.losses(reference(row))
    losses = runs.losses(row)
    assert len(losses) == len(expected) // 2
    assert_same(losses, expected[len(losses) :])
    assert_same(runs.of_rank(row, 0)["weights"], runs.of_rank(reference(row), 0)["weights"])


@pytest.mark.parametrize("kind", SAVED)
def test_a_full_checkpoint_of_shards_holds_what_that_of_a_plain_trainer_holds(quick: Runs, kind: str) -> None:
    sharded, plain = (
        torch.load(checkpoint_of(row, quick.folder), weights_only=False)
        for row in (Row(kind=kind, strategy="accel_fsdp", world_size=2, does="stop"), Row(kind=kind, does="stop"))
    )
    assert sharded.keys() - {"AccelPlugin"} == plain.keys()
    assert_same(sharded["state_dict"], plain["state_dict"])
    assert_same(sharded["optimizer_states"], plain["optimizer_states"])
    assert sharded["lr_schedulers"] == plain["lr_schedulers"]
    assert sharded["loops"] == plain["loops"]


# -- what the comparison would miss if it were not so ------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_the_variants_matter_to_one_process(quick: Runs, kind: str) -> None:
    losses = quick.losses(Row(kind=kind, variant="all"))
    assert (losses - quick.losses(Row(kind=kind))[: len(losses)]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("variant", ["accumulation", "clipping"])
def test_each_variant_matters_to_one_process(quick: Runs, variant: str) -> None:
    losses = quick.losses(Row(kind="transformer", variant=variant))
    assert (losses - quick.losses(Row(kind="transformer"))[: len(losses)]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["transformer", "cnn"])
def test_the_model_learns(quick: Runs, kind: str) -> None:
    losses = quick.losses(Row(kind=kind))
    assert losses[-4:].mean() < 0.9 * losses[:4].mean()


def test_the_critic_learns_to_tell_what_the_generator_makes(quick: Runs) -> None:
    of_generator = quick.losses(Row(kind="gan"))[1::2]
    assert of_generator[-4:].mean() > 1.1 * of_generator[:4].mean()


def test_every_variant_is_tried() -> None:
    assert {row.variant for row in fits()} == set(VARIANTS)
