"""Fused and foreach steps of torch's optimizers: numbers, checkpoints and flags of the user's own, in fewer calls."""

from __future__ import annotations

import copy
import pickle
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import OneCycleLR

from lightning_accel import AccelWarning
from lightning_accel.core import stepping
from lightning_accel.core.optimizers import living_optimizers
from lightning_accel.core.stepping import make_ready
from lightning_accel.techniques.arms import OFF
from support.optimizer_loops import Loop, MakeOptimizer, alone, assert_same_training, network, operations, plain_and

pytestmark = pytest.mark.numbers

momentum = partial(SGD, lr=0.1, momentum=0.9)

FUSED: dict[str, MakeOptimizer] = {
    "SGD": partial(SGD, lr=0.1, weight_decay=0.1),
    "SGD, momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "SGD, maximize": partial(SGD, lr=0.1, momentum=0.9, maximize=True),
    "Adam": partial(Adam, lr=0.01),
    "Adam, amsgrad": partial(Adam, lr=0.01, amsgrad=True, weight_decay=0.1, maximize=True),
    "AdamW": partial(AdamW, lr=0.01),
    "AdamW, amsgrad": partial(AdamW, lr=0.01, amsgrad=True),
    "Adagrad": partial(Adagrad, lr=0.01, lr_decay=0.1, weight_decay=0.1),
}
FOREACH: dict[str, MakeOptimizer] = FUSED | {
    "Adadelta": partial(Adadelta, weight_decay=0.1, maximize=True),
    "Adamax": partial(Adamax, weight_decay=0.1),
    "NAdam": partial(NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": partial(RAdam, weight_decay=0.1),
    "RMSprop": partial(RMSprop, momentum=0.9, centered=True, weight_decay=0.1),
    "Rprop": partial(Rprop, maximize=True),
}
WAYS = [("fused", name) for name in FUSED] + [("foreach", name) for name in FOREACH]


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_it_trains_as_the_users_own_steps_through_every_switch(way: str, name: str) -> None:
    plain, loop = plain_and(way, FOREACH[name])
    for start, choice in ((0, way), (2, OFF), (4, way), (6, OFF), (8, way)):
        loop.patch().switch(choice)
        for each in (plain, loop):
            each.run(range(start, start + 2))
        assert_same_training(loop, plain)
    loop.handle.undo()
    for each in (plain, loop):
        each.run(range(10, 12))
    assert_same_training(loop, plain)


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_gradients_are_the_users_own_after_a_step(way: str, name: str) -> None:
    _, loop = plain_and(way, FOREACH[name])
    loop.run(range(2))
    loop.gradients(2)
    before = [parameter.grad.clone() for parameter in loop.model.parameters() if parameter.grad is not None]
    loop.optimizer.step()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(loop.model.parameters(), before, strict=True))


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_float32_is_stepped_within_its_rounding(way: str, name: str) -> None:
    plain, loop = plain_and(way, FOREACH[name], torch.float32)
    for each in (plain, loop):
        each.run(range(4))
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(loop.weights(), plain.weights(), rtol=64 * eps, atol=64 * eps)
    assert not loop.refused()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_not_fused_on_a_cpu_where_torch_leaves_elements_out(dtype: torch.dtype) -> None:
    """The fused SGD of torch 2.11 to 2.13 steps only what is left of whole vectors: pytorch#191763."""
    make = partial(SGD, lr=0.1)
    model = network(dtype)
    loop = Loop(copy.deepcopy(model), make, "fused")
    with pytest.warns(AccelWarning, match=f"no fused step of SGD on cpu in {str(dtype)[6:]} that is right"):
        loop.run(range(2))
    plain, together = Loop(copy.deepcopy(model), make), Loop(model, make, "foreach")
    for each in (plain, together):
        each.run(range(2))
    assert_same_training(loop, plain)
    assert_same_training(together, plain)


@pytest.mark.parametrize(
    ("make", "kernel", "of_each"),
    [(partial(AdamW, lr=0.01), "_fused_adamw_", 10), (momentum, "_fused_sgd_", 3), (Adagrad, "_fused_adagrad_", 5)],
)
def test_a_fused_step_is_one_kernel_a_group_and_a_foreach_step_as_many_as_for_one_parameter(
    make: MakeOptimizer, kernel: str, of_each: int
) -> None:
    launched: dict[str, list[str]] = {}
    for setting in ("off", "foreach", "fused"):
        loop = Loop(network(), make, setting)
        loop.run(range(2))
        loop.gradients(2)
        launched[setting] = operations(loop.optimizer)
    assert launched["fused"].count(kernel) == 1
    assert len(launched["fused"]) <= 2  # and the counts of steps
    assert len(launched["off"]) >= 6 * of_each
    on_many = [name for name in launched["foreach"] if name.startswith("_foreach")]
    assert on_many
    # Beside them, the counts of steps are read and their constant is made.
    assert {name for name in launched["foreach"] if name not in on_many} <= {"_local_scalar_dense", "lift_fresh"}


def test_off_leaves_neither_hooks_nor_flags() -> None:
    loop = Loop(network(), AdamW, "fused")
    loop.run(range(1))
    assert "_fused_adamw_" in operations(loop.optimizer)
    loop.patch().switch(OFF)
    plain = AdamW(network().parameters())
    counts = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_post_hooks")
    for name in (*counts, "_optimizer_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"):
        assert len(getattr(loop.optimizer, name)) == len(getattr(plain, name)) == 0
    assert "__getstate__" not in vars(loop.optimizer)
    assert "_fused_adamw_" not in operations(loop.optimizer)


def test_flags_are_the_users_own_whenever_they_can_be_read() -> None:
    loop = Loop(network(), AdamW, "fused")
    seen = []

    def closure() -> torch.Tensor:
        seen.append(dict(loop.optimizer.param_groups[0]))
        return torch.tensor(1.5)

    loop.gradients(0)
    assert loop.optimizer.step(closure) == 1.5
    seen.append(loop.optimizer.param_groups[0])
    assert [(each["fused"], each["foreach"]) for each in seen] == [(None, None)] * 2


@pytest.mark.parametrize("as_keyword", [True, False])
def test_gradients_that_a_closure_computes_are_looked_at_after_it(as_keyword: bool) -> None:
    plain, loop = plain_and("fused", momentum)
    for each in (plain, loop):
        for index in range(3):

            def closure(each: Loop = each, index: int = index) -> Any:
                each.gradients(index)
                return index

            step: Any = each.optimizer.step
            assert (step(closure=closure) if as_keyword else step(closure)) == index
    assert_same_training(loop, plain)


def test_a_step_that_raises_leaves_no_flag_in_a_checkpoint() -> None:
    plain, loop = plain_and("fused", AdamW)
    for each in (plain, loop):
        each.run(range(2))
        each.gradients(2)
        each.optimizer.param_groups[0]["lr"] = "not a number"
        with pytest.raises((TypeError, RuntimeError)):
            each.optimizer.step()
    assert loop.optimizer.state_dict()["param_groups"] == plain.optimizer.state_dict()["param_groups"]


def test_a_step_that_is_interrupted_leaves_no_flag_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(network(), SGD, "fused")
    loop.gradients(0)
    seen = []

    def interrupted(*args: Any, fused: bool | None, **kwargs: Any) -> None:
        seen.append(fused)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[SGD.__module__], "sgd", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.optimizer.step()
    assert seen == [True]
    twins = (loop.optimizer, copy.deepcopy(loop.optimizer), pickle.loads(pickle.dumps(loop.optimizer)))
    assert [each.param_groups[0]["fused"] for each in twins] == [None] * 3


def test_copies_between_steps_count_their_steps_as_without_us() -> None:
    """A fused kernel reads the counts in float32, on a GPU on the device, and torch's others wait for it there."""
    torch.set_default_dtype(torch.float64)
    try:
        loop = Loop(network(), AdamW, "fused")
        loop.run(range(2))
        assert {state["step"].dtype for state in loop.optimizer.state.values()} == {torch.float32}
        for twin in (copy.deepcopy(loop.optimizer), pickle.loads(pickle.dumps(loop.optimizer))):
            assert all(step.dtype is torch.float64 and step == 2 for step in (s["step"] for s in twin.state.values()))
        loop.gradients(2)
        assert "_fused_adamw_" in operations(loop.optimizer)
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_a_step_leaves_on_the_optimizer_stays_there() -> None:
    """Torch's step is given a stand-in: the states that the first one makes are the optimizer's own."""
    loop = Loop(network(), AdamW, "fused")
    states, groups = loop.optimizer.state, loop.optimizer.param_groups
    loop.run(range(1))
    assert loop.optimizer.state is states
    assert loop.optimizer.param_groups is groups
    assert {id(parameter) for parameter in states} == {id(parameter) for parameter in loop.model.parameters()}


def test_what_stands_for_an_optimizer_in_its_step_is_found_by_nobody_who_looks_for_one() -> None:
    loop = Loop(network(), AdamW, "fused")
    found: list[Optimizer] = []
    loop.optimizer.register_step_post_hook(lambda *_: found.extend(living_optimizers(loop.model)))
    loop.run(range(1))
    assert found == [loop.optimizer]


def test_a_closure_that_raises_leaves_everything_as_it_was() -> None:
    loop = Loop(network(), AdamW, "fused")
    loop.run(range(1))

    def closure() -> float:
        raise KeyError("user's bug")

    with pytest.raises(KeyError, match="user's bug"):
        loop.optimizer.step(closure)
    assert loop.optimizer.param_groups[0]["fused"] is None
    loop.run(range(1, 2))


@pytest.mark.parametrize("make", [AdamW, Adagrad, momentum])
@pytest.mark.parametrize("ways", [("fused", "off"), ("off", "fused"), ("fused", "foreach")])
def test_a_run_goes_on_from_a_checkpoint_of_another_way(make: MakeOptimizer, ways: tuple[str, str]) -> None:
    plain, first = plain_and(ways[0], make)
    for each in (plain, first):
        each.run(range(3))
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
    second = Loop(network(), make, ways[1])
    second.model.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    for each in (plain, second):
        each.run(range(3, 6))
    assert_same_training(second, plain)


def test_flags_that_a_checkpoint_brings_hold() -> None:
    loop = Loop(network(), AdamW, "fused")
    loop.run(range(1))
    chosen = AdamW(network().parameters(), foreach=True)
    loop.optimizer.load_state_dict(chosen.state_dict() | {"state": loop.optimizer.state_dict()["state"]})
    loop.gradients(1)
    assert any(name.startswith("_foreach_lerp") for name in operations(loop.optimizer))
    assert loop.optimizer.param_groups[0]["foreach"] is True


def test_copies_and_pickles_are_plain_optimizers() -> None:
    loop = Loop(network(), AdamW, "fused")
    loop.run(range(2))
    for twin in (copy.deepcopy(loop.optimizer), pickle.loads(pickle.dumps(loop.optimizer))):
        for group in twin.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        assert "_fused_adamw_" not in operations(twin)
        assert twin.param_groups[0]["fused"] is None


def test_references_to_step_kept_by_the_user_take_the_same_way() -> None:
    model = network()
    optimizer = AdamW(model.parameters())
    step = optimizer.step
    handle = alone("fused", model, optimizer)
    model(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    schedule = OneCycleLR(optimizer, 0.1, total_steps=5)  # wraps step on the instance
    assert "_fused_adamw_" in operations(optimizer)
    schedule.step()
    assert "_fused_adamw_" in operations(step)
    handle.undo()
    assert "_fused_adamw_" not in operations(step)


def test_hooks_of_the_user_are_called_once_a_step() -> None:
    loop = Loop(network(), AdamW, "fused")
    seen = []
    loop.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    loop.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    loop.run(range(2))
    assert seen == ["before", "after"] * 2


def test_groups_that_come_in_mid_run_are_stepped_alike() -> None:
    plain, loop = plain_and("fused", AdamW)
    for each in (plain, loop):
        torch.manual_seed(0)
        each.run(range(2))
        each.model.append(nn.Linear(2, 2, dtype=torch.float64))
        each.optimizer.add_param_group({"params": each.model[-1].parameters(), "lr": 0.1})
        each.run(range(2, 5))
    assert_same_training(loop, plain)
    loop.gradients(5)
    assert operations(loop.optimizer).count("_fused_adamw_") == 2


def test_an_optimizer_made_after_the_plan_is_found_at_the_first_step() -> None:
    model = network()
    handle = alone("fused", model)
    optimizer = AdamW(model.parameters())
    with handle.step():
        loss = model(torch.randn(4, 5, dtype=torch.float64)).sum()
    loss.backward()
    assert "_fused_adamw_" in operations(optimizer)
    assert handle.report.applied("optimizer") == ["optimizer 0"]
    handle.undo()


def test_two_optimizers_of_one_model_are_two_sites() -> None:
    model = network()
    optimizers: list[Optimizer] = [AdamW(model[0].parameters()), RMSprop(model[2].parameters())]
    handle = alone("auto", model, optimizers)
    assert handle.report.applied("optimizer") == ["optimizer 0", "optimizer 1"]
    (arm,) = handle.engine.arms()
    assert arm.choices == ("fused", "foreach")
    model(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    calls = {}
    for choice in ("foreach", OFF, "fused"):
        arm.choose(choice)
        calls[choice] = [{name.partition("_lerp")[0] for name in operations(one)} for one in optimizers]
    assert ["_foreach" in names or "_foreach_mul_" in names for names in calls["foreach"]] == [True, True]
    assert not any("foreach" in name for names in calls[OFF] for name in names)
    assert ["_fused_adamw_" in names for names in calls["fused"]] == [True, False]
    assert not any("foreach" in name for name in calls["fused"][1])  # RMSprop has nothing fused: the user's own
    handle.undo()


def test_what_was_asked_for_by_name_is_not_on_trial() -> None:
    loop = Loop(network(), AdamW, "fused")
    assert loop.handle.engine.arms() == []


def test_one_that_comes_after_the_arm_was_chosen_does_as_the_others() -> None:
    model = network()
    first = AdamW(model[0].parameters())
    handle = alone("auto", model, first)
    (arm,) = handle.engine.arms()
    for choice, is_fused in ((OFF, False), ("fused", True)):
        arm.choose(choice)
        late = AdamW(model[2].parameters())
        handle.engine.add_optimizers([late])
        model(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
        assert ("_fused_adamw_" in operations(late)) is is_fused
    handle.undo()


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method")
def test_a_compiled_step_is_the_compilers_to_fuse_and_compiled_once() -> None:
    plain, loop = plain_and("fused", AdamW)
    counts = []
    for each in (plain, loop):
        torch._dynamo.reset()
        counts.append(counter := CompileCounter())
        step = torch.compile(each.optimizer.step, backend=counter)
        for index in range(3):
            each.gradients(index)
            step()
    assert (counts[0].frame_count, counts[0].op_count) == (counts[1].frame_count, counts[1].op_count)
    assert_same_training(loop, plain)
    torch._dynamo.reset()


def test_what_equals_the_step_before_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []

    def counted(*args: Any) -> str | None:
        looks.append(args)
        return make_ready(*args)

    monkeypatch.setattr(stepping, "make_ready", counted)
    _, loop = plain_and("fused", AdamW)
    loop.run(range(3))  # states come with the first step
    looks.clear()
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.5
    loop.run(range(3, 6))
    assert not looks
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    loop.run(range(6, 7))
    assert looks
