"""The policy for each block that fits a budget at the least extra time: a knapsack with a limit at every moment.

:class:`Rounds` has the answers metered and corrected until they fit.

What blocks keep adds up along the forward pass and is given back, last first, along the backward pass. So at any moment
the blocks that hold memory are the first few, and one number, what these keep together, decides whether a moment fits.
Dynamic programming over that number, block by block, is exact to its grain. Rotor plans chains likewise: Beaumont et
al., "Optimal checkpointing for heterogeneous chains" (2019), https://arxiv.org/abs/1911.13214.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_accel.memory.costs import POLICIES, BlockCost, BlockCosts, Policy
from lightning_accel.memory.meter import MemoryInterval
from lightning_accel.memory.recorder import BlockCall, Mark

GRAINS = 4096  # into which a budget is divided: what blocks keep is told apart to a grain
BISECTIONS = 24
SLACK = 0.01  # share left free, since steps differ a little
MAX_ROUNDS = 6

Policies = dict[str, Policy]
"""Site → the policy of its block."""

Choice = Mapping[BlockCall, Policy]
Costs = Mapping[BlockCall, Mapping[Policy, BlockCost]]


@dataclass(frozen=True)
class Stage:
    """One call of a block, as the planner sees it. All in bytes."""

    call: BlockCall
    by_policy: Mapping[Policy, BlockCost]
    forward_base: int  # the peak during its forward pass, without what blocks keep and without its own need
    backward_base: int | None  # likewise for its backward pass; None: it has none
    # The peak outside of all blocks after this call's forward pass and before the next one's, and again when its
    # backward pass is next, without what blocks keep. None if there was no such time.
    after: int | None
    starts_afresh: bool = False  # nothing is held when it is called: the calls before have had their backward pass

    def need(self, cost: BlockCost) -> int:
        """The most that it needs, forward or backward, on top of what those before it keep."""
        forward = self.forward_base + cost.forward_bytes
        if self.backward_base is None:
            return forward
        return max(forward, self.backward_base + cost.kept_bytes + cost.backward_bytes)


@dataclass(frozen=True)
class KnapsackProblem:
    """A step to be fitted into a budget."""

    stages: Sequence[Stage]  # in the order of their forward passes
    floor: int  # the peak where no block holds anything, in bytes: no choice lowers it

    @classmethod
    def of(
        cls, calls: Sequence[BlockCall], intervals: Sequence[MemoryInterval], chosen: Choice, costs: Costs
    ) -> KnapsackProblem:
        """The problem behind a step that was metered while the blocks followed the policies that were ``chosen``.

        What these need is taken off each peak. What is left is there whatever else is chosen.
        """
        own = {call: costs[call][chosen[call]] for call in calls}
        floor = 0
        forward, backward, after = dict.fromkeys(calls, 0), dict[BlockCall, int](), dict[BlockCall, int]()
        afresh: set[BlockCall] = set()
        running: BlockCall | None = None
        held: dict[BlockCall, None] = {}  # in the order of their forward passes
        returning: dict[BlockCall, None] = {}
        for interval in intervals:
            mark = interval.mark
            if isinstance(mark, Mark) and mark.call in own:
                if mark.event == "forward":
                    running = mark.call
                    if not held:
                        afresh.add(running)
                elif mark.event == "forward ended":
                    running, held[mark.call] = None, None
                elif mark.event == "backward":
                    returning[mark.call] = None
                else:
                    returning.pop(mark.call, None)
                    held.pop(mark.call, None)
            base = interval.peak_bytes - sum(own[call].kept_bytes for call in held)
            if running is not None:
                forward[running] = max(forward[running], base - own[running].forward_bytes)
            for call in returning:
                backward[call] = max(base - own[call].backward_bytes, backward.get(call, 0))
            if running is None and not returning and held:
                last = next(reversed(held))
                after[last] = max(base, after.get(last, base))
            elif running is None and not returning:
                floor = max(floor, base)
        stages = [
            Stage(call, costs[call], forward[call], backward.get(call), after.get(call), call in afresh and index > 0)
            for index, call in enumerate(calls)
        ]
        return cls(stages, floor)

    def with_costs(self, costs: Costs, factor: float, fixed_bytes: int) -> KnapsackProblem:
        """The problem of a step with a batch ``factor`` times as large, but for ``fixed_bytes``, which do not grow.

        Calls that are new in ``costs`` are taken to come last.
        """

        def scale(base: int) -> int:
            return base if base < fixed_bytes else round(fixed_bytes + factor * (base - fixed_bytes))

        stages = [
            replace(
                stage,
                by_policy=costs[stage.call],
                forward_base=scale(stage.forward_base),
                backward_base=None if stage.backward_base is None else scale(stage.backward_base),
                after=None if stage.after is None else scale(stage.after),
            )
            for stage in self.stages
        ]
        known = {stage.call for stage in stages}
        new = [replace(stages[-1], call=call, by_policy=costs[call]) for call in costs if call not in known]
        return KnapsackProblem([*stages, *new], scale(self.floor))

    def peak(self, choice: Choice) -> int:
        """The predicted peak of the step with this choice, in bytes."""
        peak, held = self.floor, 0
        for stage in self.stages:
            held = 0 if stage.starts_afresh else held
            cost = stage.by_policy[choice[stage.call]]
            peak = max(peak, held + stage.need(cost))
            held += cost.kept_bytes
            if stage.after is not None:
                peak = max(peak, held + stage.after)
        return peak

    def ms(self, choice: Choice) -> float:
        """What all blocks take together with this choice, in milliseconds."""
        return sum(stage.by_policy[choice[stage.call]].ms for stage in self.stages)

    def least(self) -> int:
        """The smallest budget that there is a choice for, in bytes, to a grain."""
        leanest: dict[BlockCall, Policy] = {
            stage.call: min(stage.by_policy, key=lambda policy: stage.by_policy[policy].kept_bytes)
            for stage in self.stages
        }
        low, high = self.floor, self.peak(leanest)
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            low, high = (low, middle) if self.solve(middle) is not None else (middle, high)
        return high

    def solve(self, budget: int) -> dict[BlockCall, Policy] | None:
        """The choice within ``budget`` bytes that takes the least time; None when there is none."""
        if self.floor > budget:
            return None
        if all(len(stage.by_policy) == 1 for stage in self.stages):
            only = {stage.call: next(iter(stage.by_policy)) for stage in self.stages}
            return only if self.peak(only) <= budget else None
        grain = max(1, budget // GRAINS)
        # The best ways to have come so far: those that keep more are faster, so that the last is the fastest.
        ms, kept = np.zeros(1), np.zeros(1, np.int64)
        found = []
        for stage in self.stages:
            if stage.starts_afresh:
                ms, kept = ms[-1:], np.zeros(1, np.int64)
            policies, costs = zip(*stage.by_policy.items(), strict=True)
            needs = np.array([[stage.need(cost)] for cost in costs])
            grown_ms = (ms + np.array([[cost.ms] for cost in costs])).reshape(-1)
            grown = (kept + np.array([[cost.kept_bytes] for cost in costs])).reshape(-1)
            fits = (kept + needs <= budget).reshape(-1)
            if stage.after is not None:
                fits &= grown + stage.after <= budget
            ways = np.flatnonzero(fits)
            ways = ways[np.lexsort((grown[ways], grown_ms[ways], grown[ways] // grain))]
            fastest = np.minimum.accumulate(grown_ms[ways])
            ways = ways[np.diff(fastest, prepend=np.inf) < 0]
            if not ways.size:
                return None
            policy, before = np.divmod(ways, len(ms))
            found.append((policies, policy, before - len(ms)))
            ms, kept = grown_ms[ways], grown[ways]
        chosen, way = [], -1
        for policies, policy, before in reversed(found):
            chosen.append(policies[policy[way]])
            way = before[way]
        return dict(zip((stage.call for stage in self.stages), reversed(chosen), strict=True))

    # -- one policy per site ---------------------------------------------------------------------------------------

    def by_call(self, policies: Policies) -> dict[BlockCall, Policy]:
        return {stage.call: policies[stage.call.site] for stage in self.stages}

    def solve_by_site(self, budget: int) -> Policies | None:
        """The fastest choice within ``budget`` bytes, with one policy per site; None if there is none."""
        found = [answer for variant in self.variants() if (answer := variant.solve(budget)) is not None]
        if not found:
            return None
        return {call.site: policy for call, policy in min(found, key=self.ms).items()}

    def variants(self) -> list[KnapsackProblem]:
        """The problem once for each choice for sites that are called more than once, each with one policy.

        Of those sites the first few have one policy and the rest another, which is the form of the best choice for
        equal blocks. All combinations would be too many.
        """
        shared = list(dict.fromkeys(stage.call.site for stage in self.stages if stage.call.index))
        stages = [stage for stage in self.stages if stage.call.site in shared]
        common = [policy for policy in POLICIES if all(policy in stage.by_policy for stage in stages)]
        choices = {
            (*[first] * count, *[rest] * (len(shared) - count))
            for first in common
            for rest in common
            for count in range(len(shared) + 1)
        }
        return [self._restricted(dict(zip(shared, choice, strict=True))) for choice in sorted(choices)]

    def _restricted(self, policies: Policies) -> KnapsackProblem:
        stages = []
        for stage in self.stages:
            policy = policies.get(stage.call.site)
            stages.append(stage if policy is None else replace(stage, by_policy={policy: stage.by_policy[policy]}))
        return replace(self, stages=stages)


@dataclass(frozen=True)
class Proposal:
    """The policies to run next."""

    policies: Policies
    is_final: bool  # whether this is the answer, measured to fit
    least_bytes: int | None = None  # if none was found: the least budget with an answer


class Rounds:
    """Searches for the fastest policies whose measured peak keeps to a budget."""

    def __init__(self, budget_bytes: int, *, may_offload: bool) -> None:
        self.measured_bytes: dict[frozenset[tuple[str, Policy]], int] = {}  # policies → measured peak
        self.predicted_bytes: dict[frozenset[tuple[str, Policy]], int] = {}  # policies → predicted peak
        self.offloads_rest = False  # whether tensors saved outside of blocks are offloaded too
        self._budget = budget_bytes
        self._may_offload = may_offload

    def next(
        self, problem: KnapsackProblem, policies: Policies, peak_bytes: int, costs: Mapping[str, BlockCosts]
    ) -> Proposal:
        """Returns what to run next, after a step with ``policies`` was metered and gave ``problem``."""
        # A step before the first call of a block says nothing of steps with this block.
        kept = {key: peak for key, peak in self.measured_bytes.items() if dict(key).keys() == policies.keys()}
        self.measured_bytes = {**kept, frozenset(policies.items()): peak_bytes}
        target = self._budget * (1 - SLACK)
        while True:
            answer = problem.solve_by_site(round(target))
            found = None if answer is None else {**policies, **answer}
            rounds_left = MAX_ROUNDS - len(self.measured_bytes)
            if found is not None and rounds_left > 0 and (key := frozenset(found.items())) not in self.measured_bytes:
                self.predicted_bytes[key] = problem.peak(problem.by_call(found))
                return Proposal(found, is_final=False)
            fitting = [dict(key) for key, peak in self.measured_bytes.items() if peak <= self._budget]
            if fitting:
                fastest = min(fitting, key=lambda each: problem.ms(problem.by_call(each)))
                return Proposal(fastest, is_final=True)
            if self._may_offload and not self.offloads_rest:
                self.offloads_rest = True
                self.measured_bytes.clear()  # none of them fitted
                smallest = {site: of_block.smallest for site, of_block in costs.items()}
                return Proposal(smallest, is_final=False)
            if found is None or rounds_left <= 0:
                least = min(*(variant.least() for variant in problem.variants()), *self.measured_bytes.values())
                return Proposal(policies, is_final=True, least_bytes=least)
            target *= 1 - SLACK  # predicted to fit, but measured above the budget
