"""Ranks do the same, or stop together with the same words."""

from __future__ import annotations

import pytest

from lightning_accel.core.ranks import gather
from strategies.conftest import Said


@pytest.mark.parametrize(
    ("scenario", "complaint"),
    [
        ("different_types_of_devices", "The ranks run on different types of devices: rank 0 has"),
        ("different_precisions", "precision='auto' comes to different precisions"),
        ("a_rank_without_a_compiler", "rank 1 goes without compile at 'net.blocks.0' (nothing to build kernels with"),
        ("a_rank_that_cannot_follow", "rank 1 goes without inplace_activations at 'net.1' (could not be applied"),
    ],
)
def test_all_ranks_stop_with_the_same_words(said: Said, scenario: str, complaint: str) -> None:
    first, second = said(scenario)
    assert complaint in first["error"]
    assert first["error"] == second["error"]


def test_a_process_by_itself_gathers_from_itself() -> None:
    assert gather("mine") == ["mine"]
