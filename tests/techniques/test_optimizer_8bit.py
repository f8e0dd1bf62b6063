"""Moments in 8 bits: what they save, what they are off by, and that nobody else ever sees them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import Handle
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelWarning
from lightning_accel.memory import eight_bits
from lightning_accel.techniques.optimizer_8bit import state_bytes

pytest.importorskip("torchao", reason="optimizer states in 8 bits are torchao's")
pytestmark = pytest.mark.numbers

NEAR = 0.05  # of a loss: it falls by a half in such a run, and were the moments lost it would jump

OTHERS_OFF = {"precision": "32-true", "flash_attention": "off", "memory_format": "off", "inplace_activations": "off"}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two weights that are large enough, two biases that are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(dtype)


def started(optimizer: Optimizer, model: nn.Module, **settings: Any) -> Handle:
    plan = Plan(**OTHERS_OFF, **{"optimizer_8bit": "on", "tune": "off", **settings})
    return accelerate(model, plan, optimizers=optimizer, host=Host(kind="cpu", device_name="a CPU"))


def train(model: nn.Module, optimizer: Optimizer, steps: int = 10, handle: Handle | None = None) -> list[float]:
    """A regression; its losses."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    target = torch.randn(64, 64, generator=generator).to(dtype)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 64, generator=generator).to(dtype)
        loss = (model(inputs) - inputs @ target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if handle is not None:
            with handle.step():  # in which what the technique has to say is heard
                pass
    return losses


def moments(optimizer: Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]


def packed(optimizer: Optimizer) -> list[Any]:
    return [value for value in moments(optimizer) if eight_bits.is_packed(value)]


def assert_plain(optimizer: Optimizer, reference: Optimizer) -> None:
    """Saved, it has the keys, shapes, dtypes and classes that a plain one has."""
    saved, expected = optimizer.state_dict(), reference.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for index, state in saved["state"].items():
        assert state.keys() == expected["state"][index].keys()
        for name, value in state.items():
            other = expected["state"][index][name]
            described = [(type(t), t.shape, t.dtype, t.device, t.stride()) for t in (value, other)]
            assert described[0] == described[1], name


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
    adam = optimizer_8bit.adam
    monkeypatch.setattr(
        optimizer_8bit, "adam", lambda params, *a, **k: (together.append(len(params)), adam(params, *a, **k))
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


def test_without_the_run_the_optimizers_hooks_are_the_users() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    started(optimizer, model).undo()
    train(model, optimizer, 1)
    assert called == ["post"]


# -- hostile uses ----------------------------------------------------------------------------------------------------


def test_hooks_and_closures_are_called_once_a_step_and_gradients_are_there_again() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    calls: list[str] = []

    def before(_: Optimizer, args: Any, kwargs: Any) -> None:
        calls.append("before" if all(p.grad is not None for p in model.parameters()) else "before, gradients gone")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        calls.append("closure")
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        return loss

    model(torch.ones(2, 64)).square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    returned = optimizer.step(closure)
    assert isinstance(returned, Tensor)
    assert calls == ["before", "closure", "after"]
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert optimizer.step() is None
    handle.undo()


def test_a_closure_that_raises_leaves_the_gradients() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    model(torch.ones(2, 64)).square().mean().backward()

    def closure() -> float:
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert all(p.grad is not None for p in model.parameters())
    train(model, optimizer, 2)
    handle.undo()


def test_a_scheduler_of_rates_and_betas_made_afterwards_goes_on() -> None:
    """It rebinds ``step`` on the optimizer, and changes the options of its groups at every step."""
    results = []
    for mode in ("on", "off"):
        model = network()
        optimizer = AdamW(model.parameters())
        handle = started(optimizer, model, optimizer_8bit=mode)
        scheduler = OneCycleLR(optimizer, max_lr=0.01, total_steps=20)
        losses = []
        for _ in range(20):
            losses += train(model, optimizer, 1)
            scheduler.step()
        handle.undo()
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=NEAR)


def test_parameters_added_in_mid_run_and_options_of_each_group_are_honoured() -> None:
    model = network()
    optimizer = AdamW([{"params": model[0].parameters(), "lr": 0.0}], lr=0.01)
    handle = started(optimizer, model)
    frozen = model[0].weight.clone()
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    moving = model[2].weight.clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[2].weight, moving)
    assert len(packed(optimizer)) == 4
    handle.undo()


def test_a_group_made_differentiable_in_mid_run_gets_its_floats_back() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    train(model, optimizer, 2)
    optimizer.param_groups[0]["differentiable"] = True
    train(model, optimizer, 1)
    assert packed(optimizer) == []
    handle.undo()


def test_floats_that_somebody_puts_into_a_state_are_taken_up() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    handle = started(optimizer, model)
    train(model, optimizer, 2)
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros_like(model[0].weight)
    train(model, optimizer, 1)
    assert len(packed(optimizer)) == 4
    handle.undo()


def test_accumulated_gradients_and_clipping_are_the_users() -> None:
    results = []
    for mode in ("on", "off"):
        model = network()
        optimizer = AdamW(model.parameters(), lr=0.01)
        handle = started(optimizer, model, optimizer_8bit=mode)
        for index in range(8):
            (model(torch.ones(2, 64)).square().mean() / 2).backward()
            if index % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        handle.undo()
        results.append(model(torch.ones(2, 64)))
    torch.testing.assert_close(*results, rtol=0.05, atol=0.01)


def test_a_gradient_scaler_skips_its_steps() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), fused=True)
    handle = started(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 64)).mean()).backward()
    before = [p.clone() for p in model.parameters()]
    model[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == 2.0
    handle.undo()


class Lion(Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad.sign())


class LoggingAdamW(AdamW):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class NamedAdamW(AdamW):
    """A subclass without."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (SGD, "SGD does not step as torch's Adam"),
        (RMSprop, "RMSprop does not step as torch's Adam"),
        (Lion, "Lion does not step as torch's Adam"),
        (LoggingAdamW, "LoggingAdamW does not step as torch's Adam"),
        (lambda params: AdamW(params, capturable=True), "capturable=True"),
        (lambda params: AdamW([p for p in params if p.dim() == 1]), "no parameter of 4,096 elements"),
    ],
    ids=["SGD", "RMSprop", "user's", "subclass with a step", "capturable", "small"],
)
def test_other_optimizers_are_left_alone_with_the_reason(make: Callable[[Any], Optimizer], reason: str) -> None:
    model = network()
    optimizer = make(model.parameters())
    handle = started(optimizer, model)
    with handle.step():
        model(torch.ones(2, 64)).sum().backward()
    with pytest.warns(AccelWarning, match="found no site"):
        handle.step()  # the second, by which the loop has made its optimizer
    assert reason in handle.report.to_text()
    handle.undo()


def test_a_subclass_that_steps_as_adamw_does_is_taken() -> None:
    model = network()
    optimizer = NamedAdamW(model.parameters())
    handle = started(optimizer, model)
    train(model, optimizer, 1)
    assert len(packed(optimizer)) == 4
    handle.undo()


def test_two_optimizers_of_one_model_are_both_taken() -> None:
    model = network()
    optimizers = [AdamW(model[0].parameters()), Adam(model[2].parameters())]
    plan = Plan(**OTHERS_OFF, optimizer_8bit="on", tune="off")
    handle = accelerate(model, plan, optimizers=optimizers, host=Host(kind="cpu", device_name="a CPU"))
    model(torch.ones(2, 64)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [len(packed(optimizer)) for optimizer in optimizers] == [2, 2]
    handle.undo()


@pytest.fixture
def no_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_accel.core import torchao

    monkeypatch.setattr(torchao.importlib.util, "find_spec", lambda name: None)


def test_without_torchao_the_mend_is_said(no_torchao: None) -> None:
    model = network()
    with pytest.warns(AccelWarning, match=r"pip install 'lightning-accel\[torchao\]'"):
        handle = started(AdamW(model.parameters()), model)
    handle.undo()


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_card_states_take_a_quarter_and_training_goes_on(fused: bool) -> None:
    results = []
    for mode in ("on", "off"):
        model = network().cuda()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
        plan = Plan(**OTHERS_OFF, optimizer_8bit=mode, tune="off")
        handle = accelerate(model, plan, optimizers=optimizer)
        losses = []
        generator = torch.Generator("cuda").manual_seed(0)
        for _ in range(10):
            inputs = torch.randn(32, 64, device="cuda", generator=generator)
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if mode == "on":
            packed_bytes, floats_bytes = state_bytes(optimizer)
            assert packed_bytes < 0.4 * floats_bytes  # the tables of 1 KiB count in so small a model
        handle.undo()
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=NEAR)
