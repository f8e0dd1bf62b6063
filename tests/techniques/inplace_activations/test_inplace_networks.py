"""Standard networks: they train to the same bits, and nearly all their activations work in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.techniques.inplace_activations.inplace_harness import assert_same_training
from support.techniques.inplace_activations.inplace_networks import networks


@pytest.mark.parametrize("name", list(networks()))
def test_all_safe_calls_are_done_in_place_and_training_stays_the_same(name: str) -> None:
    torch.manual_seed(0)
    model, in_place = networks()[name]

    made = assert_same_training(model, torch.randn(4, 3, 16, 16), steps=2)

    assert made.in_place == {site: 2 * calls for site, calls in in_place.items()}


def test_a_mlp_with_dropout_behind_gelu_and_behind_relu() -> None:
    """GELU saves its input, so its result is free; ReLU saves its result."""
    layers = [nn.Linear(8, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)]

    made = assert_same_training(nn.Sequential(*layers), torch.randn(4, 8), steps=1)

    assert made.in_place == {"2": 1, "4": 1}
    assert made.as_it_was == {"5": 1}


def test_transformer_layers_of_pytorch_get_views_and_stay_as_they_are() -> None:
    """Their linear layers work on 3-D input: what stands behind them gets a view, of the last one until torch 2.15."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    made = assert_same_training(layer, torch.randn(2, 5, 16), steps=1)

    assert set(made.in_place) <= {"dropout2"}
