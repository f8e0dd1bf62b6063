"""Who plans a memory budget: the planner's own dynamic programming, or `scipy.optimize.milp` (HiGHS).

    pip install scipy
    python benchmarks/budget_solvers.py [--json docs/results]

The problems are those that the planner makes of the networks of `memory_budget.py`, metered as they train, and of the
transformer's blocks four times over. Both are asked for the fastest policies within 60% and 30% of the way from the
least that fits to what is needed with nothing recomputed. Takes two minutes.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from _measure import publish
from memory_budget import TASKS, Run

from lightning_accel.claims.measure import interleaved_ms
from lightning_accel.memory.costs import Policy
from lightning_accel.memory.knapsack import KnapsackProblem
from lightning_accel.memory.recorder import BlockCall

SHARES = (0.6, 0.3)
ROUNDS = 3


def solve_by_milp(problem: KnapsackProblem, budget: int) -> dict[BlockCall, Policy] | None:
    """What `KnapsackProblem.solve` answers, as a program of a variable for each policy of each block."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    ways = [(stage, policy, cost) for stage in problem.stages for policy, cost in stage.by_policy.items()]
    kept = np.array([cost.kept_bytes for _, _, cost in ways]) / budget
    needs = np.array([stage.need(cost) for stage, _, cost in ways]) / budget
    held = np.zeros(len(ways))
    moments, room, choices = [held], [1 - problem.floor / budget], []
    for stage in problem.stages:
        own = np.array([other is stage for other, _, _ in ways])
        choices.append(own)
        held = held * (not stage.starts_afresh)
        moments.append(held + own * needs)
        held = held + own * kept
        moments.append(held)
        room += [1.0, np.inf if stage.after is None else 1 - stage.after / budget]
    found = milp(
        [cost.ms for _, _, cost in ways],
        integrality=1,
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(np.array(moments), ub=room), LinearConstraint(np.array(choices), 1, 1)],
        options={"mip_rel_gap": 0},
    )
    if found.x is None:
        return None
    return {stage.call: policy for (stage, policy, _), is_chosen in zip(ways, found.x > 0.5, strict=True) if is_chosen}


def metered(name: str) -> KnapsackProblem:
    """The problem that the planner makes of a network in training."""
    plain = Run(TASKS[name])
    fixed = plain.fixed_bytes()
    made: list[KnapsackProblem] = []
    make = KnapsackProblem.of

    def noted(*args: object) -> KnapsackProblem:
        made.append(make(*args))  # type: ignore[arg-type]
        return made[-1]

    with patch.object(KnapsackProblem, "of", noted):
        Run(TASKS[name], round(fixed + 0.6 * (plain.peak_bytes() - fixed)))
    return made[-1]


def deeper(problem: KnapsackProblem, times: int) -> KnapsackProblem:
    """Its blocks so many times over."""
    stages = [
        replace(stage, call=BlockCall(f"{turn}.{stage.call.site}", stage.call.index))
        for turn in range(times)
        for stage in problem.stages
    ]
    return KnapsackProblem(stages, problem.floor)


def row(name: str, problem: KnapsackProblem, share: float) -> list[str]:
    least = problem.least()
    plain = problem.peak({stage.call: "keep" for stage in problem.stages})
    budget = round(least + share * (plain - least))
    ours, theirs = problem.solve(budget), solve_by_milp(problem, budget)
    assert ours is not None
    assert theirs is not None
    spent = interleaved_ms(
        {"ours": lambda: problem.solve(budget), "milp": lambda: solve_by_milp(problem, budget)}, rounds=ROUNDS
    )
    return [
        name,
        str(len(problem.stages)),
        f"{share:.0%}",
        f"{statistics.median(spent['ours']):.1f}",
        f"{statistics.median(spent['milp']):.0f}",
        f"{100 * (problem.ms(ours) / problem.ms(theirs) - 1):+.3f}%",
    ]


def main() -> None:
    began = time.perf_counter()
    import scipy.optimize  # noqa: F401

    import_s = time.perf_counter() - began
    problems = {name: metered(name) for name in TASKS}
    problems["the transformer's blocks, four times"] = deeper(next(iter(problems.values())), 4)
    publish(
        "budget_solvers",
        "python benchmarks/budget_solvers.py",
        ["network", "blocks", "budget", "own, ms", "milp, ms", "the plan's step, own to milp's"],
        [row(name, problem, share) for name, problem in problems.items() for share in SHARES],
        {"import_scipy_optimize_s": round(import_s, 2)},
    )
    print(f"  importing scipy.optimize took {import_s:.1f} s")


if __name__ == "__main__":
    main()
