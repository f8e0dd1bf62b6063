"""Checkpointing changes no numbers: weights, gradients, random streams, running statistics, state_dict."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.models import TASKS
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


@dataclass
class Boxed:
    hidden: Tensor
    note: str = ""


class Pair(NamedTuple):
    hidden: Tensor
    extra: Tensor


class KeywordsOnly(Base):
    def forward(
        self, *, hidden: Tensor, scale: float = 1.0, debug: bool = False, determinism_check: str = ""
    ) -> Tensor:
        return scale * self.inner(hidden)


class ReturnsTuple(Base):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x), None, {"norm": x.norm(), "count": 3}


class ReturnsDataclass(Base):
    def forward(self, x: Any) -> Any:
        return Boxed(self.inner(x), "made here")


class ReturnsNamedTuple(Base):
    def forward(self, x: Any) -> Any:
        return Pair(self.inner(x), x.detach())


class TakesNested(Base):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"states": [self.inner(batch["states"][0])], "mask": batch["mask"]}


class Frozen(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)


class FunctionalDropout(Base):
    def inner(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(x), 0.5, self.training)


class Spectral(Base):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.linear)


class Nested(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))

    def inner(self, x: Tensor) -> Tensor:
        return self.inside(x)


class SecondOrder(Base):
    """Uses a gradient in its forward pass, as force fields and gradient penalties do."""

    def inner(self, x: Tensor) -> Tensor:
        energy = self.linear(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + 0.01 * force


def _autocast(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return block(x).float()


def _autocast_twice(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return block(block(x).float()).float()


def mask() -> Tensor:
    return torch.ones(3, dtype=torch.bool)


CHAINS: dict[str, Callable[[], Chain]] = {
    "plain": lambda: Chain(Base, lambda b, x: b(x)),
    "called several times": lambda: Chain(Base, lambda b, x: b(x), times=3),
    "keywords only": lambda: Chain(
        KeywordsOnly, lambda b, x: b(hidden=x, scale=0.5, debug=True, determinism_check="x")
    ),
    "returns a tuple with None and a dict": lambda: Chain(ReturnsTuple, lambda b, x: b(x)[0] / b(x)[2]["norm"]),
    "returns a dataclass": lambda: Chain(ReturnsDataclass, lambda b, x: b(x).hidden),
    "returns a namedtuple": lambda: Chain(ReturnsNamedTuple, lambda b, x: b(x).hidden),
    "takes a nested dict": lambda: Chain(TakesNested, lambda b, x: b({"states": [x], "mask": mask()})["states"][0]),
    "frozen parameters": lambda: Chain(Frozen, lambda b, x: b(x)),
    "functional dropout": lambda: Chain(FunctionalDropout, lambda b, x: b(x)),
    "parametrised weights": lambda: Chain(Spectral, lambda b, x: b(x)),
    "blocks with parts": lambda: Chain(Nested, lambda b, x: b(x)),
    "a gradient inside forward": lambda: Chain(SecondOrder, lambda b, x: b(x)),
    "autocast inside forward": lambda: Chain(Base, lambda b, x: _autocast(b, x)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_every_kind_of_block_trains_to_the_very_same_weights(make: Callable[[], Chain], mode: str) -> None:
    """To the last bit, and with the same random stream after every step: dropout is replayed, not drawn again."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    expected, actual = trained(plain, None), trained(model, handle)
    assert handle.report.applied("gradient_checkpointing") == ["blocks.0", "blocks.1"]
    handle.undo()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "batch norm with a cumulative average": lambda: nn.BatchNorm1d(8, momentum=None),
    "batch norm without statistics": lambda: nn.BatchNorm1d(8, track_running_stats=False),
    "sync batch norm in evaluation": lambda: nn.SyncBatchNorm(8).eval(),
    "instance norm with statistics": lambda: _Unsqueezed(nn.InstanceNorm1d(8, track_running_stats=True)),
    "frozen statistics": lambda: nn.BatchNorm1d(8).eval(),
}


class _Unsqueezed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unsqueeze(-1).expand(-1, -1, 4) * torch.arange(4.0)).mean(-1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make_norm", NORMS.values(), ids=NORMS)
def test_running_statistics_move_once_a_step_as_without_checkpointing(
    make_norm: Callable[[], nn.Module], mode: str
) -> None:
    """Recomputing a block passes its batch through the norms again; mean, variance and count must not notice."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Normed(make_norm()), Normed(make_norm()))
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    expected, actual = trained(plain, None), trained(model, handle)
    assert handle.report.applied("gradient_checkpointing") == ["1", "2"]
    handle.undo()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [getattr(m, "momentum", None) for m in model.modules()] == [
        getattr(m, "momentum", None) for m in plain.modules()
    ]


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_kept_can_be_walked_twice(mode: str) -> None:
    plain = TASKS["cnn"].model()
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    for net, context in ((plain, nullcontext()), (model, handle.step())):
        inputs, targets = TASKS["cnn"].batch()
        with context:
            loss = F.cross_entropy(net(inputs), targets)
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol=0, atol=0
    )
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives_pass_through(mode: str) -> None:
    plain = CHAINS["blocks with parts"]().eval()
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    found = []
    for net, context in ((plain, nullcontext()), (model, handle.step())):
        x = torch.ones(2, 8, requires_grad=True)
        with context:
            energy = net(x).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        slope.square().sum().backward()
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_checkpointed(no_gradients: Callable[[], Any]) -> None:
    plain = TASKS["transformer"].model().eval()
    model = copy.deepcopy(plain)
    handle = checkpointed(model)
    tokens = TASKS["transformer"].batch()[0]
    with no_gradients(), handle.step("validate"):
        assert torch.equal(model(tokens), plain(tokens))
    handle.undo()


def test_a_validation_before_the_first_step_is_not_taken_for_the_trial() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Counting(), Counting())
    handle = checkpointed(model)
    with torch.no_grad():
        for stage in ("validate", "train"):
            with handle.step(stage):
                model(torch.ones(2, 8))
    with handle.step():
        model(torch.ones(2, 8))
    assert set(handle.report.refused("gradient_checkpointing")) == {"1", "2"}


@pytest.mark.parametrize("mode", MODES)
def test_a_block_called_twice_in_an_autocast_region_meets_no_cast_that_its_recomputation_would_miss(mode: str) -> None:
    """The second call finds its weights in autocast's cache; recomputed alone, it has to cast them."""
    torch.manual_seed(0)
    plain = Chain(Base, _autocast_twice)
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode)
    expected, actual = trained(plain, None), trained(model, handle)
    assert handle.report.applied("gradient_checkpointing") == ["blocks.0", "blocks.1"]
    handle.undo()
    torch.testing.assert_close(actual, expected, rtol=0.03, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_an_autocast_region_of_the_users_around_the_model_keeps_its_gradients(mode: str) -> None:
    """A trial's casts, made under no_grad and kept in autocast's cache, would cut the weights off."""
    plain = TASKS["cnn"].model()
    model = copy.deepcopy(plain)
    handle = checkpointed(model, mode, memory_format="channels_last")
    inputs, targets = TASKS["cnn"].batch()
    for net, context in ((plain, nullcontext()), (model, handle.step())):
        with context, torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
    handle.undo()
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol=0.05, atol=0.02
    )
