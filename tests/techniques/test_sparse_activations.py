"""Sparse activations change what a training step keeps, and not one bit of what it computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_accel.memory.packer import Packer
from lightning_accel.memory.packing_budget import TRIALS
from lightning_accel.techniques.sparse_activations import SparseActivations
from support.models import TASKS, Task
from support.packing_steps import held_bytes

pytestmark = pytest.mark.numbers


def packing(model: nn.Module, min_bytes: int = 1) -> SparseActivations:
    """The technique on models too small to be worth it, without an eye on the clock."""
    return SparseActivations(model, packer=Packer(min_bytes=min_bytes, max_time_share=float("inf")))


class DropoutCNN(nn.Module):
    """Convolutions, ReLUs in three spellings, pooling and dropout in two: (B, 3, 16, 16) → (B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.third = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16 * 8 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        x = x + F.relu(self.third(x))
        return self.head(F.dropout(x.flatten(1), 0.3, self.training))


def cnn_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 16, 16, generator=generator), torch.randint(4, (8,), generator=generator)


MODELS = {**TASKS, "relus and dropout": Task(DropoutCNN, cnn_batch, F.cross_entropy)}


def trained(
    model: nn.Module, task: Task, technique: SparseActivations | None, forward: Callable[..., Any] | None = None
) -> list[Any]:
    """All losses and gradients of some steps, the weights after them, and the random number drawn next."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: list[Any] = []
    for index in range(TRIALS + 2):
        inputs, targets = task.batch(index)
        optimizer.zero_grad()
        with technique.step("train") if technique else nullcontext():
            loss = task.loss((forward or model)(inputs), targets)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return [*seen, dict(model.state_dict()), torch.rand(1)]


def assert_same_run(
    task: Task, change: Callable[[nn.Module], Any] = lambda model: None, min_bytes: int = 1
) -> SparseActivations:
    """Trains plain and packed, and compares to the last bit. ``change`` may give another forward."""
    plain = task.model()
    model = copy.deepcopy(plain)
    technique = packing(model, min_bytes)
    expected, actual = trained(plain, task, None, change(plain)), trained(model, task, technique, change(model))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert technique.packer.report().packed > 0
    return technique


# -- same numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_a_plain_runs_to_the_last_bit(name: str) -> None:
    assert_same_run(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_under_autocast_are_a_plain_runs(name: str) -> None:
    def in_bfloat16(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x).float()

        return forward

    assert_same_run(MODELS[name], in_bfloat16)


@pytest.mark.parametrize("name", ["cnn", "relus and dropout"])
def test_gradients_in_channels_last_are_a_plain_runs(name: str) -> None:
    def rearranged(model: nn.Module) -> Callable[[Tensor], Tensor]:
        model.to(memory_format=torch.channels_last)
        return lambda x: model(x.to(memory_format=torch.channels_last))

    assert_same_run(MODELS[name], rearranged)


def test_blocks_that_are_checkpointed_train_the_same() -> None:
    def checkpointed(model: nn.Module) -> None:
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)

    assert_same_run(TASKS["cnn"], checkpointed)


def test_parts_that_are_compiled_train_the_same() -> None:
    class Part(nn.Module):
        """Of the user's own: of a module of torch's own nothing would be compiled."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    def compiled(model: nn.Module) -> None:
        model.first = Part(model.first)
        model.first.compile(backend="aot_eager")

    assert_same_run(MODELS["relus and dropout"], compiled)


def test_validation_between_steps_is_left_alone() -> None:
    model = DropoutCNN()
    technique = packing(model)
    inputs, targets = cnn_batch(0)
    for stage, context in (("train", nullcontext()), ("validate", torch.no_grad()), ("train", torch.no_grad())):
        with context, technique.step(stage):
            loss = F.cross_entropy(model(inputs), targets)
        before = technique.run.status
        if loss.requires_grad:
            loss.backward()
    assert technique.run.status == before


# -- memory ----------------------------------------------------------------------------------------------------------


def test_the_memory_between_forward_and_backward_shrinks_by_what_the_report_says() -> None:
    inputs, targets = (torch.cat([part] * 16) for part in cnn_batch(0))
    model = DropoutCNN()
    technique = packing(model, min_bytes=64 << 10)
    held = {}
    for packs in (False, True, True, True):

        def forward(packs: bool = packs) -> Tensor:
            with technique.step("train") if packs else nullcontext():
                return F.cross_entropy(model(inputs), targets)

        held[packs] = held_bytes(forward)
        forward().backward()
    report = technique.packer.report()
    assert held[True] < 0.75 * held[False]
    assert held[False] - held[True] == pytest.approx(report.before_bytes - report.after_bytes, rel=0.1)


# -- what it says ----------------------------------------------------------------------------------------------------


def test_the_status_gives_bytes_before_and_after_and_what_was_left_alone() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh())
    technique = packing(model, min_bytes=64 << 10)
    assert technique.run.status == "waiting for the first step"
    x = torch.randn(256, 256)
    with technique.step("train"):
        model(x).sum()
    said = "256.0 KiB of saved tensors kept in 136.9 KiB: 1 tensor packed, 2 left alone (2 dense)"
    assert technique.run.status == said


def test_a_model_with_nothing_sparse_is_told_so() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh())
    technique = packing(model, min_bytes=64 << 10)
    with technique.step("train"):
        model(torch.randn(256, 256)).sum()
    assert technique.run.status == "nothing to pack: 2 left alone (2 dense)"
    technique = packing(model, min_bytes=1 << 30)
    with technique.step("train"):
        model(torch.randn(256, 256)).sum()
    assert technique.run.status == "nothing to pack: no large tensor is saved"


def test_an_error_in_the_step_leaves_nothing_behind() -> None:
    model = DropoutCNN()
    technique = packing(model)
    with pytest.raises(IndexError), technique.step("train"):
        F.cross_entropy(model(cnn_batch(0)[0]), torch.full((8,), 99))
    assert technique.run.status == "waiting for the first step"
    x = torch.randn(4, requires_grad=True)
    assert type(x.exp().grad_fn._saved_result) is Tensor
    with technique.step("train"):
        loss = model(cnn_batch(0)[0]).sum()
    loss.backward()
    assert "tensors packed" in technique.run.status


@pytest.mark.gpu
def test_gradients_on_a_gpu_are_a_plain_runs(determinism_restored: None) -> None:
    torch.backends.cudnn.deterministic = True

    def on_gpu(model: nn.Module) -> Callable[[Tensor], Tensor]:
        model.cuda()
        return lambda x: model(x.cuda()).cpu()

    assert_same_run(MODELS["relus and dropout"], on_gpu)
