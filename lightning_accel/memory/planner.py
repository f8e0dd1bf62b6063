"""Plans memory during the first steps: meters steps, plans, meters the plan and corrects it, then stays passive.

In the first step every block recomputes, which needs little memory without a plan, and each kind of block is measured
with every policy (:mod:`~lightning_accel.memory.costs`). The next steps are metered. Their peaks define the problem
(:mod:`~lightning_accel.memory.knapsack`), whose solution runs and is corrected by its own peaks.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.checks import SettingError
from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.device import synchronize
from lightning_accel.core.isolation import is_trial
from lightning_accel.core.optimizers import state_of
from lightning_accel.core.torch_private.autograd import is_in_backward
from lightning_accel.core.tree import tensors_in
from lightning_accel.memory.costs import BlockCost, BlockCosts, Policy, kind_of, measure_block, run_block
from lightning_accel.memory.knapsack import MAX_ROUNDS, SLACK, Choice, KnapsackProblem, Policies, Rounds
from lightning_accel.memory.meter import MemoryInterval, MeterBusyError, meter_for
from lightning_accel.memory.offload import Offloader, Offloading
from lightning_accel.memory.recorder import BlockCall, OptimizerWatch, StepRecorder
from lightning_accel.memory.saved_tensors import saving
from lightning_accel.memory.schedule import BlockSchedule, FixedMemory, MemorySchedule

CONFIRMING_STEPS = 3
# A step without an optimizer step is part of an accumulation. Its last step holds all gradients.
MAX_WAITING_STEPS = 64
MAX_STEPS = 2 + MAX_WAITING_STEPS * MAX_ROUNDS + CONFIRMING_STEPS + 1  # after these, planning has ended
LEARNING_STEPS = 16  # a first block must be called in these
HEADROOM = 1.125  # margin for growing batches, which would otherwise cause a new plan each time
AGREEING_STEPS = 16  # how often ranks ask whether rank 0 outgrew its plan

Phase = Literal["learning", "timing", "planning", "confirming", "settled"]


@dataclass(frozen=True)
class State:
    """The progress of planning. Rank 0's state holds on all ranks."""

    phase: Phase = "learning"  # what the next step is for
    policies: Policies = field(default_factory=dict)  # policy of each block in it; other blocks recompute
    offloads_rest: bool = False  # also outside of blocks: only if nothing else fits
    schedule: MemorySchedule | None = None  # the decision
    gave_up: str = ""  # why nothing is planned, and every block recomputes
    error: str = ""  # why the run cannot go on
    remark: str = ""  # a message to log once


class Planner:
    """Chooses a policy for each block of a model, so that a training step never allocates more than a budget."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        budget_bytes: int,
        device: torch.device,
        offloading: Offloading | None = None,
    ) -> None:
        self.state = State()
        self.agree: Callable[[State], State] | None = None  # returns the state of rank 0; None with one process
        # One tensor is prefetched at a time: the plan has no room for more.
        self.offloader = None if offloading is None else Offloader(device, offloading, prefetch_depth=1, by_blocks=True)
        self._model, self._blocks, self._budget, self._device = model, dict(blocks), budget_bytes, device
        self._offloading = offloading
        self._meter = meter_for(device)
        self._kinds: dict[Any, BlockCosts] = {}
        self._costs: dict[str, BlockCosts] = {}
        self._unlearned: set[str] = set()  # not measured yet, because the meter was busy
        self._rounds = Rounds(budget_bytes, may_offload=offloading is not None)
        self._steps = self._waited = self._most_calls = 0
        self._busy = ""
        self._is_closed = False
        # Of the current step:
        self._called: Counter[str] = Counter()
        self._elements: dict[BlockCall, int] = {}
        self._last_policies: Policies = {}
        self._recorder: StepRecorder | None = None
        self._window: Stopwatch | None = None  # around a step that is timed
        self._shared_bytes: Mapping[BlockCall, int] = {}  # of arguments
        # Of earlier steps:
        self._base_ms = 0.0  # of a step in which every block follows its leanest policy
        self._times: list[float] = []
        self._last: KnapsackProblem | None = None
        self._planned: dict[BlockCall, float] = {}  # elements of the arguments
        self._outgrown: dict[BlockCall, int] = {}  # larger than planned, or not planned
        self.optimizers = OptimizerWatch()

    # -- during a step -----------------------------------------------------------------------------------------

    def run(
        self, site: str, block: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a block with its planned policy."""
        if self._is_closed:  # a copy of the model outlives the run
            return original(block, *args, **kwargs)
        # A copy of the block, a trial or a recomputation by the user is not a call of the step.
        if self._blocks.get(site) is not block or is_trial() or is_in_backward():
            policy = self._last_policies.get(site, "full")
            return run_block(policy, block, original, args, kwargs, self.offloader)
        if site in self._unlearned:
            self.learn(site, block, original, args, kwargs)
        call, tensors = BlockCall(site, self._called[site]), tensors_in((args, kwargs))
        self._called[site] += 1
        elements = self._elements[call] = sum(tensor.numel() for tensor in tensors)
        is_planned = self.state.phase in ("confirming", "settled") and site in self._costs
        if is_planned and elements > self._planned.get(call, 0.0):
            self._outgrown[call] = max(elements, self._outgrown.get(call, 0))
            if self.agree is None:
                self.learn(site, block, original, args, kwargs)
        # Until larger calls are planned, all blocks recompute. Several ranks must always use the same policies, since a
        # block may wait for the same block on other ranks.
        is_lean = self._outgrown and self.agree is None
        policy = self._last_policies[site] = "full" if is_lean else self.state.policies.get(site, "full")
        run = partial(run_block, policy, block, original, args, kwargs, self.offloader)
        return run() if self._recorder is None else self._recorder.record(call, tensors, run)

    def learn(
        self, site: str, block: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Measures the cost of each policy for this block, unless a block of its kind has been measured."""
        kind = kind_of(block, args, kwargs)
        if kind not in self._kinds:
            self._unlearned.add(site)
            if self._recorder is not None:
                return
            try:
                self._kinds[kind] = measure_block(block, original, args, kwargs, self._meter, self.offloader)
            except MeterBusyError as error:
                self._busy = str(error)
                return
        self._unlearned.discard(site)
        if self._kinds[kind].by_policy:
            self._costs[site] = self._kinds[kind]

    def around_step(self) -> AbstractContextManager[None]:
        """Offloads tensors saved outside of blocks too, if that was decided."""
        if self.state.offloads_rest and self.offloader is not None and torch.is_grad_enabled():
            return saving(self.offloader, self._model)
        return nullcontext()

    # -- between steps -----------------------------------------------------------------------------------------

    def enter(self, *, is_training: bool) -> None:
        """Announces that a step begins, and that the previous one has ended, with its optimizer step.

        Raises:
            ValueError: The budget is less than any choice needs.
        """
        if not is_training and self._recorder is not None and not self.optimizers.has_stepped:
            return  # inside a step, before its backward pass
        self._end_window()
        if not is_training or self.state.gave_up:
            return
        self._steps += 1
        if self._busy:
            self._waited += 1
            if self._waited > MAX_WAITING_STEPS:
                why = f"not planned, every block recomputes: the memory could not be measured, {self._busy}"
                self.state = replace(self.state, gave_up=why)
            self._busy = ""
        self._advance()
        self._called.clear()
        self._elements.clear()
        if self.state.phase in ("timing", "planning", "confirming") and not self.state.gave_up:
            self._begin_window()

    def close(self) -> None:
        """Stops planning and releases offloaded data. Blocks then run as they are written."""
        self._is_closed = True
        self.optimizers.stop()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        self._meter.abort()
        if self.offloader is not None:
            self.offloader.close()

    def _advance(self) -> None:
        """Moves to the next state, with several ranks to rank 0's. All ranks call this at the same steps."""
        state = replace(self.state, remark="")
        if state.phase == "learning" and self._costs and not self._unlearned:
            state = replace(state, phase="timing", policies={site: c.leanest for site, c in self._costs.items()})
        elif state.phase == "learning" and not self._costs and not self._unlearned and self._steps > LEARNING_STEPS:
            state = replace(state, gave_up="not planned: no block can be recomputed")
        elif state.phase == "confirming" and state.schedule is not None and state.schedule.measured_ms is not None:
            state = replace(state, phase="settled")
        elif state.phase == "settled":
            if self.agree is not None and self._steps % AGREEING_STEPS:
                return
            state = self._grown(state)
        self.state = state if self.agree is None else self.agree(state)
        if self.state.error:
            raise SettingError(self.state.error)
        if self.state.phase in ("confirming", "settled"):
            self.optimizers.stop()
        if self.state.offloads_rest and self.offloader is not None:
            self.offloader.prefetch_depth = 0

    def _begin_window(self) -> None:
        self.optimizers.has_stepped = False
        if self.state.phase == "planning":
            model, optimizers = self._model, self.optimizers.seen
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            try:
                self._meter.start([*model.parameters(), *model.buffers(), *gradients, *state_of(optimizers)])
            except MeterBusyError as error:
                self._busy = str(error)
                return
            self._recorder = StepRecorder(self._meter)
            self._shared_bytes = self._recorder.shared_bytes
        synchronize(self._device)
        self._window = Stopwatch()

    def _end_window(self) -> None:
        if self._window is None:
            return
        synchronize(self._device)
        ms, self._window = 1e3 * self._window.seconds(), None
        if self.state.phase == "timing":
            self._base_ms, self.state = ms, replace(self.state, phase="planning")
        elif self.state.phase == "confirming":
            self._times.append(ms)
            if len(self._times) == CONFIRMING_STEPS and self.state.schedule is not None:
                schedule = replace(self.state.schedule, measured_ms=statistics.median(self._times))
                self.state = replace(self.state, schedule=schedule)
        elif self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.close()
            self._waited += 1
            try:
                intervals = self._meter.stop()
            except MeterBusyError as error:
                self._busy = str(error)
                return
            calls = [call for call in recorder.calls if self._is_known(call.site)]
            self._most_calls = max(self._most_calls, len(calls))
            # A step within an accumulation holds less than its last step. A step that skips blocks (stochastic depth)
            # holds less than one that calls them all.
            is_whole = self.optimizers.has_stepped and len(calls) == self._most_calls
            if calls and (is_whole or self._waited >= MAX_WAITING_STEPS):
                self._waited = 0
                self._take_up(calls, intervals)

    def _take_up(self, calls: list[BlockCall], intervals: list[MemoryInterval]) -> None:
        """Updates the plan from a metered step."""
        policies = {site: self.state.policies.get(site, "full") for site in self._costs}
        chosen = {call: policies[call.site] for call in calls}
        costs = {call: self._costs_of(call, self._elements[call]) for call in calls}
        problem = self._last = KnapsackProblem.of(calls, intervals, chosen, costs)
        found = self._rounds.next(problem, policies, max(i.peak_bytes for i in intervals), self._costs)
        policies = {**self.state.policies, **found.policies}
        state = replace(self.state, policies=policies, offloads_rest=self._rounds.offloads_rest)
        if found.least_bytes is not None:
            state = replace(state, error=self._impossible(found.least_bytes))
        elif found.is_final:
            schedule = self._scheduled(problem, found.policies, state.offloads_rest)
            key = frozenset(found.policies.items())
            predicted = self._rounds.predicted_bytes.get(key, schedule.predicted_peak_bytes)
            measured = self._rounds.measured_bytes.get(key)
            schedule = replace(schedule, predicted_peak_bytes=predicted, measured_peak_bytes=measured)
            state, self._times = replace(state, phase="confirming", schedule=schedule), []
            self._planned = {call: float(self._elements[call]) for call in calls}
        self.state = state

    def _grown(self, state: State) -> State:
        """Returns a plan for batches one eighth larger if a batch outgrew the present plan."""
        if not self._outgrown or self._last is None:
            return state
        ratios = [size / self._planned[call] for call, size in self._outgrown.items() if self._planned.get(call)]
        factor = HEADROOM * max(ratios) if ratios else 1.0  # a call that was not planned is not a larger batch
        self._planned = {call: size * factor for call, size in self._planned.items()}
        for call, size in self._outgrown.items():
            self._planned[call] = max(self._planned.get(call, 0.0), size * (HEADROOM if ratios else 1.0))
        self._outgrown = {}
        costs = {call: self._costs_of(call, size) for call, size in self._planned.items()}
        problem = self._last = self._last.with_costs(costs, factor, self._fixed().total)
        found, remark = problem.solve_by_site(round(self._budget * (1 - SLACK))), ""
        if found is None:
            found = {stage.call.site: self._costs[stage.call.site].leanest for stage in problem.stages}
            remark = (
                f"memory.budget: a batch larger than any before may not fit into"
                f" {format_bytes(self._budget)}; every block now needs as little as it can."
            )
        schedule = self._scheduled(problem, found, state.offloads_rest)
        self._times = []
        policies = {**state.policies, **found}
        return replace(state, phase="confirming", policies=policies, schedule=schedule, remark=remark)

    # -- parts -------------------------------------------------------------------------------------------------

    def _costs_of(self, call: BlockCall, elements: float) -> dict[Policy, BlockCost]:
        return self._costs[call.site].of_call(elements, self._shared_bytes.get(call, 0))

    def _scheduled(self, problem: KnapsackProblem, policies: Policies, offloads_rest: bool) -> MemorySchedule:
        """Returns the schedule in which each block follows its policy, with the predicted memory and time."""
        chosen = problem.by_call(policies)
        kept: Choice = dict.fromkeys(chosen, "keep")
        is_plain_known = all("keep" in stage.by_policy for stage in problem.stages)
        return MemorySchedule(
            budget_bytes=self._budget,
            blocks=tuple(
                BlockSchedule.of(stage, policies[site], self._costs[site], type(self._blocks[site]).__name__)
                for stage in problem.stages
                for site in [stage.call.site]
            ),
            fixed=self._fixed(),
            offloading=self._offloading,
            offloads_rest=offloads_rest,
            plain_peak_bytes=problem.peak(kept) if is_plain_known else None,
            plain_ms=self._step_ms(kept) if is_plain_known else None,
            predicted_peak_bytes=problem.peak(chosen),
            predicted_ms=self._step_ms(chosen),
        )

    def _step_ms(self, choice: Choice) -> float:
        """Returns the predicted milliseconds of a step. Deterministic runs report them, but decide nothing by them."""
        costs = [(self._costs[call.site], policy) for call, policy in choice.items()]
        extra = sum(cost.by_policy[policy].ms - cost.by_policy[cost.leanest].ms for cost, policy in costs)
        return max(0.0, self._base_ms + extra)

    def _impossible(self, least_bytes: int) -> str:
        return (
            f"memory.budget: a training step does not fit into {format_bytes(self._budget)}"
            f" ({self._budget} bytes). The least that is possible with this model and batch is about"
            f" {format_bytes(least_bytes)} ({least_bytes} bytes), of which {format_bytes(self._fixed().total)} are"
            " parameters, gradients, optimizer state and buffers. Give a larger budget or a smaller batch, or set"
            " memory.offload ('host' on a GPU, 'disk')."
        )

    def _is_known(self, site: str) -> bool:
        """Returns whether the current policy of this block was measured. Blocks first called later are not planned."""
        return site in self._costs and self.state.policies.get(site, "full") in self._costs[site].by_policy

    def _fixed(self) -> FixedMemory:
        return FixedMemory.of(self._model, self.optimizers.seen)
