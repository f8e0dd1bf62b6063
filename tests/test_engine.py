"""The engine claims, tries, applies, reports and undoes; ``accelerate`` is its face for a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch
from lightning_accel.core.report import AccelError, AccelWarning
from lightning_accel.techniques.technique_context import Verdict
from support.fake_technique import Fake, engine, inplace, model


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


# -- warnings ----------------------------------------------------------------------------------------


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
