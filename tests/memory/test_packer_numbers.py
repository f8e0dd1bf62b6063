"""Numbers never notice that tensors were packed, whatever is done with the graph."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.memory.saved_tensors import saving
from support.packing_steps import SIZE, patient, sparse, step

pytestmark = pytest.mark.numbers


def test_changing_a_tensor_after_it_was_saved_is_the_usual_error() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    w = torch.randn(SIZE, requires_grad=True)
    with step(patient()):
        y = x.relu()
        loss = (y * w).sum()
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_saved_before_and_after_a_change_is_two_tensors() -> None:
    y = sparse()
    u, w = torch.randn(SIZE, requires_grad=True), torch.randn(SIZE, requires_grad=True)
    with step(patient()):
        first = (y * u).sum()
        y.mul_(2)
        second = (y * w).sum()
    second.backward()
    assert torch.equal(w.grad, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_two_parts_of_one_storage_are_two_tensors() -> None:
    y = sparse(128, 1024)
    u, w = torch.randn(SIZE, requires_grad=True), torch.randn(SIZE, requires_grad=True)
    with step(patient()):
        loss = (y[:64] * u).sum() + (y[64:] * w).sum()
    loss.backward()
    assert torch.equal(u.grad, y[:64])
    assert torch.equal(w.grad, y[64:])


def test_a_place_taken_for_another_changes_no_number() -> None:
    """The turns of the saves shift from step to step, and a ReLU's own save falls where a product's stood."""
    packer = patient()
    for index in range(8):
        x, w = torch.randn(SIZE, requires_grad=True), torch.randn(SIZE, requires_grad=True)
        with step(packer):
            y = x.relu()
            if index % 2:
                y = F.dropout(y, 0.5).relu()
            kept = y.detach().clone()  # y itself, held, would be left alone
            loss = (y * w).sum()
        loss.backward()
        assert torch.equal(w.grad, kept)


def test_a_graph_that_is_kept_can_be_walked_twice_and_differentiated_twice() -> None:
    grads = []
    for packer in (None, patient()):
        torch.manual_seed(3)
        x = torch.randn(SIZE, requires_grad=True)
        with step(packer) if packer else nullcontext():
            loss = (F.dropout(x.relu(), 0.5) ** 3).sum()
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


def test_the_parts_of_a_compiled_model_are_packed_too() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.relu() * x).relu()

    grads = []
    compiled = torch.compile(Halves(), backend="aot_eager")
    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    for using in (None, packer):
        with step(using) if using else nullcontext():
            loss = (compiled(x + 0) * 1.5).sum()
        grads.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(grads[0], grads[1])
    assert packer.report().packed >= 1


def test_a_model_can_be_copied_and_pickled_between_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    packer = patient()
    with step(packer, model):
        loss = model(torch.randn(SIZE)).sum()
        copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    loss.backward()
    assert torch.equal(again[0].weight, model[0].weight)


def test_what_another_saver_takes_first_is_not_packed() -> None:
    class Whole:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()

        def unpack(self) -> Tensor:
            return self.tensor

    class KeepsAll:
        def pack(self, tensor: Tensor) -> Whole:
            return Whole(tensor)

    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    with saving(KeepsAll(), nn.Module()), step(packer):
        x.relu().sum().backward()
    assert packer.report().packed == 0
    assert torch.equal(x.grad, (x > 0).float())
