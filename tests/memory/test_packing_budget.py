"""Which places go on being packed after their trials, and that the books have an end."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.core.clocks import Span
from lightning_accel.memory import packer as packer_module
from lightning_accel.memory.packer import NO_ROOM, Packer
from lightning_accel.memory.packing_budget import DENSE, SLOW, TRIALS, SavePlace, choose
from lightning_accel.memory.saved_tensors import saving
from support.packing_steps import SIZE, patient, sparse, step

pytestmark = pytest.mark.numbers

# -- verdicts ----------------------------------------------------------------------------------------------------------


def place(*, freed: int, seconds: float, leader: SavePlace | None = None) -> SavePlace:
    span = Span(torch.device("cpu"))
    span._began, span._ended = 0, round(1e9 * seconds)
    return SavePlace(before_bytes=freed + 1000, after_bytes=1000, leader=leader, sightings=[[span]] * TRIALS)


def test_places_that_free_most_bytes_a_second_get_the_time_there_is() -> None:
    slow, fast, tiny = place(freed=900, seconds=0.09), place(freed=900, seconds=0.01), place(freed=10, seconds=0.001)
    choose([slow, tiny, fast], step_seconds=0.601, max_time_share=0.1)  # 0.05 s for packing
    assert [p.reason for p in (slow, fast, tiny)] == [SLOW, "", ""]
    assert all(p.is_decided for p in (slow, fast, tiny))


def test_the_saves_of_one_storage_are_kept_or_given_up_together() -> None:
    leader = place(freed=10_000, seconds=0.01)
    follower = place(freed=0, seconds=0.2, leader=leader)
    choose([leader, follower], step_seconds=1.0, max_time_share=0.1)
    assert not leader.is_packed
    assert not follower.is_packed


def test_a_storage_that_takes_more_when_packed_is_given_up() -> None:
    leader = place(freed=500, seconds=0.001)
    follower = place(freed=0, seconds=0.001, leader=leader)
    choose([leader, follower], step_seconds=1.0, max_time_share=0.1)
    assert leader.reason == DENSE


def test_a_place_on_trial_is_not_judged_yet() -> None:
    new = place(freed=1000, seconds=9.0)
    new.sightings.pop()
    choose([new], step_seconds=10.0, max_time_share=0.1)
    assert new.is_packed
    assert not new.is_decided


def test_with_no_time_allowed_nothing_is_packed_after_the_trials() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    packer = Packer(max_time_share=0.0)
    packed = []
    for _ in range(TRIALS + 2):
        with step(packer):
            loss = x.relu().sum()
        loss.backward()
        packed.append(packer.report().packed)
    assert packed == [1] * TRIALS + [0] * 2
    assert packer.report().left_alone == {SLOW: 1}


def test_a_place_that_turns_dense_is_given_up_at_the_second_time() -> None:
    w = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    packed = []
    for density in (0.1, 0.1, 1.0, 1.0):
        with step(packer):
            loss = ((sparse(density=density) * 2) * w).sum()
        loss.backward()
        packed.append(packer.report().packed)
    assert packed == [1, 1, 1, 0]
    assert packer.report().left_alone == {DENSE: 1}


def test_running_out_of_memory_while_packing_leaves_the_tensor_as_it_is() -> None:
    class NoMemory(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.empty.memory_format:
                raise torch.OutOfMemoryError("no room for a packed copy")
            return func(*args, **(kwargs or {}))

    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    with step(packer), NoMemory():
        loss = x.relu().sum()
    loss.backward()
    assert torch.equal(x.grad, (x > 0).float())
    assert packer.report().left_alone == {NO_ROOM: 1}


# -- over a long run ---------------------------------------------------------------------------------------------------


def train_step(packer: Packer, model: nn.Module) -> None:
    with step(packer, model):
        loss = model(torch.randn(8, 32)).square().mean()
    loss.backward()


def test_nothing_grows_over_a_hundred_steps() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))
    packer = Packer(min_bytes=1, max_time_share=float("inf"))

    def objects() -> int:
        gc.collect()
        kinds = (Tensor, SavePlace, Span, packer_module._PackedHandle, packer_module._Seen)
        return sum(issubclass(type(thing), kinds) for thing in gc.get_objects())

    for _ in range(10):
        train_step(packer, model)
    before = objects()
    for _ in range(100):
        train_step(packer, model)
    assert objects() <= before  # what an earlier test left may go in the meantime
    assert len(packer._seen) == 0


def test_the_table_of_places_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer_module, "_MAX_PLACES", 5)
    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    for _ in range(2):
        with step(packer):
            loss = torch.zeros(())
            for _ in range(10):
                loss = loss + (x + 0).relu().sum()
        loss.backward()
    assert len(packer._places) == 5


def test_an_error_in_the_forward_pass_is_no_verdict() -> None:
    """Its traceback keeps local variables alive, as if the model held them."""
    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()

    def forward(fails: bool) -> Tensor:
        y = x.relu()
        if fails:
            raise KeyError("the model's own")
        return y.sum()

    packer.begin_step()
    with pytest.raises(KeyError), saving(packer, nn.Module()):
        forward(fails=True)
    packer.abandon_step()
    with step(packer):
        loss = forward(fails=False)
    loss.backward()
    assert packer.report().packed == 1
    assert packer.report().left_alone == {}
