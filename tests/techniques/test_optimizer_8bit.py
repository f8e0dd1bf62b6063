"""Moments in 8 bits: what they save, what they are off by, and that nobody else ever sees them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_accel.core.layout import OptimizerLayouts, WeightLayout
from lightning_accel.techniques.optimizer_8bit import state_bytes
from support.techniques.eight_bit_cases import NEAR, assert_plain, network, packed, started, train

pytest.importorskip("torchao", reason="optimizer states in 8 bits are torchao's")
pytestmark = pytest.mark.numbers


# -- what it saves, and costs ----------------------------------------------------------------------------------------


def test_states_take_a_quarter_of_the_bytes() -> None:
    """A byte an element instead of four, and for each block of 256 another four; a table of 1 KiB a moment."""
    model = nn.Linear(512, 512, bias=False)
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    elements = 2 * 512 * 512
    assert state_bytes(optimizer) == (elements + 4 * elements // 256 + 2 * 1024, 4 * elements)
    handle.undo()


def test_only_a_part_of_the_states_is_in_floats_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_accel.techniques import optimizer_8bit

    monkeypatch.setattr(optimizer_8bit, "CHUNK_ELEMENTS", 3 * 64 * 64)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(7)])
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    together = []
    step = optimizer_8bit.EightBitStates._step_together
    monkeypatch.setattr(
        optimizer_8bit.EightBitStates,
        "_step_together",
        lambda self, parameters, group: (together.append(len(parameters)), step(self, parameters, group)),
    )
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    assert together == [3, 3, 1]
    handle.undo()


def test_the_report_has_the_measured_errors() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.01)
    handle = started(optimizer, model)
    train(model, optimizer, 12, handle)
    status = handle.report.of("optimizer_8bit").status
    assert "MiB instead of" in status
    assert "the first moment by 1." in status or "the first moment by 2." in status
    assert "an update by" in status
    assert "(at step 10)" in status
    handle.undo()


def test_it_trains_about_as_well() -> None:
    model = network()
    plain = copy.deepcopy(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    handle = started(optimizer, model)
    losses, expected = train(model, optimizer, 100), train(plain, AdamW(plain.parameters(), lr=0.01), 100)
    assert losses != expected  # it does change training
    assert losses[-1] == pytest.approx(expected[-1], rel=0.05)
    handle.undo()


def test_the_first_step_is_the_plain_ones() -> None:
    """Moments are rounded after they were used."""
    model = network()
    plain = copy.deepcopy(model)
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    train(model, optimizer, 1)
    train(plain, AdamW(plain.parameters()), 1)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    handle.undo()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"foreach": False},
        {"foreach": True},
        {"fused": True},
        {"amsgrad": True},
        {"maximize": True, "weight_decay": 0.1},
        {"lr": torch.tensor(0.01), "foreach": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_options_of_the_optimizer_hold(kind: type[Optimizer], options: dict[str, Any]) -> None:
    options = {"lr": 0.01, **options}
    model = network()
    plain = copy.deepcopy(model)
    optimizer, reference = kind(model.parameters(), **options), kind(plain.parameters(), **options)
    handle = started(optimizer, model)
    losses, expected = train(model, optimizer), train(plain, reference)
    assert losses == pytest.approx(expected, rel=NEAR)
    assert len(packed(optimizer)) == (6 if "amsgrad" in options else 4)
    assert_plain(optimizer, reference)
    handle.undo()


def test_bfloat16_parameters_have_bfloat16_states_in_checkpoints() -> None:
    model = network(torch.bfloat16)
    plain = copy.deepcopy(model)
    optimizer, reference = AdamW(model.parameters()), AdamW(plain.parameters())
    handle = started(optimizer, model)
    train(model, optimizer, 3)
    train(plain, reference, 3)
    assert len(packed(optimizer)) == 4
    assert_plain(optimizer, reference)
    handle.undo()


def test_a_channels_last_weight_keeps_its_layout_and_a_fused_step_its_elements() -> None:
    model = nn.Conv2d(16, 32, 4).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    sides = [(m, AdamW(m.parameters(), lr=0.01, fused=True)) for m in (model, plain)]
    handle = started(sides[0][1], model)
    for _ in range(3):
        for side, optimizer in sides:
            side(torch.ones(1, 16, 4, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight, plain.weight, rtol=0.01, atol=1e-3)
    assert_plain(sides[0][1], sides[1][1])
    handle.undo()


def test_moments_stay_in_8_bits_when_their_weight_changes_its_layout() -> None:
    """They have the shape of the weight, but no memory of their own that strides could describe."""
    model = nn.Conv2d(64, 64, 3)
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    model(torch.ones(1, 64, 4, 4)).sum().backward()
    optimizer.step()
    strides = [moment.stride() for moment in packed(optimizer)]
    layouts = OptimizerLayouts(model.parameters())
    layouts.watch(optimizer)
    WeightLayout("", model, 4).lay()
    layouts.match()
    assert len(strides) == 2
    assert [moment.stride() for moment in packed(optimizer)] == strides
    handle.undo()


# -- checkpoints, copies, undoing ------------------------------------------------------------------------------------


def test_a_plain_optimizer_goes_on_from_its_checkpoint() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.01)
    handle = started(optimizer, model)
    train(model, optimizer)
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    twin = network()
    twin.load_state_dict(model.state_dict())
    plain = AdamW(twin.parameters(), lr=0.01)
    plain.load_state_dict(saved)
    assert train(twin, plain) == pytest.approx(train(model, optimizer), rel=NEAR)
    handle.undo()


def test_it_goes_on_from_a_plain_checkpoint() -> None:
    plain = network()
    before = AdamW(plain.parameters(), lr=0.01)
    train(plain, before)
    model = copy.deepcopy(plain)
    optimizer = AdamW(model.parameters(), lr=0.01)
    handle = started(optimizer, model)
    optimizer.load_state_dict(before.state_dict())
    assert len(packed(optimizer)) == 4
    assert train(model, optimizer) == pytest.approx(train(plain, before), rel=NEAR)
    handle.undo()


def test_saving_does_not_unpack_what_is_in_use() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    train(model, optimizer, 2)
    optimizer.state_dict()
    assert len(packed(optimizer)) == 4
    handle.undo()


def test_states_that_are_there_already_are_packed_and_given_back() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    handle = started(optimizer, model)
    assert len(packed(optimizer)) == 4
    handle.undo()
    assert packed(optimizer) == []
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(
                value, before["state"][index][name], rtol=0.1, atol=float(value.abs().max()) / 64
            )
    assert vars(optimizer).keys() == vars(AdamW(network().parameters())).keys()
    train(model, optimizer, 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copied", "pickled"])
def test_what_is_copied_in_mid_run_is_a_plain_optimizer(copied: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.01)
    handle = started(optimizer, model)
    train(model, optimizer, 3)
    twin, twins = copied((model, optimizer))
    assert packed(twins) == []
    assert len(packed(optimizer)) == 4
    assert train(twin, twins) == pytest.approx(train(model, optimizer), rel=NEAR)
    assert packed(twins) == []
    handle.undo()


def test_undone_in_mid_run_the_user_goes_on_with_floats() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.01)
    handle = started(optimizer, model)
    train(model, optimizer, 3)
    twin, plain = copy.deepcopy((model, optimizer))
    handle.undo()
    assert train(model, optimizer) == train(twin, plain)


def test_a_group_that_was_taken_out_in_mid_run_comes_back_with_floats() -> None:
    model = network()
    optimizer = AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    handle = started(optimizer, model)
    train(model, optimizer, 2)
    frozen = optimizer.param_groups.pop(0)
    handle.undo()
    optimizer.add_param_group(frozen)
    assert packed(optimizer) == []
    train(model, optimizer, 1)


def test_without_the_run_the_optimizers_hooks_are_the_users() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    started(optimizer, model).undo()
    train(model, optimizer, 1)
    assert called == ["post"]
