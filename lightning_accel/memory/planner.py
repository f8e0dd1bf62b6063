"""The planner at work: it meters a few training steps, plans, meters the plan, mends it, and then stands aside.

The first step runs with every block recomputed, as lean as can be without a plan, while each kind of block is measured
in each way (:mod:`~lightning_accel.memory.costs`). The next steps are metered: the peaks that the allocator shows make
the problem (:mod:`~lightning_accel.memory.solve`), its answer runs, and is mended by what it shows in turn.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_accel.byte_size import format_bytes
from lightning_accel.isolation import is_trial
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
from lightning_accel.memory.memory_plan import BlockPlan, FixedMemory, MemoryPlan, state_of
from lightning_accel.memory.meter import MeterBusyError, meter_for
from lightning_accel.memory.offload import Offloader
from lightning_accel.memory.saved import ByStorage
from lightning_accel.memory.solve import Problem
from lightning_accel.memory.timeline import Call, StepRecorder, Timeline
from lightning_accel.plan import OffloadingPlan
from lightning_accel.tree import tensors_in

SLACK = 0.01  # left free: no two steps allocate quite the same
MAX_ROUNDS = 6
CONFIRMING_STEPS = 3
# A step without an optimizer step is the middle of an accumulation; the one that ends it holds all gradients.
MAX_WAITING_STEPS = 16
HEADROOM = 1.125  # a batch that outgrows the plan makes one for that much more, or growing batches would plan each time
MAX_STEPS = 2 + MAX_WAITING_STEPS * MAX_ROUNDS + CONFIRMING_STEPS + 1  # after which a plan is there, if it can be
AGREEING_STEPS = 16  # how often several ranks ask whether rank 0 outgrew its plan

Phase = Literal["learning", "timing", "planning", "confirming", "settled"]
Ways = dict[str, Way]


@dataclass(frozen=True)
class Outcome:
    """What one round of planning comes to; the same on every rank."""

    ways: Ways
    is_final: bool
    offloads_rest: bool = False
    error: str = ""


class Planner:
    """Decides what each block of a model does, so that a training step fits into a budget.

    Attributes:
        plan: What was decided; None until then.
        offloads_rest: Whether what is saved outside all blocks is to be offloaded too: only where nothing else fits.
        gave_up: Why nothing is planned, and every block recomputes; empty while all is well.
        remarks: What is to be said once, each taken out by who says it.

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
        self.plan: MemoryPlan | None = None
        self.offloads_rest = False
        self.gave_up = ""
        self.remarks: list[str] = []
        self.agree: Callable[[Any], Any] | None = None
        self._model, self._blocks, self._budget, self._device = model, dict(blocks), budget_bytes, device
        self._offloading, self._offloader = offloading, offloader
        self._possible = WAYS if offloader is not None else tuple(way for way in WAYS if way not in OFFLOADING)
        self._meter = meter_for(device)
        self._kinds: dict[Any, BlockCosts] = {}
        self._costs: dict[str, BlockCosts] = {}
        self._ways: Ways = {}
        self._phase: Phase = "learning"
        self._called: Counter[str] = Counter()
        self._recorder: StepRecorder | None = None
        self._window_start: float | None = None
        self._base_ms = 0.0
        self._times: list[float] = []
        self._waited = self._steps = 0
        self._busy = ""
        self._measured: dict[frozenset[tuple[str, Way]], int] = {}
        self._predicted: dict[frozenset[tuple[str, Way]], int] = {}
        self._holders: ByStorage[list[Call]] = ByStorage()
        self._shared_bytes: Counter[Call] = Counter()
        self._last: tuple[Timeline, Ways] | None = None
        self._outgrown = 1.0
        self._optimizers: dict[int, Optimizer] = {}
        self._has_stepped = False
        self._hook = register_optimizer_step_post_hook(self._see_optimizer)

    # -- during a step -----------------------------------------------------------------------------------------

    def run(
        self, site: str, block: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a block the way that is planned for it."""
        way = self._ways.get(site, "full")
        run = partial(run_block, way, block, original, args, kwargs, self._offloader)
        # A copy of the block, a trial of another technique, a recomputation of the user's own: not the step's calls.
        is_elsewhere = torch._C._current_graph_task_id() != -1
        if self._blocks.get(site) is not block or is_trial() or is_elsewhere:
            return run()
        if site not in self._costs and self._recorder is None and site in self._ways:
            self.learn(site, block, original, args, kwargs)  # somebody else was measuring when its turn came
        call = Call(site, self._called[site])
        self._called[site] += 1
        costs = self._costs.get(site)
        if costs is not None and self._phase in ("confirming", "settled"):
            self._outgrown = max(self._outgrown, elements_in(args, kwargs) / max(1, costs.argument_elements))
        if self._recorder is None:
            return run()
        self._note_arguments(call, args, kwargs)
        return self._recorder.record(call, run)

    def learn(
        self, site: str, block: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Measures what each way would cost this block, unless one of its kind was measured before."""
        kind = kind_of(block, args, kwargs)
        if kind not in self._kinds and self._recorder is None and not self.gave_up:
            try:
                self._kinds[kind] = measure_block(
                    block, original, args, kwargs, self._meter, ways=self._possible, offloader=self._offloader
                )
            except MeterBusyError as error:
                self._busy = str(error)
        self._ways.setdefault(site, "full")
        if kind in self._kinds and self._kinds[kind].ways:
            self._costs[site] = self._kinds[kind]
            self._ways[site] = _leanest(self._kinds[kind])

    # -- between steps -----------------------------------------------------------------------------------------

    def enter(self, *, is_training: bool) -> None:
        """Tells that a step begins, and with it that the one before, its optimizer step included, has ended.

        Raises:
            ValueError: The budget is less than any choice needs.
        """
        self._end_window()
        if not is_training or self.gave_up:
            return
        self._called.clear()
        self._steps += 1
        if self._busy:
            self._wait_for_meter()
        self._follow_growth()
        if self._phase == "learning" and self._costs and self._ways.keys() == self._costs.keys():
            self._phase = "timing"
        if self._phase in ("timing", "planning", "confirming"):
            self._begin_window()

    def close(self) -> None:
        """Stops watching."""
        self._hook.remove()
        if self._recorder is not None:
            self._recorder = None
            self._meter.stop()

    def _begin_window(self) -> None:
        self._has_stepped = False
        if self._phase == "planning":
            gc.collect()  # what it would free in the midst of the step is not the step's
            try:
                self._meter.start(self._alive())
                self._recorder = StepRecorder(self._meter)
                self._holders, self._shared_bytes = ByStorage(), Counter()
            except MeterBusyError as error:
                self._busy = str(error)
                return
        self._synchronize()
        self._window_start = time.perf_counter()

    def _end_window(self) -> None:
        if self._window_start is None:
            return
        self._synchronize()
        ms, self._window_start = 1e3 * (time.perf_counter() - self._window_start), None
        if self._phase == "timing":
            self._base_ms, self._phase = ms, "planning"
        elif self._phase == "confirming":
            self._times.append(ms)
            if len(self._times) == CONFIRMING_STEPS and self.plan is not None:
                self.plan = replace(self.plan, measured_ms=statistics.median(self._times))
                self._phase = "settled"
        elif self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            timeline = Timeline.of(
                [c for c in recorder.calls if c.site in self._costs], self._meter.stop(self._alive())
            )
            self._waited += 1
            if timeline.calls and (self._has_stepped or self._waited >= MAX_WAITING_STEPS):
                self._waited = 0
                self._take_up(timeline)

    def _take_up(self, timeline: Timeline) -> None:
        """Decides by what a metered step showed."""
        self._last = timeline, dict(self._ways)
        problem = self._problem(timeline, self._ways, self._costs)
        self._measured[_key(self._ways)] = timeline.peak_bytes
        outcome = self._agreed(self._decide(problem))
        if outcome.error:
            raise ValueError(outcome.error)
        self._ways = outcome.ways
        if outcome.offloads_rest != self.offloads_rest:
            self.offloads_rest = outcome.offloads_rest
            self._measured.clear()
            assert self._offloader is not None
            self._offloader.prefetch_depth = 0
        if outcome.is_final:
            self._hook.remove()
            self._phase, self._times = "confirming", []
            self.plan = self._described(problem, self._measured.get(_key(self._ways)))

    def _decide(self, problem: Problem) -> Outcome:
        target = self._budget * (1 - SLACK)
        rounds_left = MAX_ROUNDS - len(self._measured)
        while True:
            ways = _solve(problem, round(target))
            fitting = [dict(key) for key, peak in self._measured.items() if peak <= self._budget]
            if ways is not None and _key(ways) not in self._measured and rounds_left > 0:
                self._predicted[_key(ways)] = problem.peak(_by_call(problem, ways))
                return Outcome(ways, False, self.offloads_rest)
            if fitting:
                fastest = min(fitting, key=lambda found: problem.ms(_by_call(problem, found)))
                return Outcome(fastest, True, self.offloads_rest)
            if self._offloader is not None and not self.offloads_rest:
                return Outcome({site: _smallest(costs) for site, costs in self._costs.items()}, False, True)
            if ways is None or rounds_left <= 0:
                return Outcome(self._ways, True, self.offloads_rest, error=self._impossible(problem))
            target *= 1 - SLACK  # predicted to fit, and measured not to

    def _impossible(self, problem: Problem) -> str:
        least = min(_least(problem), *self._measured.values())
        return (
            f"gradient_checkpointing={{'budget': …}}: a training step does not fit into {format_bytes(self._budget)}"
            f" ({self._budget} bytes). The least that is possible with this model and batch is about"
            f" {format_bytes(least)} ({least} bytes), of which {format_bytes(self._fixed().total)} are parameters,"
            " gradients, optimizer state and buffers. Give a larger budget or a smaller batch, or let"
            " activation_offloading help ('host' on a GPU, 'disk')."
        )

    # -- larger batches ----------------------------------------------------------------------------------------

    def _follow_growth(self) -> None:
        if self._phase not in ("confirming", "settled") or self._last is None:
            return
        if self.agree is not None and self._steps % AGREEING_STEPS:
            return
        grown = self._agreed(self._outgrown)
        if grown <= 1.0:
            return
        self._outgrown, factor = 1.0, grown * HEADROOM
        timeline, ways = self._last
        self._costs = {site: costs.scaled(factor) for site, costs in self._costs.items()}
        timeline = timeline.scaled(factor, self._fixed().total)
        self._last = timeline, ways
        problem = self._problem(timeline, ways, self._costs)
        found = _solve(problem, round(self._budget * (1 - SLACK)))
        if found is None:
            found = {site: _leanest(costs) for site, costs in self._costs.items()}
            self.remarks.append(
                f"gradient_checkpointing: a batch {grown:.2f} times as large as any before may not fit into"
                f" {format_bytes(self._budget)}; every block now needs as little as it can."
            )
        found = self._agreed(found)
        self._predicted[_key(found)] = problem.peak(_by_call(problem, found))
        self._ways = found
        self.plan = self._described(problem, None)
        self._phase, self._times = "confirming", []

    # -- parts -------------------------------------------------------------------------------------------------

    def _note_arguments(self, call: Call, args: Any, kwargs: Any) -> None:
        """A mask that all blocks are given is not freed when one of them lets go of it."""
        for tensor in tensors_in((args, kwargs)):
            holders = self._holders.get(tensor)
            if holders is None:
                self._holders.set(tensor, [call])
            elif call not in holders:
                for holder in (*holders[:1], call) if len(holders) == 1 else (call,):
                    self._shared_bytes[holder] += tensor.untyped_storage().nbytes()
                holders.append(call)

    def _problem(self, timeline: Timeline, ways: Ways, costs: Mapping[str, BlockCosts]) -> Problem:
        chosen = {call: ways[call.site] for call in timeline.calls}

        def own(call: Call, cost: Cost) -> Cost:
            arguments = max(0, cost.argument_bytes - self._shared_bytes[call])
            return replace(cost, kept_bytes=cost.kept_bytes + arguments)

        by_call = {c: {way: own(c, cost) for way, cost in costs[c.site].ways.items()} for c in timeline.calls}
        return Problem.of(timeline, chosen, by_call)

    def _described(self, problem: Problem, measured: int | None) -> MemoryPlan:
        def ms(ways: Mapping[Call, Way]) -> float:
            leanest = {stage.call: _leanest(self._costs[stage.call.site]) for stage in problem.stages}
            return max(0.0, self._base_ms + problem.ms(ways) - problem.ms(leanest))

        chosen = _by_call(problem, self._ways)
        keeps = all("keep" in stage.ways for stage in problem.stages)
        kept: dict[Call, Way] = {stage.call: "keep" for stage in problem.stages}
        blocks = []
        for stage in problem.stages:
            costs = self._costs[stage.call.site]
            way = chosen[stage.call]
            plain = stage.ways.get("keep")
            block = BlockPlan(
                site=stage.call.site,
                call=str(stage.call),
                kind=type(self._blocks[stage.call.site]).__name__,
                way=way,
                kept_bytes=stage.ways[way].kept_bytes,
                plain_bytes=None if plain is None else plain.kept_bytes,
                extra_ms=None if plain is None else stage.ways[way].ms - plain.ms,
                saved_by_operator=costs.saved_by_operator,
            )
            blocks.append(block)
        return MemoryPlan(
            budget_bytes=self._budget,
            blocks=tuple(blocks),
            fixed=self._fixed(),
            offloading=self._offloading,
            offloads_rest=self.offloads_rest,
            plain_peak_bytes=problem.peak(kept) if keeps else None,
            plain_ms=ms(kept) if keeps else None,
            predicted_peak_bytes=self._predicted.get(_key(self._ways), problem.peak(chosen)),
            predicted_ms=ms(chosen),
            measured_peak_bytes=measured,
        )

    def _fixed(self) -> FixedMemory:
        return FixedMemory.of(self._model, self._optimizers.values())

    def _alive(self) -> list[Tensor]:
        parameters = list(self._model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        return [*parameters, *self._model.buffers(), *gradients, *state_of(self._optimizers.values())]

    def _agreed(self, value: Any) -> Any:
        return value if self.agree is None else self.agree(value)

    def _see_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        own = {id(parameter) for parameter in self._model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._optimizers[id(optimizer)] = optimizer
            self._has_stepped = True

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _wait_for_meter(self) -> None:
        reason, self._busy = self._busy, ""
        self._waited += 1
        if self._waited > MAX_WAITING_STEPS:
            self.gave_up = f"not planned, every block recomputes: the memory could not be measured, {reason}"
            self.remarks.append(f"gradient_checkpointing: {self.gave_up}")


def _key(ways: Ways) -> frozenset[tuple[str, Way]]:
    return frozenset(ways.items())


def _leanest(costs: BlockCosts) -> Way:
    """What a block does while nothing is planned."""
    return "full" if "full" in costs.ways else min(costs.ways, key=lambda way: costs.ways[way].kept_bytes)


def _smallest(costs: BlockCosts) -> Way:
    """What holds least from forward to backward, and of those the one that then needs least."""
    return min(costs.ways, key=lambda way: (costs.ways[way].kept_bytes >> 12, costs.ways[way].backward_bytes))


def _by_call(problem: Problem, ways: Ways) -> dict[Call, Way]:
    return {stage.call: ways[stage.call.site] for stage in problem.stages}


def _variants(problem: Problem) -> list[Problem]:
    """One problem for each way that sites called more than once a step may go: all calls of a site go the same."""
    shared = {stage.call.site for stage in problem.stages if stage.call.index}
    if not shared:
        return [problem]
    common = [w for w in WAYS if all(w in stage.ways for stage in problem.stages if stage.call.site in shared)]
    return [
        replace(
            problem,
            stages=[
                replace(stage, ways={way: stage.ways[way]}) if stage.call.site in shared else stage
                for stage in problem.stages
            ],
        )
        for way in common
    ]


def _solve(problem: Problem, budget: int) -> Ways | None:
    found = [answer for variant in _variants(problem) if (answer := variant.solve(budget)) is not None]
    if not found:
        return None
    return {call.site: way for call, way in min(found, key=problem.ms).items()}


def _least(problem: Problem) -> int:
    return min(variant.least() for variant in _variants(problem))
