"""What each level of a snapshot brings back, and what it says had changed."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from lightning_accel.core.layout import WeightLayout
from lightning_accel.core.patch import MethodPatch
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.core.tree import map_tensors

pytestmark = pytest.mark.numbers

CPU = torch.device("cpu")
OWN = {
    "torch": (torch.Generator, lambda own: float(torch.rand((), generator=own))),
    "Python": (random.Random, lambda own: own.random()),
    "NumPy": (numpy.random.default_rng, lambda own: float(own.random())),
    "NumPy, older": (numpy.random.RandomState, lambda own: float(own.random_sample())),
    "NumPy, with arrays": (lambda: numpy.random.Generator(numpy.random.Philox(1)), lambda own: float(own.random())),
}


@pytest.mark.parametrize("level", [Level.RANDOM, Level.SMALL, Level.FULL])
@pytest.mark.parametrize(("make", "draw"), OWN.values(), ids=OWN)
def test_a_modules_own_generator_draws_the_same_again(
    make: Callable[[], object], draw: Callable[[object], float], level: Level
) -> None:
    module = nn.Module()
    module.generator = make()
    before = StateSnapshot(module, level)
    drawn = draw(module.generator)
    assert before.restore() == ["generator"]
    assert draw(module.generator) == drawn


def test_a_generator_that_was_not_drawn_from_has_not_changed() -> None:
    module = nn.Module()
    module.generators = torch.Generator(), random.Random(1)
    module.generator, module.system = torch.Generator(), random.SystemRandom()
    assert StateSnapshot(module, Level.FULL, CPU).restore() == []


def test_the_streams_of_the_process_draw_the_same_again() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    with StateSnapshot(None, Level.RANDOM, CPU) as before:
        drawn = draw()
        assert before.drawn() == ["random", "numpy.random", "torch"]
    assert draw() == drawn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("table", torch.zeros(3 << 18))  # of float32: larger than what is small
        self.register_buffer("absent", None)
        self.plain = torch.zeros(2)
        self.steps, self.seen, self.counts = 0, [1, 2], {"a": 1}
        self.inner(torch.ones(2)).sum().backward()
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        self.optimizer.step()

    def train_step(self) -> None:
        """Changes everything."""
        self.inner(torch.ones(2)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = 1.0
        for values in (self.mean, self.table, self.plain):
            values += 1
        self.absent, self.steps = torch.ones(1), 1
        self.seen.append(3)
        self.counts["a"] = 2

    def state(self) -> dict[str, Any]:
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        trained = [*self.parameters(), *(p.grad for p in self.parameters()), *momenta]
        kept = {name: getattr(self, name) for name in ("mean", "table", "absent", "plain", "steps", "seen", "counts")}
        kept |= {"trained": trained, "optimizer.lr": self.optimizer.param_groups[0]["lr"]}
        copied: dict[str, Any] = map_tensors(lambda tensor: tensor.tolist(), kept)
        return copied


SMALL = {"absent", "mean", "steps", "seen"}
FULL = SMALL | {"table", "plain", "counts"}


@pytest.mark.parametrize(
    ("level", "restored"),
    [
        (Level.RANDOM, set()),
        (Level.SMALL, SMALL),
        (Level.FULL, FULL),
        (Level.TRAINING, FULL | {"trained", "optimizer.lr"}),
    ],
)
@pytest.mark.parametrize("copies_on", [None, CPU])
def test_a_level_brings_back_what_it_says_as_often_as_it_is_asked(
    level: Level, restored: set[str], copies_on: torch.device | None
) -> None:
    model = Model()
    before = model.state()
    snapshot = StateSnapshot(model, level, optimizers=[model.optimizer], copies_on=copies_on)
    for _ in range(2):
        model.train_step()
        assert all(value != before[name] for name, value in model.state().items())
        changed = snapshot.restore()
        after = model.state()
        assert {name for name in before if after[name] == before[name]} == restored
        assert set(changed) == restored - {"trained"}


@pytest.mark.parametrize("level", [Level.SMALL, Level.FULL])
def test_a_buffer_that_holds_no_number_has_not_changed_until_it_does(level: Level) -> None:
    """A best value that has not been measured yet, say."""
    model = nn.Module()
    model.register_buffer("best", torch.tensor([float("nan"), float("inf")]))
    snapshot = StateSnapshot(model, level)
    assert snapshot.restore() == []
    model.best.zero_()
    assert snapshot.restore() == ["best"]
    assert model.best.isnan().tolist() == [True, False]


def test_a_set_that_has_shrunk_keeps_its_order_and_has_not_changed() -> None:
    """A copy of it has another order."""
    model = nn.Module()
    model.active = set(range(1000))
    for number in set(range(1000)) - {2, 9}:
        model.active.discard(number)
    order = list(model.active)
    assert list(model.active.copy()) != order
    assert StateSnapshot(model, Level.FULL).restore() == []
    assert list(model.active) == order


def test_a_gradient_is_held_only_where_its_copy_lies_beside_it() -> None:
    for copies_on, is_same in ((None, True), (CPU, False)):
        model = nn.Linear(2, 1)
        model(torch.ones(2)).sum().backward()
        gradient = weakref.ref(model.weight.grad)
        snapshot = StateSnapshot(model, Level.TRAINING, copies_on=copies_on)
        model.zero_grad()
        assert (gradient() is not None) is is_same
        snapshot.restore()
        assert (model.weight.grad is gradient()) is is_same
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_a_layout_that_was_given_back_since_stays_the_users() -> None:
    """A step that raises under memory_format is repeated without it: first the edit goes, then values come back."""
    model = nn.Conv2d(3, 4, 3)
    values, strides = model.weight.detach().clone(), model.weight.stride()
    layout = WeightLayout("", model, 4)
    layout.lay()
    snapshot = StateSnapshot(model, Level.TRAINING)
    with torch.no_grad():
        model.weight.add_(1)
    layout.show()
    snapshot.restore()
    assert model.weight.stride() == strides
    assert torch.equal(model.weight, values)


@pytest.mark.parametrize("level", [Level.SMALL, Level.FULL])
def test_names_keep_their_order_and_edits_of_ours_stay(level: Level) -> None:
    model = nn.Module()
    for name in "abc":
        model.register_buffer(name, torch.zeros(1))
    model.of_users = 1
    snapshot = StateSnapshot(model, level)
    del model.b
    model.of_users, model.new = 2, 1
    MethodPatch("", "edited", model, "half", lambda original: lambda self: 3).apply()
    assert sorted(snapshot.restore()) == ["b", "new", "of_users"]
    assert list(model.state_dict()) == ["a", "b", "c"]
    assert (model.of_users, model.half()) == (1, 3)
