"""Rounds of planning: policies are proposed, metered and corrected until they fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_accel.memory.costs import POLICIES, BlockCosts, Policy
from lightning_accel.memory.knapsack import KnapsackProblem
from lightning_accel.memory.recorder import BlockCall

SLACK = 0.01  # share left free, since steps differ a little
MAX_ROUNDS = 6

Policies = dict[str, Policy]
"""Site → the policy of its block."""


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
        self.measured_bytes[frozenset(policies.items())] = peak_bytes
        target = self._budget * (1 - SLACK)
        while True:
            answer = solve(problem, round(target))
            found = None if answer is None else {**policies, **answer}
            rounds_left = MAX_ROUNDS - len(self.measured_bytes)
            if found is not None and rounds_left > 0 and (key := frozenset(found.items())) not in self.measured_bytes:
                self.predicted_bytes[key] = problem.peak(by_call(problem, found))
                return Proposal(found, is_final=False)
            fitting = [dict(key) for key, peak in self.measured_bytes.items() if peak <= self._budget]
            if fitting:
                fastest = min(fitting, key=lambda each: problem.ms(by_call(problem, each)))
                return Proposal(fastest, is_final=True)
            if self._may_offload and not self.offloads_rest:
                self.offloads_rest = True
                self.measured_bytes.clear()  # none of them fitted
                smallest = {site: _smallest(of_block) for site, of_block in costs.items()}
                return Proposal(smallest, is_final=False)
            if found is None or rounds_left <= 0:
                least = min(*(variant.least() for variant in _variants(problem)), *self.measured_bytes.values())
                return Proposal(policies, is_final=True, least_bytes=least)
            target *= 1 - SLACK  # predicted to fit, but measured above the budget


def solve(problem: KnapsackProblem, budget: int) -> Policies | None:
    """Returns the fastest choice within ``budget`` bytes, with one policy per site; None if there is none."""
    found = [answer for variant in _variants(problem) if (answer := variant.solve(budget)) is not None]
    if not found:
        return None
    return {call.site: policy for call, policy in min(found, key=problem.ms).items()}


def leanest(costs: BlockCosts) -> Policy:
    """Returns the policy of a block without a plan."""
    return "full" if "full" in costs.by_policy else _smallest(costs)


def by_call(problem: KnapsackProblem, policies: Policies) -> dict[BlockCall, Policy]:
    return {stage.call: policies[stage.call.site] for stage in problem.stages}


def _smallest(costs: BlockCosts) -> Policy:
    """Returns the policy that keeps the fewest bytes, to a page, and among equals needs the least in backward."""
    found = costs.by_policy
    return min(found, key=lambda policy: (found[policy].kept_bytes >> 12, found[policy].backward_bytes))


def _variants(problem: KnapsackProblem) -> list[KnapsackProblem]:
    """Returns the problem once for each choice for sites that are called more than once, each with one policy.

    Of those sites the first few have one policy and the rest another, which is the form of the best choice for equal
    blocks. All combinations would be too many.
    """
    shared = list(dict.fromkeys(stage.call.site for stage in problem.stages if stage.call.index))
    stages = [stage for stage in problem.stages if stage.call.site in shared]
    common = [policy for policy in POLICIES if all(policy in stage.by_policy for stage in stages)]
    choices = {
        (*[first] * count, *[rest] * (len(shared) - count))
        for first in common
        for rest in common
        for count in range(len(shared) + 1)
    }
    return [_restricted(problem, dict(zip(shared, choice, strict=True))) for choice in sorted(choices)]


def _restricted(problem: KnapsackProblem, policies: Policies) -> KnapsackProblem:
    stages = []
    for stage in problem.stages:
        policy = policies.get(stage.call.site)
        stages.append(stage if policy is None else replace(stage, by_policy={policy: stage.by_policy[policy]}))
    return replace(problem, stages=stages)
