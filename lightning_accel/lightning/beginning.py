"""The plain beginning of a fit: its first steps run as the user wrote them, and tell what a step takes.

Most fits are short, small or tried once, and gain nothing. So a plan goes to work only once the run's purse can pay for
it: for looking at the program and its sites, for their trials, and for the steps that are slower on trial. Until then
nothing of ours stands around a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_accel.core.clocks import perf_counter
from lightning_accel.core.host import Host
from lightning_accel.core.purse import Purse
from lightning_accel.lightning.kept import Kept
from lightning_accel.lightning.live_trials import program_of, turns_left
from lightning_accel.lightning.run import Run
from lightning_accel.lightning.searches import Searches
from lightning_accel.settings import Plan
from lightning_accel.techniques.registry import declarations
from lightning_accel.tuning import verdicts
from lightning_accel.tuning.questions import MIN_TURNS
from lightning_accel.tuning.verdicts import Known, Program

PLAIN_STEPS = 3
"""That are timed at least; the first one fills caches, and does not count."""

_WAIT = 0.1  # of the run at most, until it can pay for all that it will be able to pay for
_SAID_S = 1.0  # trials that take longer are announced
_MOST_MET = 256


@dataclass
class Met:
    """What this process knows of a program that it has trained before.

    Attributes:
        step_s: What a plain step took.
        opening_s: What it took to put the plan to work.
        is_nothing: Whether nothing was faster than the plain run.
    """

    step_s: float
    opening_s: float = 0.0
    is_nothing: bool = False


_met: dict[Any, Met] = {}


def asks_by_name(plan: Plan) -> bool:
    """Whether a plan asks by name for something that is to be at work from the first step on."""
    return plan.out_of_memory == "split" or any(
        not (declaration.is_default(value := getattr(plan, name)) or declaration.is_off(value))
        for name, declaration in declarations().items()
        if name != "precision"  # which needs no edits
    )


def begins_plain(plan: Plan, module: LightningModule, host: Host, precision: str) -> bool:
    """Whether a run of ``plan``, which asks for nothing by name, begins as the user wrote it.

    Not where no clock may decide, nor on several ranks, whose layouts have to be known before the first step.
    """
    strategy: Strategy = module.trainer.strategy
    by_clock = plan.tune == "auto" and plan.verify and not torch.are_deterministic_algorithms_enabled()
    is_alone = not isinstance(strategy, ParallelStrategy) and host.kind != "xla"
    has_scaler = precision == "16-mixed" and plan.precision == "auto"  # with which a step is of another kind
    feeds = getattr(strategy, "wants_pipeline", False) and host.kind != "cpu"
    return by_clock and is_alone and not (has_scaler or feeds)


class Beginning:
    """Decides when a fit that began plain is accelerated, and whether at all.

    Args:
        module: About to be fitted.
        host: Where.
        plan: The settings.
        kept: What earlier runs have left.
        purse: The run's.
        make_run: Makes what puts the plan to work.
        start: Has it go to work: told which techniques are left out, and why, and of the program.
        stay_plain: Told that the whole run stays as the user wrote it, and why.
    """

    def __init__(
        self,
        module: LightningModule,
        host: Host,
        plan: Plan,
        kept: Kept,
        purse: Purse,
        make_run: Callable[[], Run],
        start: Callable[[Run, Mapping[str, str], Program | None], None],
        stay_plain: Callable[[str], None],
    ) -> None:
        self._module, self._host, self._plan, self._kept, self._purse = module, host, plan, kept, purse
        self._make_run, self._start, self._stay_plain = make_run, start, stay_plain
        self._trainer: Trainer = module.trainer
        self._searches = Searches(self._trainer)
        self._run: Run | None = None
        self._program: Program | None = None
        self._known: Known | None = None
        self._signature: Any = None
        self._began: float | None = None  # the step under way, where its time counts
        self._was_trying = False
        self._cycles = 0
        self.is_over = False

    @property
    def trains(self) -> bool:
        """Whether a batch that comes to the device now is one to train on."""
        return self._trainer.training and not self.is_over

    def begin_with(self, run: Run) -> None:
        """Takes over a run that is there already, to answer a lack of memory."""
        self._run = run

    def interrupt(self) -> None:
        """Told that something else than training goes on: the time until the next step is not a step's."""
        self._began = None

    def batch(self, batch: Any) -> None:
        """Told of every batch that is about to be trained on, before its step."""
        if self._searches.are_running():
            self._began = None
            return
        now = perf_counter()
        seconds = None if self._began is None else now - self._began
        if self._run is not None and self._run.is_started:
            self._follow(self._run, seconds)
        else:
            self._cycles += seconds is not None
            if seconds is not None and self._cycles > 1:
                self._purse.step_took(seconds)
            if self._purse.done == 0:
                self._meet()
            if not self.is_over and (self._cycles >= PLAIN_STEPS or self._is_known()):
                self._consider(batch)
        self._purse.done += 1
        self._began = perf_counter()

    def _follow(self, run: Run, seconds: float | None) -> None:
        """Has the purse pay for what the step that is over took more than a plain one, as parts were tried in it."""
        if self._was_trying and seconds is not None and self._purse.step_s is not None:
            self._purse.pay("trials of parts", max(0.0, seconds - self._purse.step_s))
        self._was_trying = run.engine.is_trying

    def _meet(self) -> None:
        """Before the first step: how long the run is, and what this process knows of the program."""
        trainer = self._trainer
        self._purse.steps_a_turn = max(1, trainer.accumulate_grad_batches)
        turns = turns_left(trainer)
        self._purse.steps = turns * self._purse.steps_a_turn
        is_rehearsal = trainer.fast_dev_run or trainer.overfit_batches  # type: ignore[attr-defined]
        self._signature = _signature(self._module, self._plan)
        met = _met.get(self._signature)
        if met is not None:
            self._purse.step_took(met.step_s)
        if self._is_known():
            return
        if is_rehearsal or turns < MIN_TURNS:
            self._end("a rehearsal" if is_rehearsal else f"the run is too short: {turns:.0f} steps")
            return
        if met is not None and met.is_nothing:
            self._end("nothing was faster for sure in an earlier run of this process")
        elif met is not None and self._purse.can_pay(met.opening_s):
            self._cycles = PLAIN_STEPS

    def _is_known(self) -> bool:
        """Whether an earlier run of the module, or the checkpoint that this one goes on from, has decided."""
        return self._kept.tuning is not None or bool(self._kept.decisions or self._kept.put_on)

    def _consider(self, batch: Any) -> None:
        purse = self._purse
        if self._run is None or self._program is None:
            opening_s = _opening_s(self._module)
            if not (self._kept.put_on or purse.can_pay(opening_s)):
                if purse.step_s is not None and purse.total_s < opening_s:
                    self._end(f"the run is too short: {purse.total_s:.2g} s is what it may pay, of {opening_s:.2g} s")
                return
            if not self._open(batch):
                return
        assert self._run is not None
        left_out = self._left_out(self._run)
        if left_out is None:
            return
        with purse.paying("setting up"):
            self._say(self._run, left_out)
            self._start(self._run, left_out, self._program)
            if self._known is not None and self._run.live is not None:
                self._run.live.recall(self._known)
        self._was_trying = self._run.engine.is_trying
        if self._signature is not None and purse.step_s is not None:
            _met[self._signature] = Met(purse.step_s, purse.spent_s["setting up"])

    def _open(self, batch: Any) -> bool:
        """Looks at the program and its sites; whether there may be something to win."""
        purse = self._purse
        with purse.paying("setting up"):
            if not self._is_known():
                self._program = program_of(self._trainer, batch, self._host, repr(self._plan))
                self._known = None if self._program is None else verdicts.recall(self._program)
            if self._known is not None and self._known.is_nothing:
                self._end(f"nothing was faster for sure in a run of this very program on {self._known.written:%Y-%m-%d}")
                return False
            if self._run is None:
                self._run = self._make_run()
            if self._known is not None:
                self._run.engine.decisions.update(self._known.decisions)
        return True

    def _left_out(self, run: Run) -> dict[str, str] | None:
        """The techniques whose trials the run cannot pay, and why; None: it will be able to pay for more soon."""
        purse, step_s = self._purse, self._purse.step_s
        if step_s is None:  # a resumed run: its decisions hold
            return {}
        costs = sorted((steps * step_s, name) for name, steps in run.engine.trial_steps.items())
        now = ever = 0.0
        left_out, is_early = {}, purse.done < _WAIT * purse.steps
        to_come_s = purse.total_s - sum(purse.spent_s.values())
        for cost_s, name in costs:
            ever += cost_s
            if ever > to_come_s:
                left_out[name] = f"not tried: it would take about {cost_s:.2g} s, more than this run can pay"
                continue
            now += cost_s
            if not purse.can_pay(now):
                if is_early:
                    return None
                left_out[name] = f"not tried: it would take about {cost_s:.2g} s, more than this run can pay by now"
        return left_out

    def _say(self, run: Run, left_out: Mapping[str, str]) -> None:
        """Announces trials that the user will notice."""
        steps = {name: each for name, each in run.engine.trial_steps.items() if name not in left_out}
        seconds = sum(steps.values()) * (self._purse.step_s or 0.0)
        if seconds > _SAID_S:
            rank_zero_info(f"lightning-accel: trying {', '.join(steps)} on this step, about {seconds:.0f} s")

    def _end(self, reason: str) -> None:
        self.is_over = True
        self._stay_plain(reason)

    def settled_on_nothing(self) -> None:
        """Told that live trials have found nothing faster: the next fit of this program need not look."""
        if self._signature is not None and self._signature in _met:
            _met[self._signature].is_nothing = True


def _opening_s(module: LightningModule) -> float:
    """About what it takes to look at a program and a module's sites: by the number of its modules."""
    return 0.008 + 0.0002 * sum(1 for _ in module.modules())


def _signature(module: LightningModule, plan: Plan) -> Any:
    """What tells a program from others of this process, for nearly nothing: classes, parameters, plan."""
    if len(_met) > _MOST_MET:
        _met.clear()
    kinds = tuple(type(part) for part in module.modules())
    shapes = tuple((p.shape, p.dtype) for p in module.parameters() if not torch.nn.parameter.is_lazy(p))
    return kinds, shapes, plan
