"""Standard networks: all their safe sites are found, and they train to the same bits as without."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from techniques.inplace_activations.inplace_harness import assert_same, convert, run
from techniques.inplace_activations.inplace_networks import networks


@pytest.mark.parametrize("name", list(networks()))
def test_all_safe_sites_are_found_and_training_stays_the_same(name: str) -> None:
    torch.manual_seed(0)
    model, safe = networks()[name]
    plain, x = copy.deepcopy(model), torch.randn(4, 3, 16, 16)

    # On copies, whose batch statistics may move.
    outcome = convert(model, lambda: run(model, x))
    run(plain, x)

    assert outcome.applied == safe, outcome.refused
    assert_same(_train(model, x), _train(plain, x))


def _train(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + [p.detach() for p in model.parameters()] + list(model.buffers())


def test_a_mlp_with_dropout_behind_gelu_and_behind_relu() -> None:
    """GELU saves its input, so its result is free; ReLU saves its result."""
    layers = [nn.Linear(8, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)]
    model = nn.Sequential(*layers)

    outcome = convert(model, lambda: run(model, torch.randn(4, 8)))

    assert outcome.applied == {"2", "4"}
    assert outcome.refused == {"5": "its input is saved for the backward pass by 4 (Sequential)"}


def test_transformer_layers_of_pytorch_are_read_too() -> None:
    """Their linear layers work on 3-D input: what stands behind them gets a view, and stays as it is."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    outcome = convert(layer, lambda: run(layer, torch.randn(2, 5, 16)))

    assert outcome.applied == set()
    assert "view" in outcome.refused["dropout2"]
