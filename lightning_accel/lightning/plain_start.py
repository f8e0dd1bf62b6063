"""The plain beginning of a fit: its first steps run as the user wrote them, and tell what a step takes.

Most fits are short, small or tried once, and gain nothing. So a plan goes to work only once the run's purse can pay for
it: for looking at the program and its sites, for their trials, and for the steps that are slower on trial. Until then
nothing of ours stands around a step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_accel.core.clocks import seconds
from lightning_accel.core.compiled import is_compiled
from lightning_accel.core.host import Host
from lightning_accel.core.oom_errors import is_out_of_memory
from lightning_accel.core.open_purse import NOTICED_S
from lightning_accel.core.purse import SHARE, TRIALS, Purse
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.torch_private.compilation import compiling_ms
from lightning_accel.core.tree import tensors_in
from lightning_accel.lightning.autocast_precision import nested
from lightning_accel.lightning.batch_transfer import takes_loader
from lightning_accel.lightning.live_trials import program_of, turns_left
from lightning_accel.lightning.packages import LightningModule, ParallelStrategy, Strategy, Trainer, TrainerFn
from lightning_accel.lightning.run import Run
from lightning_accel.lightning.run_state import RunState
from lightning_accel.lightning.tuner_searches import Searches
from lightning_accel.settings import Plan
from lightning_accel.techniques.registry import declarations
from lightning_accel.tuning import verdict_cache
from lightning_accel.tuning.model_fingerprint import described
from lightning_accel.tuning.trial_scheduler import MIN_TURNS
from lightning_accel.tuning.tuning_result import Tuning
from lightning_accel.tuning.verdict_cache import Known, Program

PLAIN_STEPS = 3
"""That are timed at least; the first one fills caches, and does not count."""

SHORT_ON_RANKS = 100
"""Steps of the optimizer: a run of several ranks that has fewer is not accelerated unless it is asked for by name."""

_SURE_STEPS = 15  # by which what a step takes is known; a GPU's first ones are over before they are done
_LEAST_TURNS = 0.7  # that a run may pay for slower arms: fewer show nothing
_WORTH = 0.1  # of the time that is left: the least that parts have to win which are tried later
# A run waits so long at most until it can pay for all that it will be able to pay for.
_WAIT, _WAIT_STEPS = 0.1, 300  # of the run, and steps
_MOST_MET = 256


@dataclass
class Met:
    """What this process knows of a program that it has trained before.

    Attributes:
        held: What its module held before its first step, in words, and the shapes of its first batch.
        step_s: What a plain step took.
        opening_s: What it took to put the plan to work; 0.0: the run was over before.
        tuning: What live trials have settled.
    """

    held: tuple[str, Any]
    step_s: float
    opening_s: float = 0.0
    tuning: Tuning | None = None


_met: dict[Any, Met] = {}


def asks_by_name(plan: Plan) -> bool:
    """Whether a plan asks by name for something that is to be at work from the first step on."""
    return plan.out_of_memory == "split" or any(
        not (declaration.is_default(value := getattr(plan, name)) or declaration.is_off(value))
        for name, declaration in declarations().items()
        if name != "precision"  # which needs no edits
    )


def begins_plain(plan: Plan, module: LightningModule, host: Host, precision: str, kept: RunState) -> bool:
    """Whether a run of ``plan``, which asks for nothing by name, begins as the user wrote it.

    Not where no clock may decide, or what cannot be done is an error; nor on several ranks, whose layouts have to be
    known before the first step. There a run that is known by then to be short is plain from end to end.
    """
    trainer = module.trainer
    strategy: Strategy = trainer.strategy
    by_clock = plan.tune == "auto" and plan.verify and not torch.are_deterministic_algorithms_enabled()
    is_new = trainer.ckpt_path is None and not (kept.tuning or kept.decisions or kept.put_on)
    is_to_stay = _is_rehearsal(trainer) or (is_new and _is_short_on_every_rank(trainer))
    is_alone = not isinstance(strategy, ParallelStrategy) or is_to_stay
    has_scaler = precision == "16-mixed" and plan.precision == "auto"  # with which a step is of another kind
    feeds = getattr(strategy, "wants_pipeline", False) and host.kind != "cpu"
    # A step that takes its batches from the loader itself has no moment at which the plan could go to work.
    return by_clock and is_alone and not (plan.strict or has_scaler or feeds or takes_loader(trainer))


class PlainStart:
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
        wins_untried: Whether there is something to win that needs no trial of its own: a precision of our choice.
    """

    def __init__(
        self,
        module: LightningModule,
        host: Host,
        plan: Plan,
        kept: RunState,
        purse: Purse,
        make_run: Callable[[], Run],
        start: Callable[[Run, Mapping[str, str], Program | None], None],
        stay_plain: Callable[[str], None],
        *,
        wins_untried: bool,
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
        self._is_charged = False  # the step under way, to the purse
        self._paid = 0.0  # for trials, when it began
        self._ended: float | None = None  # that step, by its optimizer or its backward pass
        self._cycles = 0
        self._met_tuning: Tuning | None = None
        self._held = ""  # by the module before its first step, which changes it: in words
        self._first: list[Tensor] = []  # the first batch, without its data
        self._compiling_ms = compiling_ms()
        self._is_short = ""  # too short for trials, and why
        self._is_open = False  # the program and its sites were looked at
        self._wins_untried = wins_untried
        self._owed_s = 0.0  # what it takes to try the techniques that were left out
        self.is_over = False

    @property
    def trains(self) -> bool:
        """Whether a batch that comes to the device now is one to train on."""
        return self._trainer.training

    @property
    def is_by_hand(self) -> bool:
        """Whether the module calls its optimizers itself: what a plain step runs in is then heard by :meth:`around`."""
        return not self._module.automatic_optimization

    def begin_with(self, run: Run) -> None:
        """Takes over a run that is there already, to answer a lack of memory."""
        self._run = run

    def interrupt(self) -> None:
        """Told that something else than training goes on: the step is over, and the time until the next is not its."""
        self._take_time(self._ended)
        self._began = self._ended = None

    def stepped(self) -> None:
        """Told that a backward pass or an optimizer's step is over: what comes then may be another's."""
        self._ended = seconds()

    def around(self, step: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """What a plain step runs in. With manual optimization it computes beyond the calls of optimizers, too."""
        if not self.is_by_hand:
            return step
        return self if isinstance(step, contextlib.nullcontext) else nested(self, step)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self.raised(error)

    def raised(self, error: Exception) -> None:
        """Told what a plain step raised: of a lack of memory it leaves a page in the place of the bare error."""
        if not is_out_of_memory(error) or self._plan.out_of_memory == "off":
            return
        with contextlib.suppress(Exception):  # the user's own error is worth more than what could be said of it
            self._run = self._run or self._make_run()
        if self._run is not None:
            self._run.memory.end(error, "forward pass")

    def _take_time(self, ended: float | None = None) -> None:
        if self._began is None:
            return
        took = (seconds() if ended is None else ended) - self._began
        if self._run is not None and self._run.is_started:
            self._follow(self._run, took)
            return
        self._cycles += 1
        if self._cycles > 1:  # the first one fills caches
            self._purse.step_took(took)

    def batch(self, batch: Any) -> None:
        """Told of every batch that is about to be trained on, before its step."""
        if self.is_over:
            self._purse.done += 1
            return
        if self._searches.are_running():
            self._began = None
            return
        self._take_time()
        self._purse.steps_a_turn = max(1, self._trainer.accumulate_grad_batches)
        if self._purse.done == 0:
            self._meet(batch)
        # Edits come between two steps of the optimizer, as switches do.
        begins_turn = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready % self._purse.steps_a_turn == 0
        if begins_turn and not self.is_over:
            if self._run is not None and self._run.is_started:
                self._try_the_rest(self._run)
            elif self._cycles >= PLAIN_STEPS or self._is_known():
                self._consider()
        self._purse.done += 1
        self._began = seconds()

    def _follow(self, run: Run, took: float) -> None:
        """Has the purse pay for what a step that was not plain, and is no turn of live trials, took more than plain."""
        paid, self._paid = self._purse.spent_s[TRIALS] - self._paid, self._purse.spent_s[TRIALS]
        if self._is_charged and self._purse.step_s is not None:  # beside what trials have paid themselves
            self._purse.pay(TRIALS, max(0.0, took - self._purse.step_s - paid))
            self._paid = self._purse.spent_s[TRIALS]
        self._is_charged = run.live is not None and run.live.turns.trials is None

    def _meet(self, batch: Any) -> None:
        """Before the first step: how long the run is, and what this process knows of the program."""
        trainer = self._trainer
        is_parallel = isinstance(trainer.strategy, ParallelStrategy)
        turns = turns_left(trainer)
        self._purse.steps = turns * self._purse.steps_a_turn
        if _is_rehearsal(trainer):
            self._is_short = "a rehearsal"
        elif is_parallel or turns < MIN_TURNS:
            where = f" on {trainer.world_size} ranks" if trainer.world_size > 1 else ""
            self._is_short = f"the run is too short: {turns:.0f} steps{where}"
        if is_parallel:  # where no rank may decide alone
            self._end(self._is_short)
            return
        with self._purse.paying("setting up"), contextlib.suppress(Exception):  # of objects of any library's
            tensors = [tensor for tensor in tensors_in(batch) if not tensor.is_nested]
            self._first = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]
            self._signature = _signature(self._module, self._plan)
            met = _met.get(self._signature)
            if met is not None and not self._kept.put_on and self._is_known_to_be_short(met):
                self._purse.step_took(met.step_s)
                self._end(self._is_short or f"the run is too short: {turns:.0f} steps")
            elif (met is not None and met.held[0]) or self._may_be_known(turns):
                self._held = described(self._module)
        if self.is_over:
            return
        met = _met.get(self._signature)
        if met is not None and met.held == self._whole:
            self._purse.step_took(met.step_s)
            self._met_tuning = met.tuning and replace(copy.deepcopy(met.tuning), is_earlier=True)
            if not self._ends_with_nothing(turns) and self._purse.can_pay(met.opening_s):
                self._cycles = PLAIN_STEPS
        else:
            self._ends_with_nothing(turns)

    def _may_be_known(self, turns: float) -> bool:
        """Whether it is of use to describe the program: to find out what is kept of it, or to keep it."""
        return turns > PLAIN_STEPS and (not self._is_short or verdict_cache.are_kept())

    def _is_known_to_be_short(self, met: Met) -> bool:
        """Whether the run will never pay for a look, though its steps take twice as long as batches let expect."""
        _, batch = self._whole
        now, then = (sum(shape.numel() for shape, _ in shapes) for shapes in (batch, met.held[1]))
        larger: float = max(1.0, now / max(1, then))
        return 2 * larger * SHARE * self._purse.steps * met.step_s < (met.opening_s or self._opening_s)

    @property
    def _whole(self) -> tuple[str, Any]:
        return self._held, tuple((tensor.shape, tensor.dtype) for tensor in self._first)

    def _tuning(self) -> Tuning | None:
        """What an earlier run has settled: of this module, of this program, or of one that looks like it."""
        of_program = None if self._known is None else self._known.tuning
        return self._kept.tuning or of_program or self._met_tuning

    def _ends_with_nothing(self, turns: float) -> bool:
        tuning = self._tuning()
        if tuning is None or self._kept.put_on or not tuning.is_nothing_for(turns):
            return False
        self._end("no option was measurably faster in an earlier run")
        return True

    def _is_known(self) -> bool:
        """Whether an earlier run of the module, or the checkpoint that this one goes on from, has decided."""
        return self._kept.tuning is not None or bool(self._kept.decisions or self._kept.put_on)

    def _consider(self) -> None:
        purse = self._purse
        if self._owed_s and not self._can_try_the_rest():
            return
        if not self._is_open:
            opening_s = self._opening_s
            if not (self._kept.put_on or purse.can_pay(opening_s)):
                is_sure = purse.done >= _SURE_STEPS  # how long a step takes
                if is_sure and purse.step_s is not None and purse.total_s < opening_s:
                    self._end(f"the run is too short: {purse.total_s:.2g} s is what it may pay, of {opening_s:.2g} s")
                return
            if not self._open():
                return
        assert self._run is not None
        left_out = self._left_out(self._run)
        if left_out is None:
            return
        self._go_to_work(self._run, left_out)

    def _go_to_work(self, run: Run, left_out: Mapping[str, str]) -> None:
        purse = self._purse
        with purse.paying("setting up"):
            self._say(run, left_out)
            self._start(run, left_out, self._program)
            if run.live is not None:
                run.live.recall(self._known, self._met_tuning)
        self._is_charged = True
        if self._signature is not None and purse.step_s is not None:
            _met[self._signature] = Met(self._whole, purse.step_s, purse.spent_s["setting up"], self._tuning())

    def _try_the_rest(self, run: Run) -> None:
        """Begins again with what could not be paid for at first, once faster steps have earned as much."""
        settled = None if run.live is None or not self._owed_s else run.live.settled
        if settled is None or settled.whole is None or not (settled.is_proven and self._can_try_the_rest()):
            return
        left_s = turns_left(self._trainer) * (self._purse.turn_s or 0.0) / settled.whole.interval.ratio
        if self._owed_s + self._opening_s > _WORTH * left_s:
            return
        run.close()
        self._kept.tuning, self._known, self._met_tuning = None, None, settled
        self._run = self._make_run()
        left_out = self._left_out(self._run)
        self._go_to_work(self._run, left_out or {})

    def _can_try_the_rest(self) -> bool:
        can_pay = self._purse.can_pay(self._owed_s + self._opening_s)
        return can_pay and turns_left(self._trainer) >= MIN_TURNS  # else nobody could judge it

    def goes_on(self) -> bool:
        """Told that nothing has won of what was tried; whether it waits until the run can pay for the rest."""
        can_ever = self._owed_s + self._opening_s <= self._purse.to_come_s
        if not (self._wins_untried and self._owed_s and can_ever):
            return False
        self._kept.tuning, self._run, self._is_open, self._wins_untried = None, None, False, False
        return True

    @functools.cached_property
    def _opening_s(self) -> float:
        """About what it takes to put the plan to work, and the longer first steps after: by the number of modules.

        Trials of parts are left out. What is compiled is compiled once more, for another number format.
        """
        modules = list(self._module.modules())
        is_first = not any(met.opening_s for met in _met.values())  # what is imported, and measured once in a process
        compiling_s = (compiling_ms() - self._compiling_ms) / 1e3 if any(map(is_compiled, modules)) else 0.0
        return 0.022 * is_first + 0.022 + 0.0002 * len(modules) + compiling_s

    def _open(self) -> bool:
        """Looks at the program and its sites; whether there may be something to win."""
        purse = self._purse
        with purse.paying("setting up"):
            if self._program is None and not self._is_known():
                if self._held:
                    self._program = program_of(self._trainer, self._first, self._host, repr(self._plan), self._held)
                self._known = None if self._program is None else verdict_cache.recall(self._program)
            turns, tuning = turns_left(self._trainer), self._tuning()
            if self._ends_with_nothing(turns):
                return False
            is_proven = tuning is not None and tuning.is_proven
            if purse.turn_s is not None and purse.to_come_s < _LEAST_TURNS * purse.turn_s:
                self._is_short = self._is_short or f"the run is too short: {turns:.0f} steps"
            if self._is_short and not (is_proven or self._kept.put_on):
                self._end(self._is_short)
                return False
            if self._run is None:
                self._run = self._make_run()
            if self._known is not None:
                self._run.engine.decisions.update(self._known.decisions)
        self._is_open = True
        return True

    def _left_out(self, run: Run) -> dict[str, str] | None:
        """The techniques whose trials the run cannot pay now, and why; None: it will soon be able to pay for more."""
        purse, step_s = self._purse, self._purse.step_s
        if step_s is None:  # a resumed run: its decisions hold
            return {}
        costs = sorted((cost_s, name) for name, cost_s in run.engine.costs_s(step_s).items())
        is_early = purse.done < min(_WAIT * purse.steps, _WAIT_STEPS) and not self._wins_untried
        # What is tried has to be judged, too, by turns of which some are slower.
        to_come_s = purse.to_come_s - _LEAST_TURNS * step_s * purse.steps_a_turn
        now = ever = self._owed_s = 0.0
        left_out = {}
        for cost_s, name in costs:
            ever += cost_s
            if purse.can_pay(now + cost_s) and now + cost_s <= to_come_s:
                now += cost_s
                continue
            if is_early and ever <= to_come_s:
                return None
            left_out[name] = f"not tried: it would take about {cost_s:.2g} s, more than this run can pay"
            self._owed_s += cost_s
        return left_out

    def _say(self, run: Run, left_out: Mapping[str, str]) -> None:
        """Announces trials that the user will notice."""
        costs = run.engine.costs_s(self._purse.step_s or 0.0)
        tried = {name: cost_s for name, cost_s in costs.items() if name not in left_out}
        if sum(tried.values()) > NOTICED_S:
            took = f"{sum(tried.values()):.0f} s"
            rank_zero_info(f"lightning-accel: trying {', '.join(tried)} on this step, about {took}")

    def _end(self, reason: str) -> None:
        self.is_over = True
        self._stay_plain(reason)

    def close(self) -> None:
        """Keeps, for the next fit of this program, what live trials have settled, and what a step took."""
        met, step_s = _met.get(self._signature), self._purse.step_s
        if met is None and self._signature is not None and step_s is not None:
            _met[self._signature] = Met(self._whole, step_s)
        if met is not None and self._run is not None and self._run.live is not None:
            met.tuning = copy.deepcopy(self._run.live.settled) or met.tuning
        self._run, self.is_over = None, True


def _is_rehearsal(trainer: Trainer) -> bool:
    return bool(trainer.fast_dev_run or trainer.overfit_batches)  # type: ignore[attr-defined]


def _is_short_on_every_rank(trainer: Trainer) -> bool:
    """Whether a fit is short by the Trainer's own limits, which are the same on every rank, whatever its loaders."""
    limit, epochs, accumulated = trainer.limit_train_batches, trainer.max_epochs or -1, trainer.accumulate_grad_batches
    turns = epochs * -(-limit // accumulated) if isinstance(limit, int) and epochs != -1 else math.inf
    turns = turns if trainer.max_steps == -1 else min(turns, trainer.max_steps)
    return trainer.state.fn == TrainerFn.FITTING and turns < SHORT_ON_RANKS


def _signature(module: LightningModule, plan: Plan) -> Any:
    """What tells a program from others of this process, for nearly nothing: classes, parameters, plan."""
    if len(_met) > _MOST_MET:
        _met.clear()
    kinds = tuple(type(part) for part in module.modules())
    shapes = tuple((p.shape, p.dtype) for p in module.parameters() if not torch.nn.parameter.is_lazy(p))
    trainer = module.trainer
    terms = torch.get_num_threads(), module.device, type(trainer.strategy), trainer.accumulate_grad_batches
    return kinds, shapes, terms, plan
