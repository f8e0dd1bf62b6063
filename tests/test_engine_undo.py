"""An engine meets what it does not know, gives back what it changed, and stands behind ``accelerate``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_accel.assembly import accelerate
from lightning_accel.core.checks import SettingError
from lightning_accel.core.host import Host
from lightning_accel.core.patch import AttributePatch, Patch, PatchSet
from lightning_accel.core.report import AccelError, AccelWarning
from lightning_accel.engine import Engine
from lightning_accel.settings import Plan
from lightning_accel.techniques.base import LoaderTerms, Technique
from lightning_accel.techniques.registry import declarations
from lightning_accel.techniques.technique_context import Verdict, Verdicts
from support.fake_technique import Fake, engine, inplace, model
from support.models import TASKS, TinyCNN


class Clumsy(Fake):
    """Raises where it is told to."""

    name: ClassVar[str] = "clumsy"

    def __init__(self, where: str, error: Exception | None = None, **attributes: Any) -> None:
        super().__init__(**{"on_by_default": True} | attributes)

        def fail(*args: Any) -> Any:
            raise error or AttributeError("no attribute 'hooks'")

        @contextmanager
        def fail_when_entered(*args: Any) -> Iterator[Any]:
            fail()
            yield

        method, _, entered = where.partition(", ")
        if method == "close":
            self.run.at_end.callback(fail)
        else:
            setattr(self, method, fail_when_entered if entered else fail)


WHERE = ["sites", "optimizer_sites", "batch", "loader", "on", "close", "step", "trial"]


def all_of_a_run(net: nn.Module, *techniques: Technique, **options: Any) -> Engine:
    handle = engine(net, *techniques, **options)
    handle.add_optimizers([torch.optim.SGD(net.parameters())])
    assert handle.loader([1], LoaderTerms()) == [1]
    for _ in range(3):
        with handle.step():
            handle.batch(1)
    handle.arms()
    handle.undo()
    return handle


@pytest.mark.parametrize("where", [*WHERE, "step, entered", "trial, entered"])
def test_a_technique_that_raises_on_meeting_something_refuses_and_the_others_go_on(where: str) -> None:
    net, other = model(), Fake(name="other")
    clumsy = Clumsy(where)
    with pytest.warns(AccelWarning, match=r"clumsy could not .*: AttributeError: no attribute 'hooks'"):
        handle = all_of_a_run(net, clumsy, other)
    assert "AttributeError: no attribute 'hooks'" in handle.report.to_text()
    assert handle.report.applied("other") == ["1", "2"]
    assert {"trial", "close"} <= set(other.calls)
    assert inplace(net) == [False, False]
    if where != "close":
        assert not handle.report.of("clumsy").is_on
        assert not handle.report.applied("clumsy")


@pytest.mark.parametrize("where", WHERE)
def test_strict_raises_where_a_technique_does_on_meeting_something(where: str) -> None:
    with pytest.raises(AccelError, match=r"no attribute 'hooks' \(strict=True\)"):
        all_of_a_run(model(), Clumsy(where), strict=True)


def test_what_a_technique_tells_the_user_goes_through() -> None:
    for clumsy, kind in (
        (Clumsy("sites", SettingError("no block 'Blok'")), SettingError),
        (Clumsy("sites", ValueError("no block 'Blok'"), on_by_default=False), ValueError),
        (Clumsy("batch", torch.OutOfMemoryError("CUDA out of memory.")), torch.OutOfMemoryError),
        (Clumsy("batch", is_part_of_training=True), AttributeError),
    ):
        with pytest.raises(kind):
            all_of_a_run(model(), clumsy)


# -- undo ----------------------------------------------------------------------------------------------------------


def test_undone_it_does_nothing_and_keeps_its_report() -> None:
    net, fake = model(), Fake()
    handle = engine(net, fake)
    with handle.step():
        pass
    handle.undo()
    handle.undo()
    assert inplace(net) == [False, False]
    assert handle.report.applied("fake") == ["1", "2"]
    fake.calls.clear()
    with handle.step():
        assert handle.batch(1) == 1
    assert fake.calls == []


def test_undone_inside_a_step_it_stays_undone() -> None:
    net = model()
    handle = engine(net, Fake())
    with handle.step():
        handle.undo()
    assert inplace(net) == [False, False]


def test_an_edit_whose_undoing_raises_does_not_keep_others_in_place() -> None:
    class Stuck(AttributePatch):
        def _undo(self) -> None:
            raise RuntimeError("stuck")

    class Sticking(Fake):
        name: ClassVar[str] = "sticking"

        def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
            yield Stuck("0", "note", model.get_submodule("0"), "note", "stuck")

    handle = engine(net := model(), Fake(), Sticking())
    with handle.step():
        pass
    with pytest.raises(RuntimeError, match="stuck"):
        handle.undo()
    assert inplace(net) == [False, False]


# -- accelerate ----------------------------------------------------------------------------------------------------


def test_by_default_it_does_what_the_plugin_does_and_raises_no_warning() -> None:
    task = TASKS["cnn"]
    net = task.model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = accelerate(net)
        for step in range(3):
            inputs, targets = task.batch(step)
            with handle.step():
                loss = task.loss(net(handle.batch(inputs)).float(), targets)
            loss.backward()
    assert set(handle.report.techniques) >= {"precision", "memory_format", "inplace_activations"}
    handle.undo()


def test_it_serves_a_model_without_parameters() -> None:
    handle = accelerate(nn.ReLU(), Plan(precision="32-true"))
    with handle.step():
        pass
    handle.undo()


def test_the_report_names_device_and_every_technique() -> None:
    handle = accelerate(
        TinyCNN(), Plan(precision="32-true", techniques={"memory_format": "off", "inplace_activations": False})
    )
    lines = handle.report.summary().splitlines()
    assert "(cpu)" in lines[0]
    assert [line.split()[1] for line in lines[1:]] == [f"{name}:" for name in declarations()]
    handle.undo()


def test_in_place_activations_need_no_trial_and_are_in_force_at_once() -> None:
    handle = accelerate(TinyCNN(), Plan(precision="32-true", trust="unchecked"))
    assert handle.report.of("inplace_activations").status == "in force"
    assert handle.report.applied("inplace_activations") != []
    handle.undo()


def test_the_defaults_of_the_protocol_do_nothing() -> None:
    class Nothing(Technique):
        name: ClassVar[str] = "nothing"

    net = nn.Linear(2, 2)
    handle = engine(net, nothing := Nothing(None, None))  # type: ignore[arg-type]
    with handle.step():
        assert handle.batch("batch") == "batch"
    assert handle.report.of("nothing").status == "no site in this model"
    patches = PatchSet([AttributePatch("1", "", nn.ReLU(), "inplace", True)])
    kept: Callable[[PatchSet], AbstractContextManager[Verdicts]] = nothing.trial
    with kept(patches) as verdicts:
        assert verdicts == {"1": Verdict("kept")}
    handle.undo()


def test_a_technique_that_was_asked_for_and_is_refused_everywhere_is_a_warning() -> None:
    handle = engine(model(), Fake(verdict=Verdict("refused", "other numbers"), explicit=True))
    with pytest.warns(AccelWarning, match="fake was asked for and is not in force.*: other numbers"), handle.step():
        pass


def test_strict_makes_an_error_of_it() -> None:
    handle = engine(model(), Fake(verdict=Verdict("refused", "other numbers"), explicit=True), strict=True)
    with pytest.raises(AccelError, match="fake was asked for"), handle.step():
        pass
