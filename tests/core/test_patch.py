"""Edits are reversible, whatever happens in between."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel.core.patch import AttributePatch, MethodPatch, Patch, PatchSet, SwitchPatch


class Doubler(nn.Module):
    """Multiplies by its own factor."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: float) -> float:
        return self.factor * x


def plus_one(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) + 1

    return forward


def forward_patch(module: nn.Module) -> MethodPatch:
    return MethodPatch("", "plus one", module, "forward", plus_one)


def test_an_attribute_is_set_and_restored() -> None:
    relu = nn.ReLU()
    patch = AttributePatch("relu", "in place", relu, "inplace", True)
    patch.apply()
    assert relu.inplace is True
    patch.undo()
    assert relu.inplace is False


def test_an_attribute_the_instance_did_not_have_is_absent_again() -> None:
    module = Doubler()
    patch = AttributePatch("", "", module, "note", "new")
    patch.apply()
    patch.undo()
    assert "note" not in vars(module)


def test_a_method_is_rebound_on_one_instance_only() -> None:
    module, other = Doubler(), Doubler()
    forward_patch(module).apply()
    assert (module(3), other(3)) == (7, 6)


def test_an_undone_method_leaves_the_instance_as_it_was() -> None:
    module = Doubler()
    before = dict(vars(module))
    patch = forward_patch(module)
    patch.apply()
    patch.undo()
    assert dict(vars(module)) == before


def test_applying_twice_is_applying_once_and_so_is_undoing() -> None:
    module = Doubler()
    patch = forward_patch(module)
    patch.undo()
    patch.apply()
    patch.apply()
    assert module(1) == 3
    patch.undo()
    patch.undo()
    assert module(1) == 2
    patch.apply()
    assert module(1) == 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: copy.deepcopy({"ema": [m]})["ema"][0]])
def test_a_deep_copy_binds_to_the_copy(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """EMA and SWA copy a model in the middle of a run: a closure would compute with the original's weights."""
    module = Doubler()
    forward_patch(module).apply()
    twin = duplicate(module)
    twin.factor = 10.0
    assert (twin(1), module(1)) == (11, 3)
    assert vars(twin)["forward"].__self__ is twin


def test_pickling_leaves_the_edit_behind() -> None:
    module = Doubler()
    forward_patch(module).apply()
    assert pickle.loads(pickle.dumps(module))(1) == 2


def test_a_forward_that_the_user_bound_to_the_instance_is_kept_and_restored() -> None:
    module = Doubler()
    theirs = types.MethodType(lambda self, x: self.factor - x, module)
    module.forward = theirs  # type: ignore[method-assign]
    patch = forward_patch(module)
    patch.apply()
    assert module(1) == 2
    patch.undo()
    assert vars(module)["forward"] is theirs


def test_a_forward_that_the_user_sets_while_ours_is_there_stays() -> None:
    module = Doubler()
    patch = forward_patch(module)
    patch.apply()
    theirs = module.forward = lambda x: 10 * x
    patch.undo()
    assert module.forward is theirs


def test_a_rebound_method_has_the_signature_of_the_original() -> None:
    module = Doubler()
    before = inspect.signature(module.forward)
    forward_patch(module).apply()
    assert inspect.signature(module.forward) == before


def test_a_plain_function_that_the_user_put_in_place_of_forward_is_kept_and_restored() -> None:
    module = Doubler()
    theirs = lambda x: -x  # noqa: E731
    module.forward = theirs  # type: ignore[method-assign]
    patch = forward_patch(module)
    patch.apply()
    assert module(1) == 0
    patch.undo()
    assert vars(module)["forward"] is theirs


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_static_or_class_method_is_called_as_the_user_would(kind: Any) -> None:
    class Odd(nn.Module):
        forward = kind(lambda *args: 2 * args[-1])

    module = Odd()
    patch = forward_patch(module)
    patch.apply()
    assert module(1) == 3
    patch.undo()
    assert module(1) == 2


def test_patches_of_one_method_stack_and_unstack() -> None:
    module = Doubler()
    first = forward_patch(module)
    first.apply()
    second = forward_patch(module)
    second.apply()
    assert module(1) == 4
    second.undo()
    assert module(1) == 3
    first.undo()
    assert "forward" not in vars(module)


@pytest.mark.parametrize("values", [(2, 3), (2, 2)], ids=str)
def test_a_switch_is_back_at_the_users_value_after_the_last_of_two_patches(values: tuple[int, int]) -> None:
    module = Doubler(1)
    read = partial(getattr, module, "factor")
    first, second = (SwitchPatch(read, partial(setattr, module, "factor"), value) for value in values)
    first.apply()
    second.apply()
    first.undo()
    assert read() == values[1]
    second.undo()
    assert read() == 1


class Failing(Patch):
    """Changes something, then fails."""

    def __init__(self, log: list[str], site: str = "failing") -> None:
        super().__init__(site, "fails")
        self.log = log

    def _apply(self) -> None:
        self.log.append("changed")
        raise RuntimeError("half way")

    def _undo(self) -> None:
        self.log.append("restored")


def test_a_patch_that_fails_half_way_leaves_nothing() -> None:
    log: list[str] = []
    patch = Failing(log)
    with pytest.raises(RuntimeError, match="half way"):
        patch.apply()
    assert log == ["changed", "restored"]
    assert not patch.is_applied


def test_a_set_with_a_failing_patch_undoes_those_before_it() -> None:
    relu, silu = nn.ReLU(), nn.SiLU()
    patches = PatchSet(
        [AttributePatch("a", "", relu, "inplace", True), Failing([]), AttributePatch("c", "", silu, "inplace", True)]
    )
    with pytest.raises(RuntimeError):
        patches.apply()
    assert (relu.inplace, silu.inplace) == (False, False)


def test_a_set_is_undone_in_reverse() -> None:
    module = Doubler()
    patches = PatchSet([AttributePatch("a", "", module, "factor", 3.0), AttributePatch("b", "", module, "factor", 4.0)])
    patches.apply()
    patches.undo()
    assert module.factor == 2.0


def test_a_site_is_claimed_once() -> None:
    patches = PatchSet([AttributePatch("site", "in place", nn.ReLU(), "inplace", True)])
    with pytest.raises(ValueError, match="Site 'site' is claimed twice: 'in place' and 'fails'"):
        patches.add(Failing([], site="site"))


def test_a_dropped_site_is_undone_and_forgotten() -> None:
    relu = nn.ReLU()
    patches = PatchSet([AttributePatch("site", "", relu, "inplace", True)])
    patches.apply()
    assert "site" in patches
    assert relu.inplace
    patches.drop("site")
    assert not relu.inplace
    assert (len(patches), "site" in patches) == (0, False)


def test_hooks_parameters_and_state_dict_do_not_notice() -> None:
    linear = nn.Linear(2, 2)
    calls: list[str] = []
    linear.register_forward_hook(lambda *_: calls.append("hook"))
    keys = list(linear.state_dict())
    MethodPatch("", "", linear, "forward", plus_one).apply()
    linear(torch.zeros(1, 2))
    assert calls == ["hook"]
    assert list(linear.state_dict()) == keys
    assert type(linear) is nn.Linear


@pytest.mark.medium
def test_nothing_is_undone_when_the_program_ends() -> None:
    """The modules that would be asked are gone by then."""
    program = """
import gc
from lightning_accel.core import compiled
gc.disable()
kept = compiled.compiled_anew(64)
kept.__enter__()
holder = type("Holder", (), {})()
holder.itself, holder.kept = holder, kept
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
