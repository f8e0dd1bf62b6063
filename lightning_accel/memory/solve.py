"""The choice for each block that fits a budget at the least extra time: a knapsack with a limit at every moment.

What blocks keep adds up along the forward pass and is given back, last first, along the backward pass. So at any moment
the blocks that hold memory are the first few, and one number, what these keep together, decides whether a moment fits.
Dynamic programming over that number, block by block, is exact to its grain. Rotor plans chains likewise: Beaumont et
al., "Optimal checkpointing for heterogeneous chains" (2019), https://arxiv.org/abs/1911.13214.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_accel.memory.costs import Cost, Way
from lightning_accel.memory.timeline import Call, Timeline

GRAINS = 4096  # into which a budget is divided: what blocks keep is told apart to a grain
BISECTIONS = 24


@dataclass(frozen=True)
class Stage:
    """One call of a block, as the planner sees it. All in bytes.

    Attributes:
        ways: What each way costs.
        forward_base: The peak during its forward pass, without what blocks keep and without its own need.
        backward_base: Likewise for its backward pass; None: it has none.
        after: The peaks outside all blocks while exactly this call and those before it hold memory, likewise.
        starts_afresh: Nothing is held when it is called: the calls before have had their backward pass.
    """

    call: Call
    ways: Mapping[Way, Cost]
    forward_base: int
    backward_base: int | None
    after: int | None
    starts_afresh: bool = False


@dataclass(frozen=True)
class Problem:
    """A step to be fitted into a budget.

    Attributes:
        stages: The calls of blocks, in the order of their forward passes.
        floor: The peak where no block holds anything, in bytes: no choice lowers it.
    """

    stages: Sequence[Stage]
    floor: int

    @classmethod
    def of(cls, timeline: Timeline, chosen: Mapping[Call, Way], costs: Mapping[Call, Mapping[Way, Cost]]) -> Problem:
        """The problem behind a step that was metered while the blocks ran the ways that were ``chosen``."""

        def kept(calls: frozenset[Call]) -> int:
            return sum(costs[call][chosen[call]].kept_bytes for call in calls)

        order = {call: index for index, call in enumerate(timeline.calls)}
        floor = 0
        after: dict[int, int] = {}
        for held, peak in timeline.outside.items():
            base = peak - kept(held)
            if held:
                last = max(order[call] for call in held)
                after[last] = max(base, after.get(last, base))
            else:
                floor = max(floor, base)
        stages = []
        for index, call in enumerate(timeline.calls):
            peaks, own = timeline.peaks[call], costs[call][chosen[call]]
            forward = (peaks.forward or 0) - kept(peaks.held_at_forward) - own.forward_bytes
            backward = None
            if peaks.backward is not None:
                backward = peaks.backward - kept(peaks.held_at_backward) - own.kept_bytes - own.backward_bytes
            afresh = index > 0 and not peaks.held_at_forward
            stages.append(Stage(call, costs[call], forward, backward, after.get(index), afresh))
        return cls(stages, floor)

    def with_costs(self, costs: Mapping[Call, Mapping[Way, Cost]], factor: float, fixed_bytes: int) -> Problem:
        """The problem of a step with a batch ``factor`` times as large.

        Args:
            costs: What its calls cost, of which some may be new: they are taken to come last.
            factor: By how much grows what is there beside the calls' own needs.
            fixed_bytes: What does not grow with the batch.
        """

        def scale(base: int | None) -> int | None:
            return base if base is None or base < fixed_bytes else round(fixed_bytes + factor * (base - fixed_bytes))

        known = [
            replace(
                stage,
                ways=costs[stage.call],
                forward_base=scale(stage.forward_base) or 0,
                backward_base=scale(stage.backward_base),
                after=scale(stage.after),
            )
            for stage in self.stages
        ]
        last = known[-1]
        new = [replace(last, call=call, ways=costs[call]) for call in costs if call not in {s.call for s in known}]
        return Problem([*known, *new], scale(self.floor) or 0)

    def peak(self, choice: Mapping[Call, Way]) -> int:
        """The predicted peak of the step with these choices, in bytes."""
        peak, held = self.floor, 0
        for stage in self.stages:
            held = 0 if stage.starts_afresh else held
            cost = stage.ways[choice[stage.call]]
            peak = max(peak, held + _need(stage, cost))
            held += cost.kept_bytes
            if stage.after is not None:
                peak = max(peak, held + stage.after)
        return peak

    def ms(self, choice: Mapping[Call, Way]) -> float:
        """What all blocks take together with these choices, in milliseconds."""
        return sum(stage.ways[choice[stage.call]].ms for stage in self.stages)

    def least(self) -> int:
        """The smallest budget that there is a choice for, in bytes, to a grain."""
        leanest: dict[Call, Way] = {
            stage.call: min(stage.ways, key=lambda way: stage.ways[way].kept_bytes) for stage in self.stages
        }
        low, high = self.floor, self.peak(leanest)
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            low, high = (low, middle) if self.solve(middle) is not None else (middle, high)
        return high

    def solve(self, budget: int) -> dict[Call, Way] | None:
        """The choice within ``budget`` bytes that takes the least time; None when there is none."""
        if self.floor > budget:
            return None
        grain = max(1, budget // GRAINS)
        frontier = [_State(0.0, 0)]
        for stage in self.stages:
            if stage.starts_afresh:
                best = min(frontier, key=lambda state: state.ms)
                frontier = [_State(best.ms, 0, best)]
            grown: dict[int, _State] = {}
            for way, cost in stage.ways.items():
                need = _need(stage, cost)
                for state in frontier:
                    kept = state.kept_bytes + cost.kept_bytes
                    fits = state.kept_bytes + need <= budget and (stage.after is None or kept + stage.after <= budget)
                    place = kept // grain
                    ms = state.ms + cost.ms
                    if fits and (place not in grown or (ms, kept) < (grown[place].ms, grown[place].kept_bytes)):
                        grown[place] = _State(ms, kept, state, (stage.call, way))
            frontier = _undominated(grown)
            if not frontier:
                return None
        return min(frontier, key=lambda state: state.ms).choices()


@dataclass(frozen=True, slots=True)
class _State:
    """The best way to have come so far with so many bytes kept."""

    ms: float
    kept_bytes: int
    before: _State | None = None
    step: tuple[Call, Way] | None = field(default=None)

    def choices(self) -> dict[Call, Way]:
        found: dict[Call, Way] = {}
        state: _State | None = self
        while state is not None:
            if state.step is not None:
                found[state.step[0]] = state.step[1]
            state = state.before
        return dict(reversed(found.items()))


def _need(stage: Stage, cost: Cost) -> int:
    """The most that a stage needs, forward or backward, on top of what those before it keep."""
    forward = stage.forward_base + cost.forward_bytes
    if stage.backward_base is None:
        return forward
    return max(forward, stage.backward_base + cost.kept_bytes + cost.backward_bytes)


def _undominated(states: Mapping[int, _State]) -> list[_State]:
    """Of states that keep more bytes, only those that are faster for it."""
    kept: list[_State] = []
    for _, state in sorted(states.items()):
        if not kept or state.ms < kept[-1].ms:
            kept.append(state)
    return kept
