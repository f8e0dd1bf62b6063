"""A fit begins as the user wrote it; its plan goes to work once the purse can pay for it. The clock is simulated."""

from __future__ import annotations

import copy
import itertools
import operator
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_accel import AccelPlugin, PrecisionOptions
from lightning_accel.callbacks._epoch_ends import turns_left
from lightning_accel.core import clocks
from lightning_accel.core.patch import AttributePatch, Patch
from lightning_accel.core.purse import BEFORE_FIRST_STEP_S, FIRST_SHARE, FIRST_STEPS, SHARE
from lightning_accel.lightning import met_programs, plain_start
from lightning_accel.lightning import plugin as plugin_module
from lightning_accel.memory.oom_report import StepMemoryError
from lightning_accel.settings import Plan
from lightning_accel.techniques.base import Traits
from lightning_accel.techniques.technique_context import Verdict
from support.console import heard
from support.lightning_models import Block, Supervised, cnn, images
from support.live_runs import BATCH_SIZE, OTHERS_OFF, SimulatedTime, Speed, Timed, batches, fit, simulated

pytestmark = pytest.mark.purse

STEP_S = 0.01


class Beginner(Timed):
    """Its steps take 10 ms; ``seen`` has "plain" for those that run before there is a technique, or after."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append("on" if There.is_around else "plain")
        self.time.advance(10 / (Speed.speedup if There.is_around else 1.0) * len(batch[0]) / BATCH_SIZE)
        return self.trained(batch)


class There(Speed):
    """Makes faster only those steps that it is around."""

    is_around = False

    def __init__(self) -> None:
        super().__init__()
        Speed.latest = self

    @contextmanager
    def step(self, stage: str) -> Iterator[None]:  # type: ignore[override]
        There.is_around = self.now == "on"
        yield
        There.is_around = False


@pytest.fixture(autouse=True)
def _new_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(met_programs, "PROGRAMS", {})
    monkeypatch.setattr(Speed, "from_settings", classmethod(lambda cls, *_: There()))


@contextmanager
def begun(speedup: float) -> Iterator[SimulatedTime]:
    with simulated(speedup) as time:
        time.noise = 0.001
        yield time


def test_the_first_steps_are_the_users_own() -> None:
    with begun(2.0) as time:
        model = Beginner(time)
        fit(model, 300)
    assert model.seen[: plain_start.PLAIN_STEPS] == ["plain"] * plain_start.PLAIN_STEPS
    assert "on" in model.seen[:10]


def test_a_run_that_can_pay_ends_with_what_is_faster() -> None:
    with begun(2.0) as time:
        model = Beginner(time)
        plugin = fit(model, 300)
        assert time.now_ms < 300 * 10 / 1.8
    assert model.seen[-100:].count("on") > 90  # a pair every so often keeps the promise
    assert plugin.tuning is not None
    assert plugin.tuning.is_proven


@pytest.mark.parametrize("steps", [1, 3, 20, 59])
def test_a_short_run_is_the_users_own_from_end_to_end(steps: int) -> None:
    with begun(2.0) as time:
        model = Beginner(time)
        plugin = fit(model, steps)
    assert set(model.seen) == {"plain"}
    assert plugin.report.of("speed").status.startswith("not tried: the run ")


@pytest.mark.parametrize("rehearsal", [{"fast_dev_run": True}, {"overfit_batches": 5, "max_epochs": 80}])
def test_a_rehearsal_is_the_users_own(rehearsal: dict[str, Any]) -> None:
    with begun(2.0) as time:
        model = Beginner(time)
        fit(model, 300, **rehearsal)
    assert set(model.seen) == {"plain"}


@pytest.mark.parametrize("steps", [200, 1000])
def test_what_is_slower_costs_at_most_2_percent(steps: int) -> None:
    with begun(0.7) as time:
        model = Beginner(time)
        fit(model, steps)
        assert time.now_ms < 1.02 * steps * 10
    assert set(model.seen[-steps // 2 :]) == {"plain"}


def test_once_nothing_is_faster_no_method_of_the_strategy_is_ours() -> None:
    patched: list[set[str]] = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            patched.append({name for name in vars(trainer.strategy) if callable(getattr(trainer.strategy, name))})

    with begun(0.7) as time:
        fit(Beginner(time), 300, callbacks=[Looks()])
    assert patched[-1] == patched[0]
    assert "training_step" in set.union(*patched)


class Aside(Callback):
    """Notes at each step which methods of the plugin are Lightning's own, and copies the plugin in the last one."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []
        self.copies: list[AccelPlugin] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        plugin: Any = trainer.precision_plugin
        self.seen.append({name for name, value in vars(plugin).items() if isinstance(value, types.MethodType)})
        self.copies = [copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))]


@pytest.mark.parametrize(("steps", "speedup"), [(20, 2.0), (300, 0.7)], ids=["too short", "nothing was faster"])
def test_steps_that_stay_plain_call_lightnings_own_methods(steps: int, speedup: float) -> None:
    with begun(speedup) as time:
        plugin = fit(Beginner(time), steps, callbacks=[aside := Aside()])
    ours = {"convert_input", "train_step_context", "pre_backward", "clip_gradients"}
    assert aside.seen[0] == set()
    assert aside.seen[-1] == ours
    for one in (plugin, *aside.copies):
        assert not ours & vars(one).keys()


def test_what_a_subclass_overrides_is_called_in_every_step() -> None:
    class Counts(AccelPlugin):
        count = 0

        def convert_input(self, data: Any) -> Any:
            Counts.count += 1
            return super().convert_input(data)

    with begun(2.0) as time:
        plugin = Counts.from_plan(Plan().replace(report=False, **OTHERS_OFF))
        trainer = Trainer(plugins=[plugin], accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
        fit(Beginner(time), 20, trainer=trainer)
    assert Counts.count == 20


def test_the_report_tells_what_was_paid_for() -> None:
    with begun(0.7) as time:
        plugin = fit(Beginner(time), 300)
    assert "slower ways on trial" in str(plugin.report)


def test_the_time_of_a_validation_is_not_a_steps() -> None:
    with begun(2.0) as time:
        plugin = fit(Beginner(time), 30, val=batches(1), val_check_interval=1)
    assert plugin.purse.step_s == pytest.approx(STEP_S, rel=0.05)


def test_nor_is_that_of_one_between_two_steps_of_the_optimizer() -> None:
    with begun(2.0) as time:
        accumulated: dict[str, Any] = {"accumulate_grad_batches": 3, "val_check_interval": 4, "num_sanity_val_steps": 0}
        plugin = fit(Beginner(time), 12, val=batches(1), **accumulated)
    assert plugin.purse is not None
    assert plugin.purse.step_s == pytest.approx(STEP_S, rel=0.05)


def test_with_several_optimizers_a_limit_in_steps_is_told_in_turns() -> None:
    left: list[float] = []

    class Counts(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            left.append(turns_left(trainer))

    with begun(2.0) as time:
        plugin = fit(Beginner(time, manual=True, optimizers=2), max_steps=8, callbacks=[Counts()])
    assert left == [4.0, 3.0, 2.0, 1.0]
    assert plugin.purse is not None
    assert plugin.purse.steps == 4


@pytest.mark.medium
def test_plain_turns_correct_what_the_first_steps_have_told() -> None:
    class SlowAtFirst(Beginner):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.time.advance(10 if batch_idx < 8 else 0)
            return super().training_step(batch, batch_idx)

    with begun(0.7) as time:
        plugin = fit(SlowAtFirst(time), 1_000)
    assert plugin.purse.step_s == pytest.approx(STEP_S, rel=0.05)


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
    assert 160 <= tried.tried_at[0] <= 170


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
@pytest.mark.parametrize(("steps", "unpaid_calls"), [(60, 550), (300, 1_600), (1_000, 1_600)])
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
    # The rest is what turns on trial note down: as little as it is for each of them.
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


# -- many fits of one program -----------------------------------------------------------------------------------------


@pytest.mark.medium
def test_the_next_fit_of_a_program_begins_with_what_was_proven() -> None:
    for _ in range(2):
        with begun(2.0) as time:  # which the model holds
            model = Beginner(time)
            fit(model, 1_000)
    assert model.seen[0] == "on"


@pytest.mark.medium
def test_the_next_fit_of_a_program_in_which_nothing_was_faster_does_not_look() -> None:
    for _ in range(2):
        with begun(0.7) as time:
            model = Beginner(time)
            fit(model, 1_000)
    assert set(model.seen) == {"plain"}


@pytest.mark.medium
def test_one_that_is_twice_as_long_looks_again() -> None:
    for steps in (1_000, 2_000):
        with begun(0.7) as time:
            model = Beginner(time)
            fit(model, steps)
    assert set(model.seen) == {"plain", "on"}


@pytest.mark.parametrize("size", [4, 5], ids=["the same", "other batches"])
def test_the_next_of_fits_that_are_too_short_is_not_looked_at(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    monkeypatch.setattr(met_programs, "described", lambda module: looked_at.append(module) or "")
    for batch_size in (4, size):
        with begun(2.0) as time:
            fit(Beginner(time), loader=batches(70, batch_size))
    assert len(looked_at) == 1


def test_one_that_is_too_short_to_be_judged_is_not_described_where_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[Any] = []
    monkeypatch.setattr(met_programs, "described", lambda module: looked_at.append(module) or "")
    with begun(2.0) as time:
        fit(Beginner(time), 20)
    assert not looked_at


def test_a_fit_of_much_larger_batches_is_not_taken_to_be_as_short() -> None:
    for size in (1, 100 * BATCH_SIZE):
        with begun(2.0) as time:
            model = Beginner(time)
            fit(model, loader=batches(100, size))
    assert "on" in model.seen


@pytest.mark.medium
def test_a_short_fit_that_remembers_leaves_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (1_000, 250, 250):
        monkeypatch.setattr(met_programs, "PROGRAMS", {})  # as another process has it
        with begun(2.0) as time:
            model = Beginner(time)
            fit(model, steps)
    assert "on" in model.seen


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_that_takes_its_batches_from_the_loader_itself_is_at_work_from_the_first(tmp_path: Path) -> None:
    class Takes(Beginner):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, *_ = next(dataloader_iter)
            return super().training_step(batch, 0)

    with begun(2.0) as time:
        model = Takes(time)
        fit(model, 5)
    assert set(model.seen) == {"on"}


def test_a_validation_that_begins_slowly_is_no_step() -> None:
    class Slow(Callback):
        def on_validation_start(self, trainer: Trainer, module: Any) -> None:
            module.time.advance(500)

    with begun(2.0) as time:
        plugin = fit(Beginner(time), 30, val=batches(1), val_check_interval=1, callbacks=[Slow()])
    assert plugin.purse is not None
    assert plugin.purse.step_s == pytest.approx(STEP_S, rel=0.05)


@pytest.mark.medium
def test_a_test_after_a_fit_in_which_nothing_was_faster_is_plain() -> None:
    class Tested(Beginner):
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.seen.append("on" if There.is_around else "plain")

    with begun(0.7) as time:
        model, plugin = Tested(time), AccelPlugin.from_plan(Plan().replace(report=False, **OTHERS_OFF))
        quiet: dict[str, Any] = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False}
        trainer = Trainer(plugins=[plugin], accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet)
        trainer.fit(model, batches(1_000))
        model.seen.clear()
        trainer.test(model, batches(3), verbose=False)
    assert model.seen == ["plain"] * 3


@pytest.mark.medium
def test_a_fit_in_another_process_knows_it_after_its_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(2.0) as time:
        fit(Beginner(time), 1_000)
    monkeypatch.setattr(met_programs, "PROGRAMS", {})  # as another process has it
    with begun(2.0) as time:  # which the model holds
        model = Beginner(time)
        fit(model, 250)
    assert model.seen[4] == "on"
    assert model.seen.count("on") > 60


@pytest.mark.medium
def test_a_resumed_run_goes_on_with_its_plan(tmp_path: Path) -> None:
    with begun(2.0) as time:
        trainer_of: dict[str, Any] = {"enable_checkpointing": False, "max_epochs": 1}
        plugin = AccelPlugin.from_plan(Plan().replace(report=False, **OTHERS_OFF))
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = Trainer(plugins=[plugin], accelerator="cpu", **quiet, **trainer_of)
        trainer.fit(Beginner(time), batches(300))
        trainer.save_checkpoint(tmp_path / "resumed.ckpt")
        model = Beginner(time)
        fit(model, 300, ckpt_path=tmp_path / "resumed.ckpt", max_epochs=2)
    assert set(model.seen[:50]) == {"on"}


# -- what does not begin plain ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accel", [{"trust": "checked"}, {"threads": 1}])
def test_what_is_asked_for_is_at_work_from_the_first_step(accel: dict[str, Any]) -> None:
    with begun(2.0) as time:
        model = Beginner(time)
        fit(model, 3, accel=accel)
    assert set(model.seen) == {"on"}


@pytest.mark.parametrize(("call_s", "times"), [(0.3, 1), (1e-3, 0)])
def test_trials_that_nobody_could_foresee_say_that_they_are_under_way(
    call_s: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    monkeypatch.setattr(clocks, "perf_counter", lambda: call_s * next(looks))
    with heard() as lines:
        fit(Supervised(cnn()), loader=images(2), accel={"memory_format": "channels_last"})
    assert len([line for line in lines if "still trying memory_format" in line]) == times


def test_an_evaluation_that_no_fit_has_come_before_is_plain() -> None:
    class Evaluated(LightningModule):
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None: ...

    with begun(2.0):
        plugin = AccelPlugin.from_plan(Plan().replace(report=False, **OTHERS_OFF))
        quiet: dict[str, Any] = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False}
        Trainer(plugins=[plugin], accelerator="cpu", **quiet).test(Evaluated(), batches(3), verbose=False)
    assert "no fit has shown" in plugin.evaluation_report.of("speed").status


class Greedy(Beginner):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + torch.empty(1 << 60)[0]


@pytest.mark.parametrize("precision", ["auto", "bf16-mixed"])
@pytest.mark.parametrize("manual", [False, True])
def test_a_lack_of_memory_in_a_plain_step_leaves_a_page(manual: bool, precision: str) -> None:
    with begun(2.0) as time, pytest.raises(StepMemoryError, match="ran out of memory"):
        fit(Greedy(time, manual=manual), 100, accel={"precision": precision})


# -- where memory may run out -----------------------------------------------------------------------------------------


@pytest.fixture
def _limited() -> Iterator[None]:
    """A lack of memory is an error here, as on every GPU."""
    from support.memory.limits import limited, resource  # which not every system has

    with limited(resource.RLIMIT_DATA, 1 << 42):
        yield


class Tight(Beginner):
    """Has memory for its steps, which take a second, only if its blocks are checkpointed."""

    def __init__(self, time: SimulatedTime) -> None:
        super().__init__(time)
        self.blocks = nn.Sequential(*(Block(8, 0.0) for _ in range(3)))

    def trained(self, batch: list[Tensor]) -> Tensor:
        if "forward" not in vars(self.blocks[0]):
            raise torch.OutOfMemoryError("simulated: Tried to allocate 2.00 GiB.")
        self.time.advance(990)
        return self.layer(self.blocks(batch[0])).square().mean()


@pytest.mark.medium
@pytest.mark.usefixtures("_limited")
@pytest.mark.filterwarnings("ignore:out of memory:lightning_accel.AccelWarning")
@pytest.mark.parametrize(("steps", "state"), [(100, "decided"), (20, "left out")], ids=["starts", "stays plain"])
def test_what_was_put_on_against_a_lack_of_memory_stays(steps: int, state: str) -> None:
    with begun(2.0) as time:
        plugin = fit(Tight(time), steps)
    assert plugin.report.of("speed").state == state
    assert plugin.report.of("gradient_checkpointing").is_on


@pytest.mark.usefixtures("_limited")
def test_a_run_that_stays_plain_tells_of_the_number_format_that_was_asked_for() -> None:
    with begun(2.0) as time:
        plugin = fit(Beginner(time), 5, accel={"precision": "bf16-mixed"})
    record = plugin.report.of("precision")
    assert (record.is_on, record.status) == (True, "bf16-mixed: as asked")


def test_a_run_that_stays_plain_does_not_call_a_number_format_asked_for_that_was_left_to_us() -> None:
    with begun(2.0) as time:
        plugin = fit(Beginner(time), 5, accel={"precision": PrecisionOptions(matmul="off")})
    assert plugin.report.of("precision").status.startswith("not tried: ")
