"""Optimizer steps of two real processes: replicas stay equal to the bit, shards are stepped together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.scripts import SUPPORT, run_script

pytestmark = [pytest.mark.numbers, pytest.mark.medium]

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_script(SUPPORT / "techniques" / "optimizer_ranks.py", folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_replicas_are_fused_and_stay_equal_to_the_bit(ranks: list[dict[str, Found]]) -> None:
    first, second = (rank["distributed"] for rank in ranks)
    assert first["auto"]["launched"].count("_fused_adamw_") == 1
    for setting in ("off", "auto"):
        pairs = zip(first[setting]["weights"], second[setting]["weights"], strict=True)
        assert all(torch.equal(here, there) for here, there in pairs)
    torch.testing.assert_close(first["auto"]["weights"], first["off"]["weights"], rtol=1e-12, atol=1e-12)


def test_ranks_that_decide_alone_try_nothing_by_the_clock(ranks: list[dict[str, Found]]) -> None:
    """Each would choose by its own clock, and replicas would drift apart by rounding."""
    assert ranks[0]["distributed"]["auto"]["arms"] == []


def test_nor_do_they_try_the_precision_of_products(ranks: list[dict[str, Found]]) -> None:
    for rank in ranks:
        found = rank["products"]["auto"]
        assert found["changes"] == ["float32 products → bfloat16 (medium)"]  # which all have alike
        assert "matmul_precision" not in found["arms"]


@pytest.mark.parametrize(("name", "way"), [("AdamW", "fused"), ("AdamW", "foreach"), ("SGD", "foreach")])
def test_shards_are_stepped_together(ranks: list[dict[str, Found]], name: str, way: str) -> None:
    for rank in ranks:
        plain, found = rank["sharded"][f"{name}, off"], rank["sharded"][f"{name}, {way}"]
        assert any(each.startswith(f"_{way}") for each in found["launched"]), found["applied"]
        assert not any(each.startswith(("_fused", "_foreach")) for each in plain["launched"])
        torch.testing.assert_close(found["weights"], plain["weights"], rtol=1e-12, atol=1e-12)
        assert found["flags"] == plain["flags"]


@pytest.mark.parametrize(("name", "way"), [("SGD", "fused"), ("Adagrad", "fused"), ("Adagrad", "foreach")])
def test_shards_for_which_torch_has_no_such_operation_are_left(
    ranks: list[dict[str, Found]], name: str, way: str
) -> None:
    for rank in ranks:
        plain, found = rank["sharded"][f"{name}, off"], rank["sharded"][f"{name}, {way}"]
        torch.testing.assert_close(found["weights"], plain["weights"], rtol=0, atol=0)
        assert "for distributed parameters" in found["applied"]


def test_a_group_of_shards_and_whole_parameters_is_left(ranks: list[dict[str, Found]]) -> None:
    """Torch refuses operations on both."""
    for rank in ranks:
        plain, found = rank["half sharded"]["off"], rank["half sharded"]["foreach"]
        torch.testing.assert_close(found["weights"], plain["weights"], rtol=0, atol=0)
        assert "not all of its parameters are distributed over the same processes" in found["applied"]
