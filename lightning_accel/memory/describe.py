"""Puts a solved problem into words and numbers: the plan for the report, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.memory.costs import WAYS, BlockCosts, Cost, Way
from lightning_accel.memory.memory_plan import BlockPlan, FixedMemory, MemoryPlan
from lightning_accel.memory.rounds import leanest
from lightning_accel.memory.solve import Problem, Stage
from lightning_accel.memory.timeline import Call

if TYPE_CHECKING:
    from lightning_accel.techniques.activation_offloading import OffloadingPlan


def own_costs(ways: Mapping[Way, Cost], shared_bytes: int) -> dict[Way, Cost]:
    """The costs of one call, with those of its arguments in what it keeps that no other call holds.

    Args:
        ways: What each way costs.
        shared_bytes: Of its arguments, what other calls hold too.
    """

    def own(way: Way, cost: Cost) -> Cost:
        arguments = max(0, cost.argument_bytes - shared_bytes)
        kept = replace(cost, kept_bytes=cost.kept_bytes + arguments)
        if not torch.are_deterministic_algorithms_enabled():
            return kept
        # A time that no clock has a part in: the more a way does, and the more there is to do.
        return replace(kept, ms=WAYS.index(way) * ways.get("keep", cost).kept_bytes / 2**20)

    return {way: own(way, cost) for way, cost in ways.items()}


def describe(
    problem: Problem,
    chosen: Mapping[Call, Way],
    costs: Mapping[str, BlockCosts],
    *,
    kinds: Mapping[str, str],
    base_ms: float,
    budget_bytes: int,
    fixed: FixedMemory,
    offloading: OffloadingPlan,
    offloads_rest: bool,
) -> MemoryPlan:
    """The plan in which each call goes the way chosen for it, and what it is predicted to need.

    Args:
        problem: What was solved.
        chosen: Call → what its block does.
        costs: Site → what each way was measured to cost the block there.
        kinds: Site → the block's class.
        base_ms: The time of a step in which every block goes its leanest way.
        budget_bytes: The budget.
        fixed: What the step holds in any case.
        offloading: Where blocks that offload do so.
        offloads_rest: Whether what is saved outside all blocks is offloaded too.
    """
    calls = [stage.call for stage in problem.stages]

    def ms(ways: Mapping[Call, Way]) -> float:
        # By the clock, though in a deterministic run it decides nothing.
        leanest_ways = {call: leanest(costs[call.site]) for call in calls}
        spent = [sum(costs[call.site].ways[way].ms for call, way in each.items()) for each in (ways, leanest_ways)]
        return max(0.0, base_ms + spent[0] - spent[1])

    kept: dict[Call, Way] = dict.fromkeys(calls, "keep")
    is_plain_known = all("keep" in stage.ways for stage in problem.stages)
    return MemoryPlan(
        budget_bytes=budget_bytes,
        blocks=tuple(
            _block(stage, chosen[stage.call], costs[stage.call.site], kinds[stage.call.site])
            for stage in problem.stages
        ),
        fixed=fixed,
        offloading=offloading,
        offloads_rest=offloads_rest,
        plain_peak_bytes=problem.peak(kept) if is_plain_known else None,
        plain_ms=ms(kept) if is_plain_known else None,
        predicted_peak_bytes=problem.peak(chosen),
        predicted_ms=ms(chosen),
    )


def _block(stage: Stage, way: Way, costs: BlockCosts, kind: str) -> BlockPlan:
    plain = stage.ways.get("keep")
    return BlockPlan(
        site=stage.call.site,
        call=str(stage.call),
        kind=kind,
        way=way,
        kept_bytes=stage.ways[way].kept_bytes,
        plain_bytes=None if plain is None else plain.kept_bytes,
        extra_ms=None if plain is None else costs.ways[way].ms - costs.ways["keep"].ms,
        saved_by_operator=costs.saved_by_operator,
    )


def impossible(budget_bytes: int, least_bytes: int, fixed_bytes: int) -> str:
    """Why a step cannot be made to fit, and what to do.

    Args:
        budget_bytes: The budget.
        least_bytes: The least that there is a plan for.
        fixed_bytes: What of it a step holds whatever its blocks do.
    """
    return (
        f"gradient_checkpointing={{'budget': …}}: a training step does not fit into {format_bytes(budget_bytes)}"
        f" ({budget_bytes} bytes). The least that is possible with this model and batch is about"
        f" {format_bytes(least_bytes)} ({least_bytes} bytes), of which {format_bytes(fixed_bytes)} are parameters,"
        " gradients, optimizer state and buffers. Give a larger budget or a smaller batch, or let"
        " activation_offloading help ('host' on a GPU, 'disk')."
    )
