"""The planner at work: it meters a few training steps, plans, meters the plan, mends it, and then stands aside.

The first step runs with every block recomputed, as lean as can be without a plan, while each kind of block is measured
in each way (:mod:`~lightning_accel.memory.costs`). The next steps are metered: the peaks that the allocator shows make
the problem (:mod:`~lightning_accel.memory.solve`), its answer runs, and is mended by what it shows in turn.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.checks import SettingError
from lightning_accel.core.isolation import is_trial
from lightning_accel.core.tree import tensors_in
from lightning_accel.memory.costs import (
    OFFLOADING,
    WAYS,
    BlockCosts,
    Cost,
    Way,
    elements_in,
    kind_of,
    measure_block,
    run_block,
)
from lightning_accel.memory.describe import describe, impossible, own_costs
from lightning_accel.memory.memory_plan import FixedMemory, MemoryPlan, state_of
from lightning_accel.memory.meter import MeterBusyError, meter_for
from lightning_accel.memory.offload import Offloader
from lightning_accel.memory.optimizers import OptimizerWatch
from lightning_accel.memory.rounds import MAX_ROUNDS, SLACK, Rounds, Ways, by_call, leanest, solve
from lightning_accel.memory.solve import Problem
from lightning_accel.memory.timeline import Call, SharedArguments, StepRecorder, Timeline

if TYPE_CHECKING:
    from lightning_accel.techniques.activation_offloading import OffloadingPlan

CONFIRMING_STEPS = 3
# A step without an optimizer step is the middle of an accumulation; the one that ends it holds all gradients.
MAX_WAITING_STEPS = 64
MAX_STEPS = 2 + MAX_WAITING_STEPS * MAX_ROUNDS + CONFIRMING_STEPS + 1  # after which a plan is there, if it can be
LEARNING_STEPS = 16  # in which a first block has to be called
HEADROOM = 1.125  # a batch that outgrows the plan makes one for that much more, or growing batches would plan each time
AGREEING_STEPS = 16  # how often several ranks ask whether rank 0 outgrew its plan

Phase = Literal["learning", "timing", "planning", "confirming", "settled"]


@dataclass(frozen=True)
class State:
    """How far planning has come. What rank 0 has come to holds on all ranks.

    Attributes:
        phase: What the next step is for.
        ways: What each block does in it; those not named recompute.
        offloads_rest: Whether what is saved outside all blocks is offloaded too: only where nothing else fits.
        plan: What was decided; None until then.
        gave_up: Why nothing is planned, and every block recomputes; empty while all is well.
        error: Why the run cannot go on.
        remark: What is to be said once.
    """

    phase: Phase = "learning"
    ways: Ways = field(default_factory=dict)
    offloads_rest: bool = False
    plan: MemoryPlan | None = None
    gave_up: str = ""
    error: str = ""
    remark: str = ""


class Planner:
    """Decides what each block of a model does, so that a training step fits into a budget.

    Attributes:
        state: How far it has come.
        agree: Maps a value of this process to that of rank 0; None with one process.

    Args:
        model: The model.
        blocks: Its blocks: site → module.
        budget_bytes: The most that a training step may have allocated at one time.
        device: Where it computes.
        offloading: Where blocks may offload to, for the plan.
        offloader: What does so; None: no block is offloaded.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        budget_bytes: int,
        device: torch.device,
        offloading: OffloadingPlan,
        offloader: Offloader | None = None,
    ) -> None:
        self.state = State()
        self.agree: Callable[[State], State] | None = None
        self._model, self._blocks, self._budget, self._device = model, dict(blocks), budget_bytes, device
        self._offloading, self._offloader = offloading, offloader
        self._possible = WAYS if offloader is not None else tuple(way for way in WAYS if way not in OFFLOADING)
        self._meter = meter_for(device)
        self._kinds: dict[Any, BlockCosts] = {}
        self._costs: dict[str, BlockCosts] = {}
        self._unlearned: set[str] = set()  # somebody else was measuring when their turn came
        self._rounds = Rounds(budget_bytes, may_offload=offloader is not None)
        self._steps = self._waited = self._most_calls = 0
        self._busy = ""
        # Of the step in progress:
        self._called: Counter[str] = Counter()
        self._elements: dict[Call, int] = {}
        self._last_ways: Ways = {}
        self._recorder: StepRecorder | None = None
        self._window_start: float | None = None
        self._arguments = SharedArguments()
        # Of those before:
        self._base_ms = 0.0
        self._times: list[float] = []
        self._last: Problem | None = None
        self._planned: dict[Call, float] = {}  # elements of the arguments
        self._outgrown: dict[Call, int] = {}  # those that were larger than planned, or not planned for
        self._optimizers = OptimizerWatch(model)

    # -- during a step -----------------------------------------------------------------------------------------

    def run(
        self, site: str, block: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a block the way that is planned for it."""
        # A copy of the block, a trial of another technique, a recomputation of the user's own: not the step's calls.
        is_elsewhere = torch._C._current_graph_task_id() != -1
        if self._blocks.get(site) is not block or is_trial() or is_elsewhere:
            way = self._last_ways.get(site, "full")
            return run_block(way, block, original, args, kwargs, self._offloader)
        if site in self._unlearned:
            self.learn(site, block, original, args, kwargs)
        call = Call(site, self._called[site])
        self._called[site] += 1
        self._elements[call] = elements_in(args, kwargs)
        if self.state.phase in ("confirming", "settled"):
            self._notice_growth(call, block, original, args, kwargs)
        # Several ranks go the same way always: a block may wait for its like on the others.
        is_lean = self._outgrown and self.agree is None
        way = self._last_ways[site] = "full" if is_lean else self.state.ways.get(site, "full")
        run = partial(run_block, way, block, original, args, kwargs, self._offloader)
        if self._recorder is None:
            return run()
        self._arguments.note(call, tensors_in((args, kwargs)))
        return self._recorder.record(call, run)

    def _notice_growth(
        self, call: Call, block: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A call larger than any that was planned for, or one that was not: until a plan for it, all recomputes."""
        if call.site not in self._costs or self._elements[call] <= self._planned.get(call, 0.0):
            return
        self._outgrown[call] = max(self._elements[call], self._outgrown.get(call, 0))
        if self.agree is None:
            self.learn(call.site, block, original, args, kwargs)

    def learn(
        self, site: str, block: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Measures what each way would cost this block, unless one of its kind was measured before."""
        kind = kind_of(block, args, kwargs)
        if kind not in self._kinds:
            self._unlearned.add(site)
            if self._recorder is not None:
                return
            try:
                self._kinds[kind] = measure_block(
                    block, original, args, kwargs, self._meter, ways=self._possible, offloader=self._offloader
                )
            except MeterBusyError as error:
                self._busy = str(error)
                return
        self._unlearned.discard(site)
        if self._kinds[kind].ways:
            self._costs[site] = self._kinds[kind]

    # -- between steps -----------------------------------------------------------------------------------------

    def enter(self, *, is_training: bool) -> None:
        """Tells that a step begins, and with it that the one before, its optimizer step included, has ended.

        Raises:
            ValueError: The budget is less than any choice needs.
        """
        if not is_training and self._recorder is not None and not self._optimizers.has_stepped:
            return  # in the midst of a step: its backward pass is still to come
        self._end_window()
        if not is_training or self.state.gave_up:
            return
        self._steps += 1
        if self._busy:
            self._wait_for_meter()
        self._advance()
        self._called.clear()
        self._elements.clear()
        if self.state.phase in ("timing", "planning", "confirming") and not self.state.gave_up:
            self._begin_window()

    def close(self) -> None:
        """Stops watching."""
        self._optimizers.stop()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        self._meter.abort()

    def _advance(self) -> None:
        """Makes what rank 0 has come to hold here. On every rank it is called, or not called, at the same steps."""
        state = replace(self.state, remark="")
        if state.phase == "learning" and self._costs and not self._unlearned:
            ways = {site: leanest(costs) for site, costs in self._costs.items()}
            state = replace(state, phase="timing", ways=ways)
        elif state.phase == "learning" and not self._costs and not self._unlearned and self._steps > LEARNING_STEPS:
            state = replace(state, gave_up="not planned: no block can be recomputed")
        elif state.phase == "confirming" and state.plan is not None and state.plan.measured_ms is not None:
            state = replace(state, phase="settled")
        elif state.phase == "settled":
            if self.agree is not None and self._steps % AGREEING_STEPS:
                return
            state = self._grown(state)
        self.state = state if self.agree is None else self.agree(state)
        if self.state.error:
            raise SettingError(self.state.error)
        if self.state.phase in ("confirming", "settled"):
            self._optimizers.stop()
        if self.state.offloads_rest and self._offloader is not None:
            self._offloader.prefetch_depth = 0

    def _begin_window(self) -> None:
        self._optimizers.has_stepped = False
        if self.state.phase == "planning":
            try:
                self._meter.start(self._alive())
            except MeterBusyError as error:
                self._busy = str(error)
                return
            self._recorder = StepRecorder(self._meter)
            self._arguments = SharedArguments()
        self._synchronize()
        self._window_start = time.perf_counter()

    def _end_window(self) -> None:
        if self._window_start is None:
            return
        self._synchronize()
        ms, self._window_start = 1e3 * (time.perf_counter() - self._window_start), None
        if self.state.phase == "timing":
            self._base_ms, self.state = ms, replace(self.state, phase="planning")
        elif self.state.phase == "confirming":
            self._times.append(ms)
            if len(self._times) == CONFIRMING_STEPS and self.state.plan is not None:
                plan = replace(self.state.plan, measured_ms=statistics.median(self._times))
                self.state = replace(self.state, plan=plan)
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
            # One without an optimizer step holds less than the one that ends an accumulation; one that leaves blocks
            # out, as stochastic depth does, less than one that calls them all.
            is_whole = self._optimizers.has_stepped and len(calls) == self._most_calls
            if calls and (is_whole or self._waited >= MAX_WAITING_STEPS):
                self._waited = 0
                self._take_up(Timeline.of(calls, intervals))

    def _take_up(self, timeline: Timeline) -> None:
        """Decides by what a metered step showed."""
        ways = {site: self.state.ways.get(site, "full") for site in self._costs}
        problem = self._last = self._problem(timeline, ways)
        found = self._rounds.next(problem, ways, timeline.peak_bytes, self._costs)
        state = replace(self.state, ways={**self.state.ways, **found.ways}, offloads_rest=found.offloads_rest)
        if found.least_bytes is not None:
            error = impossible(self._budget, found.least_bytes, self._fixed().total)
            state = replace(state, error=error)
        elif found.is_final:
            plan = self._described(problem, found.ways, found.offloads_rest)
            predicted = self._rounds.predicted_bytes(found.ways) or plan.predicted_peak_bytes
            measured = self._rounds.measured_bytes(found.ways)
            plan = replace(plan, predicted_peak_bytes=predicted, measured_peak_bytes=measured)
            state, self._times = replace(state, phase="confirming", plan=plan), []
            self._planned = {call: float(self._elements[call]) for call in timeline.calls}
        self.state = state

    def _grown(self, state: State) -> State:
        """With a batch that outgrew the plan, one for batches of that size and an eighth more."""
        if not self._outgrown or self._last is None:
            return state
        ratios = [size / self._planned[call] for call, size in self._outgrown.items() if self._planned.get(call)]
        factor = HEADROOM * max(ratios) if ratios else 1.0  # a call that was never planned for is no larger batch
        self._planned = {call: size * factor for call, size in self._planned.items()}
        for call, size in self._outgrown.items():
            self._planned[call] = max(self._planned.get(call, 0.0), size * (HEADROOM if ratios else 1.0))
        self._outgrown = {}
        costs = {
            call: self._own(call, self._costs[call.site].for_elements(size).ways)
            for call, size in self._planned.items()
        }
        problem = self._last = self._last.with_costs(costs, factor, self._fixed().total)
        known = {stage.call.site for stage in problem.stages}
        found, remark = solve(problem, round(self._budget * (1 - SLACK))), ""
        if found is None:
            found = {site: leanest(self._costs[site]) for site in known}
            remark = (
                f"gradient_checkpointing: a batch larger than any before may not fit into"
                f" {format_bytes(self._budget)}; every block now needs as little as it can."
            )
        plan = self._described(problem, found, state.offloads_rest)
        self._times = []
        return replace(state, phase="confirming", ways={**state.ways, **found}, plan=plan, remark=remark)

    # -- parts -------------------------------------------------------------------------------------------------

    def _problem(self, timeline: Timeline, ways: Ways) -> Problem:
        chosen = {call: ways[call.site] for call in timeline.calls}
        costs = {call: self._costs[call.site].for_elements(self._elements[call]) for call in timeline.calls}
        return Problem.of(timeline, chosen, {call: self._own(call, cost.ways) for call, cost in costs.items()})

    def _own(self, call: Call, ways: Mapping[Way, Cost]) -> dict[Way, Cost]:
        return own_costs(ways, self._arguments.shared_bytes[call])

    def _described(self, problem: Problem, ways: Ways, offloads_rest: bool) -> MemoryPlan:
        kinds = {site: type(block).__name__ for site, block in self._blocks.items()}
        return describe(
            problem,
            by_call(problem, ways),
            self._costs,
            kinds=kinds,
            base_ms=self._base_ms,
            budget_bytes=self._budget,
            fixed=self._fixed(),
            offloading=self._offloading,
            offloads_rest=offloads_rest,
        )

    def _is_known(self, site: str) -> bool:
        """Whether it is measured what this block does now; one that is first called later on is no part of a plan."""
        return site in self._costs and self.state.ways.get(site, "full") in self._costs[site].ways

    def _fixed(self) -> FixedMemory:
        return FixedMemory.of(self._model, self._optimizers.seen)

    def _alive(self) -> list[Tensor]:
        parameters = list(self._model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        return [*parameters, *self._model.buffers(), *gradients, *state_of(self._optimizers.seen)]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _wait_for_meter(self) -> None:
        reason, self._busy = self._busy, ""
        self._waited += 1
        if self._waited > MAX_WAITING_STEPS:
            gave_up = f"not planned, every block recomputes: the memory could not be measured, {reason}"
            self.state = replace(self.state, gave_up=gave_up)
