"""The plain beginning of a fit: the first steps run as the user wrote them, and show how long a step takes.

Most fits are short, small or tried once, and gain nothing. So a plan starts only when the run's purse can pay for an
inspection of the program and its sites, and for slower steps on trial. Until then, no layer of ours surrounds a step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning_accel.callbacks._epoch_ends import turns_left
from lightning_accel.callbacks._tuner_searches import Searches
from lightning_accel.core.oom_errors import is_out_of_memory
from lightning_accel.core.open_purse import NOTICED_S
from lightning_accel.core.purse import Purse
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.lightning.met_programs import Program
from lightning_accel.lightning.packages import ParallelStrategy, Trainer
from lightning_accel.lightning.plain_steps import PlainSteps
from lightning_accel.lightning.run import Run
from lightning_accel.lightning.start_rules import is_rehearsal
from lightning_accel.tuning import verdict_cache
from lightning_accel.tuning.trial_scheduler import MIN_TURNS

PLAIN_STEPS = 3
"""The least number of timed steps. The first one fills caches and does not count."""

_SURE_STEPS = 15  # after these, the time of a step is certain: on a GPU, the calls of the first steps return early
_LEAST_TURNS = 0.7  # turns of slower arms that a run must be able to pay for: fewer prove nothing
_WORTH = 0.1  # the largest share of the remaining time that a later trial may take


class PlainStart:
    """Decides whether and when a fit that began plain is accelerated."""

    def __init__(
        self,
        program: Program,
        purse: Purse,
        run: Run | None,  # that was made already, since memory may run out
        make_run: Callable[[], Run],
        start: Callable[[Run, Mapping[str, str]], None],
        stay_plain: Callable[[str], None],
    ) -> None:
        self._program, self._kept, self._purse, self._run = program, program.kept, purse, run
        self._make_run, self._start, self._stay_plain = make_run, start, stay_plain
        self._trainer: Trainer = program.module.trainer
        self._searches = Searches(self._trainer)
        self.steps = PlainSteps(self._trainer, purse)
        self._is_short = ""  # why the run is too short for trials; empty if it is not
        self._is_open = False  # the program and its sites were inspected
        self._may_wait = True  # where nothing has won, until the run can pay for what it could not try
        self.is_over = False

    @property
    def is_by_hand(self) -> bool:
        """Whether the module calls its optimizers itself. Then :meth:`around` catches errors of a plain step."""
        return not self._program.module.automatic_optimization

    @contextlib.contextmanager
    def around(self, step: AbstractContextManager[None]) -> Iterator[None]:
        """Wraps a plain step with manual optimization, which also computes outside of optimizer calls."""
        try:
            with step:
                yield
        except Exception as error:
            self.raised(error)
            raise

    def raised(self, error: Exception) -> None:
        """Raises a :class:`StepMemoryError` in place of an out-of-memory error; otherwise does nothing."""
        if not is_out_of_memory(error) or self._program.plan.on_oom == "off":
            return
        with contextlib.suppress(Exception):  # an error of ours must not hide the user's
            self._run = self._run or self._make_run()
        if self._run is not None:
            self._run.memory.end(error, "forward pass")

    def batch(self, batch: Any) -> None:
        """Handles every batch before its step. Only training batches count."""
        if not self._trainer.training:
            return
        if self.is_over:
            self._purse.done += 1
            return
        if self._searches.are_running():
            return
        self.steps.batch_comes()
        self._purse.steps_a_turn = max(1, self._trainer.accumulate_grad_batches)
        if self._purse.done == 0:
            self._look_at_first_batch(batch)
        was_plain = self.steps.are_plain
        # Edits come between two steps of the optimizer, as switches do.
        begins_turn = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready % self._purse.steps_a_turn == 0
        if begins_turn and not self.is_over:
            if not self.steps.are_plain and self._run is not None:
                live = self._run.live
                if live is not None and live.trials is None and self.steps.cannot_be_paid:
                    live.do_without("the first changed steps took more than the run can pay")
                else:
                    self._try_the_rest(self._run)
            elif self.steps.count >= PLAIN_STEPS or self._kept.is_decided:
                self._consider()
        self._purse.done += 1
        if not self.is_over:
            live = None if self._run is None else self._run.live
            is_first = was_plain and not self.steps.are_plain
            self.steps.begin(are_charged=is_first or (live is not None and live.trials is None))

    def _look_at_first_batch(self, batch: Any) -> None:
        """Finds out, before the first step, the length of the run and what this process knows of the program."""
        trainer = self._trainer
        is_parallel = isinstance(trainer.strategy, ParallelStrategy)
        turns = turns_left(trainer)
        self._purse.steps = turns * self._purse.steps_a_turn
        if is_rehearsal(trainer):
            self._is_short = "a rehearsal"
        elif is_parallel or turns < MIN_TURNS:
            where = f" on {trainer.world_size} ranks" if trainer.world_size > 1 else ""
            self._is_short = f"the run is too short: {turns:.0f} steps{where}"
        if is_parallel:  # no rank may decide alone
            self._end(self._is_short)
            return
        with self._purse.paying("setting up"), contextlib.suppress(Exception):  # objects of other libraries may raise
            met = self._program.meet(batch)
            if met is not None and not self._kept.put_on and self._program.is_too_short(met, self._purse.steps):
                self._purse.step_took(met.step_s)
                self._end(self._is_short or _too_short(self._purse.total_s, met.opening_s or self._program.opening_s))
            elif (met is not None and met.held[0]) or (
                # A description serves to find earlier verdicts, or to store new ones.
                turns > PLAIN_STEPS and (not self._is_short or any(verdict_cache.VERDICTS.paths()))
            ):
                self._program.describe()
        if self.is_over:
            return
        if (met := self._program.met()) is not None:
            self._purse.step_took(met.step_s)
        if not self._ends_with_nothing(turns) and met is not None and self._purse.can_pay(met.opening_s):
            self.steps.count = PLAIN_STEPS

    def _ends_with_nothing(self, turns: float) -> bool:
        tuning = self._program.tuning
        if tuning is None or self._kept.put_on or not tuning.is_nothing_for(turns):
            return False
        self._end("no option was measurably faster in an earlier run")
        return True

    def _consider(self) -> None:
        purse = self._purse
        if purse.owed_s and not self._rest(may_wait=True):
            return
        if not self._is_open:
            if self._is_short and self._program.has_no_past:
                self._end(self._is_short)
                return
            with purse.paying("setting up"):
                opening_s = self._program.opening_s  # once: how fast this machine is has to be measured
            if not (self._kept.put_on or purse.can_pay(opening_s)):
                is_sure = purse.done >= _SURE_STEPS  # the time of a step is certain
                if is_sure and purse.step_s is not None and purse.total_s < opening_s:
                    self._end(_too_short(purse.total_s, opening_s))
                return
            if not self._open():
                return
        assert self._run is not None
        left_out = self._left_out(self._run)
        if left_out is not None:
            self._go_to_work(self._run, left_out)

    def _go_to_work(self, run: Run, left_out: Mapping[str, str]) -> None:
        purse = self._purse
        with purse.paying("setting up"):
            costs = run.engine.costs_s(purse.step_s or 0.0)
            tried = {name: cost_s for name, cost_s in costs.items() if name not in left_out}
            if sum(tried.values()) > NOTICED_S:
                took = f"{sum(tried.values()):.0f} s"
                rank_zero_info(f"lightning-accel: trying {', '.join(tried)} on this step, about {took}")
            self._start(run, left_out)
            if run.live is not None:
                run.live.recall(self._program.known, self._program.earlier)
        self.steps.are_plain = False
        self._program.remember(purse.step_s, purse.spent_s["setting up"])

    def _try_the_rest(self, run: Run) -> None:
        """Restarts with techniques that were too expensive at first, once faster steps have saved enough time."""
        live = run.live
        if live is None or live.have_failed or not self._purse.owed_s:
            return
        tuning, trials = live.tuning, live.trials
        if tuning is None or tuning.whole is None or not tuning.is_proven:
            return
        if trials is not None and not trials.can_be_left:
            return
        left_s = turns_left(self._trainer) * (self._purse.turn_s or 0.0) / tuning.whole.interval.ratio
        rest = self._rest(_WORTH * left_s, may_wait=False)
        if not rest:
            return
        run.close()
        self._program.restart(tuning)
        self._run = self._make_run()
        self._go_to_work(self._run, self._put_off(self._purse.owed_s, rest))

    def _rest(self, most_s: float = math.inf, *, may_wait: bool) -> set[str]:
        """Returns the techniques that were left out and can be tried now. Empty while more is worth waiting for."""
        if turns_left(self._trainer) < MIN_TURNS:
            return set()
        return self._affordable(self._purse.owed_s, self._again_s, most_s, may_wait=may_wait) or set()

    @property
    def _again_s(self) -> float:
        """The seconds of another start, with a turn for its comparison: fewer are too few."""
        return self._program.opening_s + (self._purse.turn_s or 0.0)

    def _affordable(
        self, costs_s: Mapping[str, float], beside_s: float, most_s: float, *, may_wait: bool
    ) -> set[str] | None:
        """Returns which techniques to try now, the cheapest first.

        ``beside_s`` is paid with them, and ``most_s`` is what the run may pay for all of it until its end. None if it
        ``may_wait`` and can pay for more by then.
        """
        now_s, chosen = beside_s, set()
        most_s = min(most_s, self._purse.to_come_s)
        for cost_s, name in sorted((cost_s, name) for name, cost_s in costs_s.items()):
            now_s += cost_s
            if now_s > most_s:
                break
            if not self._purse.can_pay(now_s):
                if may_wait:
                    return None
                break
            chosen.add(name)
        return chosen

    def goes_on(self) -> bool:
        """Returns whether the run, in which nothing has won, waits once until it can pay for the other techniques."""
        cheapest_s = min(self._purse.owed_s.values(), default=math.inf)
        if not self._may_wait or cheapest_s + self._again_s > self._purse.to_come_s:
            return False
        self._remember()
        self._kept.tuning, self._run, self._is_open, self._may_wait = None, None, False, False
        self.steps.are_plain = True
        return True

    def _open(self) -> bool:
        """Inspects the program and its sites. Returns whether there may be something to win."""
        purse = self._purse
        with purse.paying("setting up"):
            self._program.recall()
            turns, tuning = turns_left(self._trainer), self._program.tuning
            if self._ends_with_nothing(turns):
                return False
            is_proven = tuning is not None and tuning.is_proven
            if purse.turn_s is not None and purse.to_come_s < (needs_s := _LEAST_TURNS * purse.turn_s):
                self._is_short = self._is_short or _too_short(purse.to_come_s, needs_s)
            if self._is_short and not (is_proven or self._kept.put_on):
                self._end(self._is_short)
                return False
            if self._run is None:
                self._run = self._make_run()
            if self._program.known is not None:
                self._run.engine.decisions.update(self._program.known.decisions)
        self._is_open = True
        return True

    def _left_out(self, run: Run) -> dict[str, str] | None:
        """Returns the techniques that the run cannot try now, with reasons. None if it can soon pay for more."""
        purse, step_s = self._purse, self._purse.step_s
        if step_s is None:  # a resumed run, whose decisions hold
            return {}
        expected = run.engine.costs_s(step_s).items()
        costs_s = {name: max(cost_s, purse.owed_s.get(name, 0.0)) for name, cost_s in expected}
        # Each tried technique also needs turns for its comparison, and some of these turns are slower.
        most_s = purse.to_come_s - _LEAST_TURNS * step_s * purse.steps_a_turn
        chosen = self._affordable(costs_s, 0.0, most_s, may_wait=bool(purse.owed_s))
        return None if chosen is None else self._put_off(costs_s, chosen | self._paid_back(costs_s))

    def _paid_back(self, costs_s: Mapping[str, float]) -> set[str]:
        """Returns the techniques that an earlier run has proven, if they save twice what they cost in this run."""
        if (tuning := self._program.tuning) is None:
            return set()
        left_s = turns_left(self._trainer) * (self._purse.turn_s or 0.0)
        return {name for name, cost_s in costs_s.items() if 2 * cost_s < (1 - 1 / tuning.gain_of(name)) * left_s}

    def _put_off(self, costs_s: Mapping[str, float], chosen: set[str]) -> dict[str, str]:
        """Notes those of these techniques that are not tried now, and returns them with reasons."""
        self._purse.owed_s = {name: cost_s for name, cost_s in costs_s.items() if name not in chosen}
        why = "not tried: it would take about {:.2g} s, more than this run can pay"
        return {name: why.format(cost_s) for name, cost_s in self._purse.owed_s.items()}

    def _end(self, reason: str) -> None:
        self.is_over = True
        self.steps.close()
        self._stay_plain(reason)

    def close(self) -> None:
        """Ends the plain beginning, and stores what the next fit of this program can use."""
        self._remember()
        self._run, self.is_over = None, True
        self.steps.close()

    def _remember(self) -> None:
        live = None if self._run is None else self._run.live
        self._program.end(self._purse.step_s, None if live is None else live.settled)


def _too_short(may_pay_s: float, needs_s: float) -> str:
    return f"the run is too short: {may_pay_s:.2g} s is what it may pay, of {needs_s:.2g} s"
