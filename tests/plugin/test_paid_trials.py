"""What a fit that begins plain tries, and when: once its purse, or what faster steps have saved, pays for it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_accel.core import clocks
from lightning_accel.core.patch import AttributePatch, Patch
from lightning_accel.core.purse import BEFORE_FIRST_STEP_S, FIRST_SHARE, FIRST_STEPS, SHARE, TRIALS
from lightning_accel.lightning import plugin as plugin_module
from lightning_accel.techniques import BuildContext, Technique, Traits, register
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.registry import forget
from lightning_accel.techniques.technique_context import Verdict
from lightning_accel.tuning.tuning_result import WHOLE
from support.live_runs import SimulatedTime, Speed, fit
from support.plugin.beginners import STEP_S, Beginner, There, begun

pytestmark = [pytest.mark.purse, pytest.mark.usefixtures("new_to_this_process")]


# -- trials of parts ---------------------------------------------------------------------------------------------------


class Tried(There):
    """A site whose trial takes so many steps of 10 ms, by an estimate that is right."""

    traits = Traits(trial_steps=4.0)
    time: SimulatedTime
    tried_at: list[int]

    def sites(self, model: nn.Module, host: Any) -> list[Patch]:
        return [AttributePatch("layer", "is faster", model.get_submodule("layer"), "is_faster", True)]

    @contextmanager
    def trial(self, patches: Any) -> Iterator[Any]:
        type(self).time.advance(self.traits.trial_steps * 10)
        self.tried_at.append(1)
        yield {patch.site: Verdict("kept") for patch in patches}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> type[Tried]:
    monkeypatch.setattr(Speed, "from_settings", classmethod(lambda cls, *_: Tried()))
    monkeypatch.setattr(Tried, "tried_at", [], raising=False)
    return Tried


@pytest.mark.medium
@pytest.mark.parametrize(("steps", "is_tried"), [(1_000, True), (180, False)])
def test_a_part_is_tried_where_the_run_can_pay_for_it(steps: int, is_tried: bool, tried: type[Tried]) -> None:
    with begun(2.0) as time:
        tried.time = time
        plugin = fit(Beginner(time), steps)
        assert bool(tried.tried_at) is is_tried
        if not is_tried:
            assert time.now_ms < 1.02 * steps * 10
            assert plugin.report.of("speed").status.startswith("not tried")


def test_a_part_that_nothing_would_be_left_to_judge_with_is_not_tried(tried: type[Tried]) -> None:
    with begun(2.0) as time:
        tried.time = time
        fit(Beginner(time), 215)  # 2% of 215 steps are 4.3: 4 for the trial, 0.3 for slower turns
    assert not tried.tried_at


@pytest.mark.medium
def test_what_a_trial_took_is_paid_from_the_purse(tried: type[Tried]) -> None:
    with begun(2.0) as time:
        tried.time = time
        plugin = fit(Beginner(time), 1_000)
    assert plugin.purse.spent_s["trials of parts"] == pytest.approx(4 * STEP_S, rel=0.2)


@pytest.mark.medium
def test_a_trial_that_is_too_dear_for_the_first_100_steps_waits(
    tried: type[Tried], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "traits", Traits(trial_steps=8.0))  # 5% of 100 steps are 5, of 160 steps 8

    class Notes(Beginner):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if tried.tried_at == [1]:
                tried.tried_at = [batch_idx]
            return loss

    with begun(2.0) as time:
        tried.time = time
        fit(Notes(time), 3_000)
    assert 160 <= tried.tried_at[0] <= 280  # with what another look at the program may take


def test_what_a_faster_optimizer_may_earn_does_not_wait_for_it(
    tried: type[Tried], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "traits", Traits(trial_steps=8.0))
    edited_at: list[int] = []

    class Notes(Beginner):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.trainer.precision_plugin.report.of("optimizer").is_on:
                edited_at.append(batch_idx)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    with begun(2.0) as time:
        tried.time = time
        fit(Notes(time), 700, accel={"optimizer": "auto"})
    assert edited_at[0] < 10


class CutShort(Tried):
    """The first trial is not paid to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.run.live = Live()  # its variants are those of its site

    @contextmanager
    def trial(self, patches: Any) -> Iterator[Any]:
        with super().trial(patches) as verdicts:
            yield verdicts
        if len(self.tried_at) == 1:
            verdicts.update({site: Verdict("too_dear", "not tried to its end") for site in verdicts})


@pytest.mark.medium
@pytest.mark.parametrize("other", [1.5, 0.8], ids=["something else is faster", "nothing else is"])
def test_a_trial_that_could_not_be_paid_to_its_end_is_repeated(
    other: float, has_precision: None, tried: type[Tried], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speed, "from_settings", classmethod(lambda cls, *_: CutShort()))
    monkeypatch.setattr(InTwo, "in_bfloat16", other)
    with begun(1.3) as time:
        tried.time = time
        model = InTwo(time)
        fit(model, 3_000, accel=AUTO)
    assert len(tried.tried_at) == 2
    assert model.seen[-50:].count("on") > 40


# -- what earns -------------------------------------------------------------------------------------------------------


@pytest.fixture
def has_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which bfloat16 is to be tried: what is to be won without a trial of parts."""
    monkeypatch.setattr(plugin_module, "resolve_precision", lambda *_: ("bf16-mixed", "as this machine has it"))


class InTwo(Beginner):
    """Bfloat16 makes its steps so many times as fast, too."""

    in_bfloat16 = 1.5

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.time.advance(10 / (self.in_bfloat16 if torch.is_autocast_enabled("cpu") else 1.0) - 10)
        return super().training_step(batch, batch_idx)


AUTO = {"precision": "auto"}


def test_what_the_run_could_not_pay_is_tried_once_faster_steps_have_earned_it(
    tried: type[Tried], has_precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "traits", Traits(trial_steps=9.0))  # 2% of 400 steps are 8
    with begun(1.3) as time:
        tried.time = time
        model = InTwo(time)
        plugin = fit(model, 400, accel=AUTO)
    assert len(tried.tried_at) == 1
    assert model.seen[-50:].count("on") > 40
    assert plugin.purse.earned_s > 0


class PaysItself(Tried):
    @contextmanager
    def trial(self, patches: Any) -> Iterator[Any]:
        with super().trial(patches) as verdicts:
            assert self.run.purse is not None
            self.run.purse.pay(TRIALS, self.traits.trial_steps * STEP_S)
            yield verdicts


def test_what_such_a_trial_has_paid_is_not_paid_again_with_its_step(
    tried: type[Tried], has_precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speed, "from_settings", classmethod(lambda cls, *_: PaysItself()))
    monkeypatch.setattr(tried, "traits", Traits(trial_steps=9.0))
    with begun(1.3) as time:
        tried.time = time
        plugin = fit(InTwo(time), 400, accel=AUTO)
    assert len(tried.tried_at) == 1
    assert plugin.purse.spent_s[TRIALS] == pytest.approx(9 * STEP_S, rel=0.2)


@pytest.fixture
def has_idle() -> Iterator[None]:
    """Another technique, which needs no trial of its own and changes nothing."""

    class Idle(Technique):
        traits = Traits(acts_without_sites=True)

        def __init__(self, settings: Any, context: BuildContext) -> None:
            self.run.live = Live(variants=("on",))

    register("idle", options=Literal["auto", "off"], default="auto")(Idle)
    yield
    forget("idle")


def test_it_is_tried_before_the_parts_of_what_is_faster_already(
    tried: type[Tried], has_precision: None, has_idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "traits", Traits(trial_steps=9.0))
    with begun(1.3) as time:
        tried.time = time
        plugin = fit(InTwo(time), 1_000, accel=AUTO)
    assert plugin.tuning is not None
    asked = [*plugin.tuning.results]
    assert asked[0] == WHOLE
    assert asked.index("speed") < asked.index("idle")
    assert plugin.tuning.choices == {"precision": "bf16-mixed", "speed": "on"}


def test_nor_does_it_wait_for_a_comparison_that_cannot_tell(
    tried: type[Tried], has_precision: None, has_idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "traits", Traits(trial_steps=30.0))  # earned while it is under way
    with begun(1.3) as time:
        tried.time, time.noise = time, 0.05
        plugin = fit(InTwo(time), 1_500, accel=AUTO)
    assert plugin.tuning is not None
    asked = [*plugin.tuning.results]
    assert asked.index("speed") < asked.index("idle")


@pytest.fixture
def has_another() -> Iterator[None]:
    """Another technique, whose trial no run can pay for."""

    class Another(Technique):
        traits = Traits(trial_steps=1e5)

        def __init__(self, settings: Any, context: BuildContext) -> None:
            pass

        def sites(self, model: nn.Module, host: Any) -> list[Patch]:
            return [AttributePatch("layer", "is another", model.get_submodule("layer"), "is_another", True)]

    register("another", options=Literal["auto", "off"], default="auto")(Another)
    yield
    forget("another")


@pytest.mark.medium
@pytest.mark.parametrize(("steps", "other"), [(400, 1.5), (3_000, 0.8)], ids=["something has won", "nothing has"])
def test_what_the_run_can_never_pay_delays_no_other_trial(
    steps: int,
    other: float,
    tried: type[Tried],
    has_precision: None,
    has_another: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tried, "traits", Traits(trial_steps=9.0))
    monkeypatch.setattr(InTwo, "in_bfloat16", other)
    with begun(1.3) as time:
        tried.time = time
        model = InTwo(time)
        plugin = fit(model, steps, accel=AUTO)
    assert len(tried.tried_at) == 1
    assert model.seen[-50:].count("on") > 40
    assert plugin.report.of("another").status.startswith("not tried")


def test_it_is_not_tried_where_nothing_was_earned(
    tried: type[Tried], has_precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "traits", Traits(trial_steps=9.0))
    monkeypatch.setattr(InTwo, "in_bfloat16", 0.8)
    with begun(1.3) as time:
        tried.time = time
        fit(InTwo(time), 400, accel=AUTO)
        assert time.now_ms < 1.02 * 400 * 10
    assert not tried.tried_at


@pytest.mark.medium
def test_where_nothing_was_earned_it_waits_until_the_run_can_pay(
    tried: type[Tried], has_precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "traits", Traits(trial_steps=8.0))  # 5% of 100 steps are 5
    monkeypatch.setattr(InTwo, "in_bfloat16", 0.8)
    with begun(1.3) as time:
        tried.time = time
        model = InTwo(time)
        fit(model, 3_000, accel=AUTO)
    assert len(tried.tried_at) == 1
    assert model.seen[-100:].count("on") > 90


@pytest.mark.medium
def test_what_has_waited_is_tried_in_the_number_format_of_the_plan(
    tried: type[Tried], has_precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Notes(InTwo):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if len(tried.tried_at) > len(formats):
                formats.append(torch.is_autocast_enabled("cpu"))
            return super().training_step(batch, batch_idx)

    formats: list[bool] = []
    monkeypatch.setattr(tried, "traits", Traits(trial_steps=8.0))
    monkeypatch.setattr(InTwo, "in_bfloat16", 0.8)
    with begun(1.3) as time:
        tried.time = time
        fit(Notes(time), 3_000, accel=AUTO)
    assert formats == [True]


# -- all of it ---------------------------------------------------------------------------------------------------------

CALL_MS = 5e-4


@contextmanager
def calls_take_time(time: SimulatedTime) -> Iterator[None]:
    """Has every call of a function of ours take half a microsecond."""

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("lightning_accel."):
            time.now_ms += CALL_MS

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


class Counting(Beginner):
    """Notes, before each step and at the end, what was spent beside the steps, and what of that the purse has paid."""

    def __init__(self, time: SimulatedTime) -> None:
        super().__init__(time)
        self.beside_s: list[float] = []
        self.paid_s: list[float] = []

    def setup(self, stage: str) -> None:
        self.time.now_ms = 0.0  # making the plugin is no part of the fit

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.note(self.trainer.precision_plugin)
        return super().training_step(batch, batch_idx)

    def note(self, plugin: Any) -> None:
        self.beside_s.append(self.time.now_ms / 1e3 - STEP_S * len(self.beside_s))
        self.paid_s.append(sum(plugin.purse.spent_s.values()))


@pytest.mark.medium
@pytest.mark.parametrize(("steps", "unpaid_calls"), [(60, 550), (300, 2_200), (1_000, 1_600)])
def test_all_that_a_default_fit_spends_is_paid_from_the_purse(
    steps: int, unpaid_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(0.7) as time, calls_take_time(time):
        time.noise = 0.0
        monkeypatch.setattr(clocks, "monotonic", lambda: time.now_ms / 1e3)
        model = Counting(time)
        plugin = fit(model, steps // 2, max_epochs=2, logger=CSVLogger(tmp_path), accel={"report": True})
        model.note(plugin)
    unpaid_s = list(map(operator.sub, model.beside_s, model.paid_s))
    # What stands around every step, once all is settled, makes that longer, and is no expense of the run.
    each_s = (unpaid_s[-2] - unpaid_s[steps // 2]) / (steps - 1 - steps // 2)
    assert each_s < 40 * CALL_MS / 1e3
    # The rest is what turns on trial note down: as little as it is for each of them. In 300 steps, 16 plain ones are
    # noted as well, to see whether the machine was busy when the plan was too dear.
    assert unpaid_s[-1] - steps * each_s < unpaid_calls * CALL_MS / 1e3
    assert model.beside_s[0] <= BEFORE_FIRST_STEP_S
    a_turn_s = STEP_S / 0.7 - STEP_S  # that was begun while it could be paid
    for done, beside_s in enumerate(model.beside_s):
        most_s = min(SHARE * steps, FIRST_SHARE * max(done, FIRST_STEPS)) * STEP_S
        assert beside_s - done * each_s <= most_s + a_turn_s
    assert plugin.purse is not None
    assert plugin.purse.spent_s["logging"] > 0


@pytest.mark.medium
def test_the_report_tells_of_logging_among_what_was_paid(tmp_path: Path) -> None:
    with begun(0.7) as time, calls_take_time(time):
        plugin = fit(Beginner(time), 1_200, logger=CSVLogger(tmp_path), accel={"report": True})
    (line,) = (line for line in str(plugin.report).splitlines() if "paid so far" in line)
    assert "logging" in line
