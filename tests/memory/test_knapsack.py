"""The planner's answer is the best there is: held against every choice there is, one by one."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_accel.memory.costs import BlockCost, Policy
from lightning_accel.memory.knapsack import KnapsackProblem, Stage
from lightning_accel.memory.meter import MemoryInterval
from lightning_accel.memory.recorder import BlockCall, Mark

A, B, C = (BlockCall(site) for site in "abc")


def cost(kept: int, ms: float, forward: int = 0, backward: int = 0) -> BlockCost:
    return BlockCost(kept_bytes=kept, argument_bytes=0, forward_bytes=forward, backward_bytes=backward, ms=ms)


def stage(
    name: str, by_policy: dict[Policy, BlockCost], *, forward: int = 0, backward: int = 0, after: int = 0
) -> Stage:
    return Stage(BlockCall(name), by_policy, forward_base=forward, backward_base=backward, after=after)


def alike(count: int) -> list[Stage]:
    """Blocks that keep 100 bytes, or recompute in 10 ms more for which they need 100 bytes a moment."""
    by_policy: dict[Policy, BlockCost] = {"keep": cost(100, 20.0), "full": cost(0, 30.0, backward=100)}
    return [stage(f"blocks.{index}", by_policy) for index in range(count)]


def chosen(problem: KnapsackProblem, budget: int) -> list[Policy]:
    answer = problem.solve(budget)
    assert answer is not None
    return [answer[stage.call] for stage in problem.stages]


def test_what_fits_is_left_alone() -> None:
    assert chosen(KnapsackProblem(alike(3), floor=0), 300) == ["keep"] * 3


def test_the_first_blocks_recompute_for_when_their_turn_comes_the_last_ones_have_let_go() -> None:
    assert chosen(KnapsackProblem(alike(4), floor=0), 200) == ["full", "full", "keep", "keep"]


def test_recomputation_needs_room_too() -> None:
    assert chosen(KnapsackProblem(alike(3), floor=0), 100) == ["full", "full", "keep"]
    assert KnapsackProblem(alike(3), floor=0).solve(99) is None


def test_what_no_choice_lowers_is_the_least() -> None:
    problem = KnapsackProblem(alike(3), floor=250)
    assert problem.solve(249) is None
    assert problem.least() == 250


def test_the_least_is_the_smallest_budget_with_an_answer() -> None:
    problem = KnapsackProblem(alike(3), floor=10)
    assert problem.least() == 100
    assert problem.solve(problem.least()) is not None


def test_of_two_blocks_the_one_with_more_bytes_a_millisecond_recomputes() -> None:
    large: dict[Policy, BlockCost] = {"keep": cost(500, 1.0), "full": cost(0, 2.0)}
    dear: dict[Policy, BlockCost] = {"keep": cost(500, 1.0), "full": cost(0, 9.0)}
    assert chosen(KnapsackProblem([stage("large", large), stage("dear", dear)], floor=0), 500) == ["full", "keep"]


def test_the_answer_is_no_greedy_one() -> None:
    """By bytes a millisecond the first would go first, and then the others too: 4 ms. The last two alone do, in 3."""
    first: dict[Policy, BlockCost] = {"keep": cost(50, 0.0), "full": cost(0, 1.0)}
    others: dict[Policy, BlockCost] = {"keep": cost(60, 0.0), "full": cost(0, 1.5)}
    problem = KnapsackProblem([stage("first", first), stage("second", others), stage("third", others)], floor=0)
    assert chosen(problem, 50) == ["keep", "full", "full"]


def test_a_second_pass_through_the_blocks_starts_with_nothing_held() -> None:
    """As in a GAN: both passes may keep what one alone could."""
    again = [
        Stage(BlockCall(s.call.site, 1), s.by_policy, 0, 0, 0, starts_afresh=not i) for i, s in enumerate(alike(2))
    ]
    assert chosen(KnapsackProblem([*alike(2), *again], floor=0), 200) == ["keep"] * 4


by_policy = st.fixed_dictionaries(
    {"keep": st.builds(cost, st.integers(0, 50), st.just(0.0), st.integers(0, 20), st.integers(0, 20))},
    optional={
        policy: st.builds(
            cost, st.integers(0, 30), st.integers(1, 9).map(float), st.integers(0, 20), st.integers(0, 60)
        )
        for policy in ("selective", "full", "offload")
    },
)
stages = st.lists(
    st.builds(
        Stage,
        call=st.just(A),
        by_policy=by_policy,
        forward_base=st.integers(0, 30),
        backward_base=st.one_of(st.none(), st.integers(0, 30)),
        after=st.one_of(st.none(), st.integers(0, 30)),
        starts_afresh=st.booleans(),
    ),
    min_size=1,
    max_size=5,
).map(
    lambda found: [
        replace(stage, call=BlockCall(str(index)), starts_afresh=stage.starts_afresh and index > 0)
        for index, stage in enumerate(found)
    ]
)


def every_choice(found: Sequence[Stage]) -> list[dict[BlockCall, Policy]]:
    return [
        dict(zip((s.call for s in found), choice, strict=True))
        for choice in itertools.product(*(s.by_policy for s in found))
    ]


@pytest.mark.medium
@settings(max_examples=300, deadline=None)
@given(stages, st.integers(0, 40), st.integers(0, 300))
def test_no_choice_within_the_budget_is_faster(found: list[Stage], floor: int, budget: int) -> None:
    problem = KnapsackProblem(found, floor)
    fitting = [choice for choice in every_choice(found) if problem.peak(choice) <= budget]
    answer = problem.solve(budget)
    assert (answer is None) == (not fitting)
    if answer is not None:
        assert problem.peak(answer) <= budget
        assert problem.ms(answer) == min(problem.ms(choice) for choice in fitting)


@pytest.mark.parametrize("seed", range(4))
def test_a_general_solver_finds_nothing_faster_where_choices_are_too_many_to_try(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    rng = random.Random(seed)

    def unlike(index: int) -> Stage:
        kept, ms = rng.randint(10_000, 90_000), rng.uniform(1, 9)
        by_policy: dict[Policy, BlockCost] = {
            "keep": cost(kept, ms, kept // 4, kept // 4),
            "full": cost(kept // 12, rng.uniform(1.2, 1.5) * ms, kept, kept),
            "offload": cost(kept // 50, rng.uniform(1.1, 2.0) * ms, kept, kept),
        }
        found = stage(str(index), by_policy, forward=rng.randint(0, 9_000), after=rng.randint(0, 30_000))
        return replace(found, starts_afresh=index == 12 and seed % 2 == 1)

    problem = KnapsackProblem([unlike(index) for index in range(16)], floor=1000)
    least, plain = problem.least(), problem.peak({stage.call: "keep" for stage in problem.stages})
    budget = (2 * least + plain) // 3
    theirs = importlib.import_module("budget_solvers").solve_by_milp(problem, budget)
    answer = problem.solve(budget)
    assert answer is not None
    assert problem.peak(answer) <= budget
    assert problem.ms(answer) == pytest.approx(problem.ms(theirs), rel=1e-3)


# -- from a metered step -------------------------------------------------------------------------------------------

STEP = [
    MemoryInterval("start", level_bytes=1000, peak_bytes=1005),
    MemoryInterval(Mark("forward", A), level_bytes=1000, peak_bytes=1110),
    MemoryInterval(Mark("forward ended", A), level_bytes=1050, peak_bytes=1150),
    MemoryInterval(Mark("forward", B), level_bytes=1050, peak_bytes=1210),
    MemoryInterval(Mark("forward ended", B), level_bytes=1100, peak_bytes=1250),
    MemoryInterval(Mark("backward", B), level_bytes=1100, peak_bytes=1700),
    MemoryInterval(Mark("backward ended", B), level_bytes=1050, peak_bytes=1100),
    MemoryInterval(Mark("backward", A), level_bytes=1050, peak_bytes=1320),
    MemoryInterval(Mark("backward ended", A), level_bytes=1000, peak_bytes=1005),
]
COSTS: dict[BlockCall, dict[Policy, BlockCost]] = {
    call: {"full": cost(50, 3.0, forward=80, backward=200), "keep": cost(150, 2.0, forward=160, backward=60)}
    for call in (A, B)
}


def test_a_metered_step_is_predicted_to_be_what_it_was() -> None:
    chosen: dict[BlockCall, Policy] = {A: "full", B: "full"}
    assert KnapsackProblem.of([A, B], STEP, chosen, COSTS).peak(chosen) == 1700


def test_another_choice_is_predicted_by_what_it_changes() -> None:
    problem = KnapsackProblem.of([A, B], STEP, {A: "full", B: "full"}, COSTS)
    # While b runs backward a holds 100 more; b itself holds 100 more and needs 140 less.
    assert problem.peak({A: "keep", B: "keep"}) == 1700 + 100 + 100 - 140
    assert problem.ms({A: "keep", B: "full"}) == 5.0


def test_the_peak_outside_all_blocks_while_nothing_is_held_is_a_floor() -> None:
    assert KnapsackProblem.of([A, B], STEP, {A: "full", B: "full"}, COSTS).floor == 1005


@pytest.mark.parametrize("count", [200])
def test_many_equal_blocks_are_planned_in_a_moment(count: int) -> None:
    """Equal states merge: two hundred blocks with two ways each have 2^200 choices and 200 states."""
    answer = chosen(KnapsackProblem(alike(count), floor=0), 100 * count // 2)
    assert answer.count("keep") == count // 2
