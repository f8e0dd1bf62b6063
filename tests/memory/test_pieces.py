"""Sequences of layers, recomputed piece by piece: products are kept, the rest is not, and none is computed twice."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel import Plan, accelerate
from lightning_accel.memory.recompute import pieces_of

pytestmark = pytest.mark.numbers

PLAIN: dict[str, Any] = {
    "precision": "32-true",
    "flash_attention": "off",
    "memory_format": "off",
    "inplace_activations": False,
}


def perceptron(width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(8, width), nn.GELU(), nn.Dropout(0.2)),
        *(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()),
        *(nn.Linear(width, 4),),
    )


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
    )


class Written(nn.Module):
    """A perceptron written as one module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


CASES = {
    "perceptron": (perceptron, (16, 8)),
    "convolutions": (convolutions, (4, 3, 12, 12)),
    "one module": (Written, (16, 8)),
}


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def kinds(pieces: list[list[nn.Module]]) -> list[list[str]]:
    return [[type(layer).__name__ for layer in piece] for piece in pieces]


def test_a_piece_ends_in_a_product() -> None:
    assert kinds(pieces_of(perceptron())) == [
        ["Linear"],
        ["GELU", "Dropout", "Linear"],
        ["LayerNorm", "GELU", "Linear"],
    ]


def test_what_follows_the_last_product_is_a_piece_too() -> None:
    assert kinds(pieces_of(convolutions()))[-1] == ["BatchNorm2d", "ReLU"]


@pytest.mark.parametrize("block", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Written()])
def test_what_is_no_long_sequence_has_no_pieces(block: nn.Module) -> None:
    assert pieces_of(block) == []


@pytest.mark.parametrize("case", CASES)
def test_parts_that_occur_once_train_to_the_very_same_weights(case: str) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    handle = accelerate(model, Plan().replace(**PLAIN, gradient_checkpointing="selective"))
    for network, step in ((plain, None), (model, handle)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for index in range(3):
            torch.manual_seed(index)
            x = torch.randn(shape)
            if step is None:
                loss = network(x).square().mean()
            else:
                with step.step():
                    loss = network(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert handle.report.applied("gradient_checkpointing") == [""]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def saved_shapes(model: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    """What stays alive between forward and backward, parameters and the input left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    kept: dict[int, tuple[int, ...]] = {}

    def keep(tensor: Tensor) -> Tensor:
        # checkpoint() itself saves an empty one in torch 2.11.
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tuple(tensor.shape)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).sum()
    loss.backward()
    return list(kept.values())


def test_a_sequence_keeps_its_products_and_nothing_else() -> None:
    torch.manual_seed(0)
    model, x = perceptron(), torch.randn(16, 8)
    handle = accelerate(model, Plan().replace(**PLAIN, gradient_checkpointing="selective"))
    for _ in range(2):
        with handle.step():
            loss = model(x).sum()
        loss.backward()
    assert saved_shapes(model, x) == [(16, 32), (16, 32)]


@pytest.mark.parametrize("case", CASES)
def test_no_product_is_computed_twice(case: str) -> None:
    make, shape = CASES[case]
    counts = []
    for mode in ("off", "selective"):
        torch.manual_seed(0)
        model = make()
        handle = accelerate(model, Plan().replace(**PLAIN, gradient_checkpointing=mode))
        for _ in range(2):
            with handle.step():
                loss = model(torch.randn(shape)).sum()
            with Counting() as counting:
                loss.backward()
        counts.append({name: counting.count[name] for name in ("mm", "addmm", "convolution", "convolution_backward")})
    assert counts[0] == counts[1]


def test_a_copy_runs_its_own_layers() -> None:
    model = perceptron()
    handle = accelerate(model, Plan().replace(**PLAIN, gradient_checkpointing="selective"))
    with handle.step():
        model(torch.randn(16, 8)).sum().backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    twin(torch.randn(16, 8)).sum().backward()
    assert twin[0].weight.grad is not None
    assert twin[0].weight.grad.any()
