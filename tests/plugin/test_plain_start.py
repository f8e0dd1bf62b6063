"""A fit begins as the user wrote it; its plan goes to work once the purse can pay for it. The clock is simulated."""

from __future__ import annotations

import copy
import itertools
import pickle
import types
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_accel import AccelPlugin, PrecisionOptions
from lightning_accel.callbacks._epoch_ends import turns_left
from lightning_accel.core import clocks
from lightning_accel.core.patch import AttributePatch, Patch
from lightning_accel.lightning import plain_start
from lightning_accel.memory.oom_report import StepMemoryError
from lightning_accel.settings import Plan
from lightning_accel.techniques import BuildContext, Technique, Traits, register
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.registry import forget
from support.console import heard
from support.lightning_models import Block, Supervised, cnn, images
from support.live_runs import OTHERS_OFF, SimulatedTime, batches, fit
from support.plugin.beginners import STEP_S, Beginner, begun

pytestmark = [pytest.mark.purse, pytest.mark.usefixtures("new_to_this_process")]


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


def test_steps_so_slow_that_the_run_cannot_pay_for_another_end_before_any_comparison() -> None:
    """Two of them have taken 60 ms more by then, of the 40 ms that 200 steps of 10 ms may pay."""
    with begun(0.25) as time:
        model = Beginner(time)
        plugin = fit(model, 200)
        assert time.now_ms < 1.035 * 200 * 10
    assert model.seen.count("on") == 2
    assert plugin.report.of("tuning").status.startswith("not tried: the first changed steps took more")


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


def test_what_is_paid_for_after_a_validation_is_not_taken_from_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(2.0) as time:

        def pays(start: plain_start.PlainStart) -> None:
            with start._purse.paying("setting up"):
                time.advance(4)

        monkeypatch.setattr(plain_start.PlainStart, "_consider", pays)
        plugin = fit(Beginner(time), 30, val=batches(1), val_check_interval=1)
    assert plugin.purse.step_s == pytest.approx(STEP_S, rel=0.05)


def test_nor_what_is_paid_for_between_the_step_and_the_validation() -> None:
    class Pays(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            plugin: Any = trainer.precision_plugin
            with plugin.purse.paying("logging"):
                time.advance(4)

    with begun(2.0) as time:
        plugin = fit(Beginner(time), 30, val=batches(1), val_check_interval=1, callbacks=[Pays()])
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


@pytest.fixture
def has_unused() -> Iterator[None]:
    """Another technique, which has done nothing by the time that live trials begin."""

    class Unused(AttributePatch):
        variants = ()

    class Late(Technique):
        traits = Traits(trial_step=None, applied_before_trial=True)

        def __init__(self, settings: Any, context: BuildContext) -> None:
            self.run.live = Live()

        def sites(self, model: nn.Module, host: Any) -> list[Patch]:
            return [Unused("layer", "may act later", model.get_submodule("layer"), "may_act", True)]

    register("late", options=Literal["auto", "off"], default="auto")(Late)
    yield
    forget("late")


@pytest.mark.parametrize(("speedup", "acts"), [(1.5, True), (0.7, False)])
def test_what_had_no_arm_is_off_where_nothing_has_won_and_the_report_says_so(
    speedup: float, acts: bool, has_unused: None
) -> None:
    with begun(speedup) as time:
        plugin = fit(Beginner(time), 400)
    record = plugin.report.techniques["late"]
    assert record.acts is acts
    assert record.line.startswith("in force" if acts else "off, as live trials have settled without it")
