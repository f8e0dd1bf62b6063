"""The engine claims, tries, applies, reports and undoes; ``accelerate`` is its face for a plain loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
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
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import Verdict, Verdicts
from lightning_accel.techniques.technique_events import Event, Settled
from support.models import TASKS, TinyCNN

HOST = Host(kind="cpu", device_name="a CPU")


class Fake(Technique):
    """Sets ``inplace`` on every ReLU of the model, and writes down what the engine asks of it."""

    name: ClassVar[str] = "fake"

    def __init__(self, *, verdict: Verdict | None = None, **attributes: Any) -> None:
        self.calls: list[str] = []
        self.verdict = verdict or Verdict("kept", "2.0x the speed here")
        self.reason: str | None = None
        traits = {name: attributes.pop(name) for name in [*attributes] if hasattr(self.traits, name)}
        self.traits = replace(self.traits, **traits)
        for name, value in attributes.items():
            setattr(self.run if hasattr(self.run, name) else self, name, value)
        self.run.at_end.callback(self.calls.append, "close")

    def unavailable(self, host: Host) -> str | None:
        return self.reason

    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        for site, module in model.named_modules():
            if isinstance(module, nn.ReLU):
                yield AttributePatch(site, "inplace → True", module, "inplace", True)
            elif isinstance(module, nn.Linear):
                yield Site(site, why_not="a linear layer")

    @contextmanager
    def trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        self.calls.append("trial")
        yield {patch.site: self.verdict for patch in patches}

    @contextmanager
    def step(self, stage: str) -> Iterator[None]:
        self.calls.append(f"enter {stage}")
        try:
            yield
        finally:
            self.calls.append(f"leave {stage}")

    def batch(self, batch: Any, stage: str) -> Any:
        return batch + 1

    def on(self, event: Event) -> None:
        if isinstance(event, Settled):
            self.calls.append("settled")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())


def engine(net: nn.Module, *techniques: Technique, **options: Any) -> Engine:
    return Engine(net, HOST, techniques, **options)


def inplace(net: nn.Module) -> list[bool]:
    return [m.inplace for m in net.modules() if isinstance(m, nn.ReLU)]


def test_sites_are_changed_after_the_trial_and_reported() -> None:
    net, fake = model(), Fake()
    handle = engine(net, fake)
    assert handle.report.of("fake").status == "waiting for the first step"
    with handle.step():
        assert inplace(net) == [False, False]
    assert inplace(net) == [True, True]
    assert handle.report.applied("fake") == ["1", "2"]
    assert handle.report.of("fake").changes["1"] == "inplace → True: 2.0x the speed here"
    assert handle.report.refused("fake") == {"0": "a linear layer"}
    assert handle.report.of("fake").status == "in force"


def test_what_is_applied_before_its_trial_is_taken_back_when_refused() -> None:
    net = model()
    fake = Fake(verdict=Verdict("refused", "slower"), applied_before_trial=True)
    handle = engine(net, fake)
    assert inplace(net) == [True, True]
    with handle.step():
        pass
    assert inplace(net) == [False, False]
    assert handle.report.refused("fake")["1"] == "slower"
    assert handle.report.of("fake").status == "left alone: slower"
    assert not handle.report.of("fake").is_on


@pytest.mark.parametrize("trial_step", [0, 1])
def test_a_technique_is_tried_on_its_step_and_once(trial_step: int) -> None:
    fake = Fake(trial_step=trial_step)
    handle = engine(model(), fake)
    tried = []
    for _ in range(4):
        with handle.step():
            pass
        tried.append(fake.calls.count("trial"))
    assert tried == [1, 1, 1, 1] if trial_step == 0 else [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("stage", "may_try", "no_grad", "is_tried"),
    [
        ("train", None, False, True),
        ("train", None, True, False),
        ("validate", None, False, False),
        ("validate", True, True, True),
        ("train", False, False, False),
    ],
)
def test_only_steps_with_gradients_are_trials_unless_told_otherwise(
    stage: str, may_try: bool | None, no_grad: bool, is_tried: bool
) -> None:
    fake = Fake()
    handle = engine(model(), fake)
    with torch.set_grad_enabled(not no_grad), handle.step(stage, may_try=may_try):
        pass
    assert ("trial" in fake.calls) is is_tried


def test_techniques_are_entered_in_order_left_in_reverse_and_closed() -> None:
    log: list[str] = []
    first, second = Fake(name="first", calls=log), Fake(name="second", calls=log)
    handle = engine(model(), first, second)
    assert handle.batch(1) == 3
    with handle.step("test"):
        log.append("step")
    assert log == ["enter test", "enter test", "step", "leave test", "leave test"]
    handle.undo()
    assert log[-2:] == ["close", "close"]


def test_a_technique_that_edits_nothing_has_no_part_in_a_step_unless_it_watches_on() -> None:
    idle, watching = Fake(), Fake(watches_on=True)
    handle = engine(nn.Linear(2, 2), idle)
    assert (handle.batch(1), handle.has_edits) == (1, False)
    with handle.step("test"):
        pass
    assert idle.calls == []
    handle = engine(nn.Linear(2, 2), watching)
    assert (handle.batch(1), handle.has_edits) == (2, True)


def test_a_technique_that_stood_aside_is_closed_when_the_run_ends_however_often_that_was() -> None:
    fake = Fake()
    handle = engine(model(), fake)
    handle.revert_all("it raised")
    handle.revert_all("it raised again")
    handle.undo()
    assert fake.calls[-1] == "close"


def test_the_record_tells_where_a_technique_stands() -> None:
    late, dear, lacking = Fake(trial_step=1), Fake(name="dear"), Fake(name="lacking", on_by_default=True)
    lacking.reason = "install it"
    handle = engine(model(), late, dear, lacking, names=["fake", "dear", "lacking", "other"], begins=False)

    def states() -> list[str]:
        return [one["state"] for one in handle.report.to_dict()["techniques"].values()]

    assert states() == ["waiting", "waiting", "unavailable", "off"]
    handle.begin({"dear": "it would take an hour"})
    with handle.step():
        pass
    assert states() == ["waiting", "left out", "unavailable", "off"]
    with handle.step():
        pass
    assert states() == ["decided", "left out", "unavailable", "off"]
    handle.revert_all("a step raised")
    handle.undo()
    assert states() == ["reverted", "left out", "unavailable", "off"]
    assert handle.report.of("dear").status == "it would take an hour"
    assert handle.decisions["fake"]["1"] == Verdict("failed", "a step raised")


def test_an_exception_in_a_step_leaves_every_context_and_the_trial_for_the_next() -> None:
    net, fake = model(), Fake()
    handle = engine(net, fake)

    def crash() -> None:
        with handle.step():
            raise KeyError("user's bug")

    with pytest.raises(KeyError, match="user's bug"):
        crash()
    assert fake.calls == ["enter train", "trial", "leave train"]
    assert inplace(net) == [False, False]
    with handle.step():
        pass
    assert inplace(net) == [True, True]


def test_what_a_technique_had_to_say_before_it_rests_is_in_the_report() -> None:
    fake = Fake()
    handle = engine(model(), fake)
    for _ in range(2):
        with handle.step():
            pass
    fake.run.status = "not worth its while"
    handle.disable(["fake"])
    assert handle.report.of("fake").status == "not worth its while"


def test_an_objection_after_the_trial_takes_a_site_back_for_good() -> None:
    net, fake = model(), Fake()
    handle = engine(net, fake)
    for _ in range(2):
        with handle.step():
            pass
    with handle.step():
        fake.run.refuse("1", "line 7 does not like it")
    assert inplace(net) == [False, True]
    assert handle.report.refused("fake")["1"] == "line 7 does not like it"
    assert handle.report.applied("fake") == ["2"]
    assert handle.decisions["fake"]["1"] == Verdict("refused", "line 7 does not like it")
    assert handle.decisions["fake"]["2"].keep
    assert not fake.run.is_new
    assert handle.report.of("fake").was_in_force


def test_what_its_trial_refuses_was_not_in_force_though_it_was_applied_for_it() -> None:
    fake = Fake(verdict=Verdict("refused", "slower"), applied_before_trial=True)
    handle = engine(model(), fake)
    with handle.step():
        pass
    assert handle.report.refused("fake")["1"] == "slower"
    assert not handle.report.of("fake").was_in_force


def test_decisions_of_an_earlier_run_hold_without_a_trial() -> None:
    first = engine(model(), Fake(verdict=Verdict("refused", "slower")))
    with first.step():
        pass
    net, fake = model(), Fake()
    again = engine(net, fake, decisions=first.decisions)
    with again.step():
        pass
    assert "trial" not in fake.calls
    assert inplace(net) == [False, False]
    assert again.report.refused("fake")["1"] == "slower"


def test_a_technique_that_does_not_remember_tries_again() -> None:
    first = engine(model(), Fake(remembers=False))
    with first.step():
        pass
    assert "fake" not in first.decisions


def test_a_site_without_a_verdict_is_not_changed() -> None:
    net = model()
    handle = engine(net, Fake(), decisions={"fake": {"1": Verdict("kept")}})
    assert inplace(net) == [True, False]
    assert "no verdict" in handle.report.refused("fake")["2"]


def test_what_the_processes_agree_on_holds() -> None:
    net = model()
    asked: list[Any] = []

    def gather(value: Any) -> list[Any]:
        if "fake" not in (value or {}) or not isinstance(value["fake"], dict):  # what the ranks compare
            return [value, value]
        asked.append(copy.deepcopy(value))
        return [{"fake": {"1": Verdict("kept"), "2": Verdict("refused", "rank 0 says no")}}, value]

    handle = engine(net, Fake(), gather=gather)
    with handle.step():
        pass
    with handle.step():
        pass
    assert (inplace(net), handle.report.refused("fake")["2"]) == ([True, False], "rank 0 says no")
    assert len(asked) == 1


def test_a_patch_that_cannot_be_applied_is_reported_and_the_run_goes_on() -> None:
    class Sealed(nn.ReLU):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "inplace" and name in vars(self):
                raise RuntimeError("no")
            super().__setattr__(name, value)

    net = nn.Sequential(nn.Linear(2, 2), Sealed(), nn.ReLU())
    handle = engine(net, Fake())
    with handle.step():
        pass
    assert inplace(net) == [False, True]
    assert handle.report.refused("fake")["1"] == "could not be applied: RuntimeError: no"


# -- warnings ------------------------------------------------------------------------------------------------------


def test_what_the_machine_lacks_is_a_warning_a_note_and_the_status() -> None:
    with pytest.warns(AccelWarning, match="fake: install it"):
        handle = engine(model(), Fake(reason="install it"))
    assert handle.report.notes == ["fake: install it"]
    assert handle.report.of("fake").status == "install it"


def test_asked_for_by_name_and_found_nothing_is_a_warning_with_the_reasons() -> None:
    with pytest.warns(AccelWarning, match="fake was asked for and found no site: a linear layer"):
        engine(nn.Sequential(nn.Linear(2, 2)), Fake(explicit=True))
    with pytest.warns(AccelWarning, match="this model has nothing for it"):
        engine(nn.Sequential(nn.Tanh()), Fake(explicit=True))


@pytest.mark.parametrize("fake", [Fake(reason="install it"), Fake(explicit=True)])
def test_strict_raises_where_the_default_warns_and_leaves_the_model_alone(fake: Fake) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()) if fake.reason else nn.Sequential(nn.Linear(2, 2))
    other = Fake(name="other", applied_before_trial=True)
    with pytest.raises(AccelError, match=r"\(strict=True\)"):
        engine(net, other, fake, strict=True)
    assert not any(inplace(net))


def test_an_error_while_claiming_undoes_and_closes_what_came_before() -> None:
    class Broken(Fake):
        def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
            raise ValueError("no block matches")

    net, other = model(), Fake(name="other", applied_before_trial=True)
    with pytest.raises(ValueError, match="no block matches"):
        engine(net, other, Broken())
    assert inplace(net) == [False, False]
    assert "close" in other.calls


# -- meeting what it does not know ---------------------------------------------------------------------------------


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
