"""Rounds of planning: a plan is proposed, metered, and mended by what the meter showed, until one holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_accel.memory.costs import WAYS, BlockCosts, Way
from lightning_accel.memory.solve import Problem
from lightning_accel.memory.timeline import Call

SLACK = 0.01  # left free: no two steps allocate quite the same
MAX_ROUNDS = 6

Ways = dict[str, Way]
_Key = frozenset[tuple[str, Way]]


@dataclass(frozen=True)
class Proposal:
    """What to run next: site → way.

    Attributes:
        ways: What each block does.
        is_final: Whether that is the plan, measured to fit.
        offloads_rest: Whether what is saved outside all blocks is to be offloaded too.
        least_bytes: The least budget there is a plan for, where none was found; then the rest says nothing.
    """

    ways: Ways
    is_final: bool
    offloads_rest: bool = False
    least_bytes: int | None = None


class Rounds:
    """The search for a plan that is measured to keep to a budget, and of those the fastest.

    Args:
        budget_bytes: The budget.
        may_offload: Whether there is somewhere to offload to.
    """

    def __init__(self, budget_bytes: int, *, may_offload: bool) -> None:
        self._budget = budget_bytes
        self._may_offload_rest = may_offload
        self._offloads_rest = False
        self._measured: dict[_Key, int] = {}
        self._predicted: dict[_Key, int] = {}

    def next(self, problem: Problem, ways: Ways, peak_bytes: int, costs: Mapping[str, BlockCosts]) -> Proposal:
        """What to run next, now that ``ways`` were metered.

        Args:
            problem: As the metered step showed it.
            ways: What the blocks did in it, those included that were not called.
            peak_bytes: Its peak.
            costs: Site → what each way costs the block there.
        """
        self._measured[_key(ways)] = peak_bytes
        target = self._budget * (1 - SLACK)
        while True:
            answer = solve(problem, round(target))
            found = None if answer is None else {**ways, **answer}
            rounds_left = MAX_ROUNDS - len(self._measured)
            if found is not None and _key(found) not in self._measured and rounds_left > 0:
                self._predicted[_key(found)] = problem.peak(by_call(problem, found))
                return Proposal(found, is_final=False, offloads_rest=self._offloads_rest)
            fitting = [dict(key) for key, peak in self._measured.items() if peak <= self._budget]
            if fitting:
                fastest = min(fitting, key=lambda each: problem.ms(by_call(problem, each)))
                return Proposal(fastest, is_final=True, offloads_rest=self._offloads_rest)
            if self._may_offload_rest:
                self._may_offload_rest, self._offloads_rest = False, True
                self._measured.clear()  # none of it fitted
                smallest = {site: _smallest(of_block) for site, of_block in costs.items()}
                return Proposal(smallest, is_final=False, offloads_rest=True)
            if found is None or rounds_left <= 0:
                least = min(_least(problem), *self._measured.values())
                return Proposal(ways, is_final=True, offloads_rest=self._offloads_rest, least_bytes=least)
            target *= 1 - SLACK  # predicted to fit, and measured not to

    def measured_bytes(self, ways: Ways) -> int | None:
        return self._measured.get(_key(ways))

    def predicted_bytes(self, ways: Ways) -> int | None:
        """The peak that was predicted for ``ways`` before they ran; None for those that nobody proposed."""
        return self._predicted.get(_key(ways))


def solve(problem: Problem, budget: int) -> Ways | None:
    """The fastest choice within ``budget`` bytes, a site's calls all going the same way; None when there is none."""
    found = [answer for variant in _variants(problem) if (answer := variant.solve(budget)) is not None]
    if not found:
        return None
    return {call.site: way for call, way in min(found, key=problem.ms).items()}


def leanest(costs: BlockCosts) -> Way:
    """What a block does while nothing is planned."""
    return "full" if "full" in costs.ways else _smallest(costs)


def by_call(problem: Problem, ways: Ways) -> dict[Call, Way]:
    return {stage.call: ways[stage.call.site] for stage in problem.stages}


def _key(ways: Ways) -> _Key:
    return frozenset(ways.items())


def _smallest(costs: BlockCosts) -> Way:
    """What holds least from forward to backward, to a page, and of those the one that needs least then."""
    return min(costs.ways, key=lambda way: (costs.ways[way].kept_bytes >> 12, costs.ways[way].backward_bytes))


def _variants(problem: Problem) -> list[Problem]:
    """The problem, once for each way that sites called more than once a step may go, for all calls of a site go alike.

    Of those sites the first few go one way and the rest another, which is what the best choice comes to for equal
    blocks; all there is to choose would be too many.
    """
    shared = list(dict.fromkeys(stage.call.site for stage in problem.stages if stage.call.index))
    if not shared:
        return [problem]
    common = [w for w in WAYS if all(w in stage.ways for stage in problem.stages if stage.call.site in shared)]
    choices = {
        tuple([first] * count + [rest] * (len(shared) - count))
        for first in common
        for rest in common
        for count in range(len(shared) + 1)
    }
    return [_restricted(problem, dict(zip(shared, choice, strict=True))) for choice in sorted(choices)]


def _restricted(problem: Problem, ways: Ways) -> Problem:
    stages = [
        replace(stage, ways={ways[stage.call.site]: stage.ways[ways[stage.call.site]]})
        if stage.call.site in ways
        else stage
        for stage in problem.stages
    ]
    return replace(problem, stages=stages)


def _least(problem: Problem) -> int:
    return min(variant.least() for variant in _variants(problem))
