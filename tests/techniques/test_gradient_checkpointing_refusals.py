"""Blocks that a second run would change are refused, as are hosts where it saves nothing, and the reason is given."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelWarning
from lightning_accel.techniques.gradient_checkpointing import GradientCheckpointing, MemoryBudget
from lightning_accel.techniques.gradient_checkpointing.budget import MemoryBudgetOptions
from support.techniques.gradient_checkpointing_cases import (
    IN_FORCE_NOWHERE,
    MODES,
    Base,
    Chain,
    Counting,
    Normed,
    checkpointed,
    trained,
)

pytestmark = [pytest.mark.numbers, IN_FORCE_NOWHERE]


class Remembering(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {"last": None}

    def inner(self, x: Tensor) -> Tensor:
        self.seen["last"] = x.detach()
        return super().inner(x)


class Averaging(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def inner(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().inner(x)


class Overwriting(Base):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x.mul_(2.0))


class Gambling(Base):
    """Drops itself by Python's own random, which checkpointing does not replay."""

    def inner(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else super().inner(x)


class OldSpectral(Base):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.linear)


class Graph:
    """A batch object of the user's, as graph libraries have it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class OnGraphs(Base):
    def forward(self, graph: Graph) -> Graph:
        graph.x = self.inner(graph.x)
        return graph


class IntoDict(Base):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["x"] = self.inner(batch["x"])
        return batch


class Mute(Base):
    def forward(self, x: Tensor) -> None:
        return None


REFUSED: dict[str, tuple[Callable[[], Chain], str]] = {
    "a counter": (lambda: Chain(Counting, lambda b, x: b(x)), "its forward changes 'calls'"),
    "a dict": (lambda: Chain(Remembering, lambda b, x: b(x)), "its forward changes 'seen'"),
    "a buffer": (lambda: Chain(Averaging, lambda b, x: b(x)), "its forward changes 'mean'"),
    "its input": (lambda: Chain(Overwriting, lambda b, x: b(x)), "modified in place"),
    "python's random": (
        lambda: Chain(Gambling, lambda b, x: b(x)),
        "(random numbers|its forward changes 'random'|failed)",
    ),
    "power iteration": (lambda: Chain(OldSpectral, lambda b, x: b(x)), "(other |changes 'linear.parametrizations)"),
    "an object of the user's": (lambda: Chain(OnGraphs, lambda b, x: b(Graph(x)).x), "takes a Graph"),
    "a dict it is given": (lambda: Chain(IntoDict, lambda b, x: b({"x": x})["x"]), "(other |failed)"),
    "nothing at all": (lambda: Chain(Mute, lambda b, x: b(x) or x), "returns no tensors"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_block_that_a_second_run_would_change_is_refused_and_the_run_is_the_plain_one(
    make: Callable[[], Chain], reason: str, mode: str
) -> None:
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    random.seed(3)
    expected = trained(plain, None)
    random.seed(3)
    actual = trained(model, handle)
    refused = handle.report.refused("gradient_checkpointing")
    assert set(refused) == {"blocks.0", "blocks.1"}
    assert all(re.search(reason, why) for why in refused.values()), refused
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [getattr(b, "calls", 0) for b in model.blocks] == [getattr(b, "calls", 0) for b in plain.blocks]


def test_a_torchscript_block_is_refused_and_nothing_left_is_a_warning() -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(Normed(nn.LayerNorm(8)) for _ in range(2)))
    for index in (1, 2):
        with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
            model[index] = torch.jit.script(model[index])
    with pytest.warns(AccelWarning, match="asked for and found no site: a TorchScript module"):
        checkpointed(model, blocks=["1", "2"]).undo()


def attention(dropout: float) -> nn.Module:
    return nn.MultiheadAttention(8, 2, dropout=dropout)


@pytest.mark.parametrize(
    ("dropping", "plain"),
    [
        (nn.Dropout(0.1), nn.Dropout(0.0)),
        (nn.Dropout2d(0.1), nn.Identity()),
        (nn.RReLU(), nn.LeakyReLU()),
        (attention(0.1), attention(0.0)),
    ],
)
def test_on_an_apple_gpu_blocks_that_draw_random_numbers_are_left_alone(dropping: nn.Module, plain: nn.Module) -> None:
    """There torch does not bring them back for the recomputation, and the gradient would silently be another's."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), dropping), nn.Sequential(nn.Linear(8, 8), plain))
    handle = checkpointed(model, blocks=["0", "1"], host=Host(kind="mps", device_name="M3"))
    assert list(handle.report.refused("gradient_checkpointing")) == ["0"]
    assert handle.report.applied("gradient_checkpointing") == ["1"]
    handle.undo()
    handle = checkpointed(model, blocks=["0", "1"])
    assert handle.report.applied("gradient_checkpointing") == ["0", "1"]
    handle.undo()


@pytest.mark.parametrize(
    ("host", "full", "budget"),
    [
        (Host(kind="xla", device_name="TPU"), "torch_xla.utils.checkpoint", "torch_xla.utils.checkpoint"),
        (Host(kind="mps", device_name="M3"), None, "memory.checkpoint='selective' or 'full'"),
        (Host(kind="rocm", device_name="MI300X"), None, None),
    ],
)
def test_where_it_saves_nothing_it_says_why_and_what_does(host: Host, full: str | None, budget: str | None) -> None:
    reason = GradientCheckpointing("full").unavailable(host)
    budget_reason = MemoryBudget(MemoryBudgetOptions(budget="1GiB"), None, torch.device("cpu")).unavailable(host)
    for found, mend in ((reason, full), (budget_reason, budget)):
        assert found is None if mend is None else mend in (found or "")


def test_lazy_blocks_are_refused_until_they_are_made() -> None:
    model = nn.Sequential(nn.Linear(4, 8), *(nn.Sequential(nn.LazyLinear(8), nn.ReLU()) for _ in range(2)))
    with pytest.warns(AccelWarning, match="has lazy parameters: run the model once before"):
        checkpointed(model).undo()
    model(torch.ones(2, 4))
    handle = checkpointed(model)
    assert handle.report.applied("gradient_checkpointing") == ["1", "2"]
    handle.undo()
