"""In-place activations come and go: stepping aside, what is left behind, modules of other makes."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_accel import Plan, accelerate
from lightning_accel.techniques.inplace_activations import InplaceActivations
from lightning_accel.techniques.inplace_activations.ownership import PATIENCE, SMALLEST
from lightning_accel.techniques.inplace_activations.refcount_calibration import calibration
from support.techniques.inplace_activations.inplace_harness import (
    CPU,
    assert_same,
    assert_same_training,
    convert,
    converted,
    run,
)
from support.techniques.inplace_activations.inplace_models import SameName, Temporary

pytestmark = pytest.mark.numbers


def between_linears(act: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8))


def named(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


# What asking costs: it steps aside


def test_a_module_that_could_work_in_place_at_none_of_its_calls_steps_aside_with_the_reason() -> None:
    class Residual(Temporary):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.act(h) + h

    model, technique = Residual(), InplaceActivations(smallest=0)
    for patch in technique.sites(model, CPU):
        patch.apply()

    for _ in range(PATIENCE - 1):
        model(torch.randn(4, 8))
    assert not technique.run.is_new
    model(torch.randn(4, 8))

    refused, _, _ = technique.run.take()
    assert "which may still read it" in refused["act"].reason


def test_the_engine_takes_back_what_stepped_aside_and_the_report_says_why() -> None:
    model = Temporary()
    handle = accelerate(model, Plan(precision="32-true"))
    assert handle.report.applied("inplace_activations") == ["act"]

    for _ in range(PATIENCE):
        with handle.step():
            model(torch.randn(4, 8))

    assert "too few elements" in handle.report.refused("inplace_activations")["act"]
    assert "forward" not in vars(model.act)
    handle.undo()


def test_small_inputs_are_not_worth_the_look() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    with converted(model, smallest=SMALLEST) as made:
        model(torch.randn(SMALLEST // 8 - 1, 8))
        model(torch.randn(SMALLEST // 8, 8))

    assert (made.in_place, made.as_it_was) == ({"1": 1}, {"1": 1})


# What is left behind


def test_undo_leaves_the_module_as_it_was() -> None:
    model = Temporary()
    before = dict(vars(model.act))
    made = convert(model)
    assert "forward" in vars(model.act)
    made.patches.undo()
    assert vars(model.act) == before


def test_the_flag_stays_as_it_is_for_whoever_looks() -> None:
    model = between_linears(nn.ReLU())

    with converted(model):
        model(torch.randn(4, 8))
        assert model[1].inplace is False


def test_a_deep_copy_works_by_itself() -> None:
    model, x = SameName(), torch.randn(4, 8)
    expected = run(model, x)

    with converted(model) as made:
        copied = copy.deepcopy(model)
        assert copied.act.forward.__self__ is copied.act
        made.patches.undo()
        assert_same(run(copied, x), expected)


def test_pickling_leaves_the_edit_behind() -> None:
    model = between_linears(nn.ReLU())

    with converted(model):
        loaded = pickle.loads(pickle.dumps(model))

    assert loaded[1].forward.__func__ is nn.ReLU.forward
    assert assert_same_training(loaded, torch.randn(4, 8), steps=1).in_place == {"1": 1}


def test_state_dict_keys_stay() -> None:
    model = Temporary()
    keys = list(model.state_dict())

    with converted(model):
        assert list(model.state_dict()) == keys


def test_converting_twice_finds_nothing_new() -> None:
    model = Temporary()

    with converted(model):
        (refusal,) = InplaceActivations().sites(model, CPU)

    assert "not the one of its class" in refusal.why_not


def test_nothing_is_kept_alive() -> None:
    model = SameName()

    with converted(model):
        y = model(torch.randn(4, 8))
        found = weakref.ref(y)
        del y
        assert found() is None


def test_neither_random_numbers_nor_batch_statistics_are_touched_by_asking() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(), nn.Dropout())

    made = assert_same_training(model, torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last))

    assert made.in_place["4"] == 2  # of a shape with ones, the first call shows how its results lie in memory


# Modules of other makes


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def traced() -> nn.Module:
    return torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))


def graph_module() -> nn.Module:
    return torch.fx.symbolic_trace(Temporary())


class Slotted(nn.ReLU):
    __slots__ = ("extra",)


class Answering(nn.Module):
    """Has an answer to every name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return lambda *args: False

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Silent(nn.Module):
    """Raises something else than AttributeError."""

    def __getattr__(self, name: str) -> Any:
        if name in ("_parameters", "_buffers", "_modules"):
            return super().__getattr__(name)
        raise RuntimeError(name)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Calling(nn.ReLU):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) + args[0]


def parametrized() -> nn.Module:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", nn.ReLU())
    return layer


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "make", [scripted, traced, graph_module, Slotted, Answering, Silent, Calling, parametrized], ids=named
)
def test_modules_of_other_makes_do_no_harm(make: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), make(), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    expected = run(model, x)

    with converted(model) as made:
        assert_same(run(model, x), expected)

    assert "2" in made.technique.activations


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_model_under_the_technique_can_be_scripted_and_traced() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.3), nn.LeakyReLU()).eval()
    x = torch.randn(4, 8)
    expected = model(x)

    with converted(model):
        assert torch.equal(torch.jit.script(model)(x), expected)
        assert torch.equal(torch.jit.trace(model, x)(x), expected)
        assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)


def test_the_compiler_sees_the_originals_and_breaks_no_graph() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    expected = model(x)

    with converted(model) as made:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
        assert (made.in_place, made.as_it_was) == ({}, {})


def test_what_is_compiled_is_left_to_the_compiler() -> None:
    model = nn.Sequential(Temporary(), between_linears(nn.ReLU()))
    model[1].compile(backend="eager")

    with converted(model) as made:
        assert list(made.refused) == ["1.1"]

    assert "compiled" in made.refused["1.1"]


def test_this_interpreter_counts_references_in_a_way_that_is_known() -> None:
    assert not isinstance(calibration(), str)
