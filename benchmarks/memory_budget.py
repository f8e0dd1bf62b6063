"""Memory budgets, planned and kept: a 24-block transformer, a ResNet-50 in shape, a U-Net, in float32.

    python benchmarks/memory_budget.py [--json docs/results]

To answer: with budgets of 80, 60, 40 and 25% of the plain activations (the peak of a plain step less parameters,
gradients, optimizer state and buffers) on top of what is fixed, the peak is at most 5% under the budget and never
over it; and on ten blocks a step takes within 5% of the best that trying every choice finds. Blocks may offload to
disk, since a CPU has nowhere else. Peaks are those of the profiler's memory events, which the planner does not use.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from _measure import publish
from _networks import resnet_task, transformer_task, unet_task
from torch import Tensor, nn

from lightning_accel import MemorySchedule, Plan, accelerate
from lightning_accel.claims.measure import interleaved_ms, median_ratio, peak_step_bytes
from lightning_accel.core.optimizers import state_of
from lightning_accel.core.tree import unique_bytes
from lightning_accel.memory.schedule import FixedMemory

SHARES = (0.8, 0.6, 0.4, 0.25)
TASKS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]] = {
    "transformer, 24 blocks": transformer_task,
    "ResNet-50 in shape": lambda: resnet_task(size=128),
    "U-Net": lambda: unet_task(batch=4, size=128),
}
PLAIN: dict[str, Any] = {
    "precision": "32-true",
    "flash_attention": "off",
    "memory_format": "off",
    "inplace_activations": False,
}
MAX_STEPS = 40


class Run:
    """A model in training; ``budget`` in bytes plans it."""

    def __init__(
        self, task: Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]], budget: int = 0, disk: bool = True
    ) -> None:
        self.model, self.loss_of = task()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        settings: dict[str, Any] = {}
        if budget:
            settings["memory_budget"] = budget
            settings["activation_offloading"] = {"to": "disk", "min_bytes": "16KiB"} if disk else "off"
        self.handle = accelerate(self.model, Plan().replace(**PLAIN, **settings))
        steps = range(MAX_STEPS if budget else 3)
        next((None for _ in steps if self.step() and budget and self.is_settled), None)

    def step(self) -> bool:
        with self.handle.step():
            loss = self.loss_of(self.model)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    @property
    def is_settled(self) -> bool:
        plan = self.handle.memory_schedule
        return plan is not None and plan.measured_ms is not None

    @property
    def plan(self) -> MemorySchedule:
        plan = self.handle.memory_schedule
        assert plan is not None
        return plan

    def fixed_bytes(self) -> int:
        return FixedMemory.of(self.model, [self.optimizer]).total

    def peak_bytes(self) -> int:
        """The peak of a step that starts without gradients, everything included."""
        alive = [*self.model.parameters(), *self.model.buffers(), *state_of([self.optimizer])]
        return unique_bytes(alive) + peak_step_bytes(self.step)


def keeps_budgets(name: str) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """The rows of one network."""
    plain = Run(TASKS[name])
    fixed, plain_peak = plain.fixed_bytes(), plain.peak_bytes()
    rows, details = [], []
    for share in SHARES:
        budget = round(fixed + share * (plain_peak - fixed))
        asked = f"{share:.0%}: {budget / 2**20:.0f} of {plain_peak / 2**20:.0f} MiB"
        try:
            run = Run(TASKS[name], budget)
        except ValueError as error:
            least = int(str(error).split("about")[1].split("(")[1].split()[0])
            of_plain = [size / (plain_peak - fixed) for size in (least - fixed, first_convolution_bytes(plain))]
            why = f"of which one convolution's backward pass takes {of_plain[1]:.0%}"
            rows.append([name, asked, "does not fit", f"least: {of_plain[0]:.0%}", "", why])
            details.append({"share": share, "budget": budget, "least": least, "fixed": fixed, "plain": plain_peak})
            continue
        peak = run.peak_bytes()
        spent = interleaved_ms({"plain": lambda: plain.step(), "planned": lambda run=run: run.step()}, rounds=7)
        ways = Counter(run.plan.policies.values())
        rows.append([
            name,
            asked,
            f"{peak / 2**20:.1f} MiB",
            f"{100 * (peak / budget - 1):+.1f}%",
            f"{median_ratio(spent['planned'], spent['plain']):.2f}x",
            ", ".join(f"{count} {way}" for way, count in ways.most_common())
            + (", the rest offloaded" if run.plan.offloads_rest else ""),
        ])  # fmt: skip
        details.append({
            "share": share, "budget": budget, "peak": peak, "predicted": run.plan.predicted_peak_bytes,
            "fixed": fixed, "plain": plain_peak, "ways": run.plan.policies, "step_ms": spent,
        })  # fmt: skip
        run.handle.undo()
    return rows, details


def first_convolution_bytes(run: Run) -> int:
    """What the backward pass of the first convolution between feature maps needs at once, its arguments included.

    It is among the last to run, when all gradients are there, and works on the largest maps.
    """
    seen: list[tuple[nn.Module, Tensor]] = []
    hooks = [
        m.register_forward_pre_hook(lambda module, args: seen.append((module, args[0])))
        for m in run.model.modules()
        if isinstance(m, nn.Conv2d) and m.in_channels > 3
    ]
    run.loss_of(run.model)
    for hook in hooks:
        hook.remove()
    convolution, x = seen[0][0], seen[0][1].detach().clone().requires_grad_()
    y = convolution(x)
    gradient = torch.ones_like(y)
    wanted = [x, *convolution.parameters()]
    return x.nbytes + y.nbytes + peak_step_bytes(lambda: torch.autograd.grad(y, wanted, gradient))


def exhaustive(share: float) -> tuple[list[str], dict[str, Any]]:
    """Ten equal blocks: every number of them that keep, recompute selectively, or all, against the planner's choice.

    Which of equal blocks do what matters to the peak only: the first ones recompute, which the planner's tests show to
    be the best order.
    """

    def task() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        return transformer_task(blocks=10)

    plain = Run(task)
    budget = round(plain.fixed_bytes() + share * (plain.peak_bytes() - plain.fixed_bytes()))
    planned = Run(task, budget, disk=False)
    plan = planned.plan
    choices = [
        ("full",) * full + ("selective",) * selective + ("keep",) * (10 - full - selective)
        for full, selective in itertools.product(range(11), repeat=2)
        if full + selective <= 10
    ]
    sides: dict[str, Callable[[], Any]] = {}
    run = Run(task)
    for ways in [tuple(plan.policies.values()), *choices]:
        blocks = tuple(replace(block, way=way) for block, way in zip(plan.blocks, ways, strict=True))
        chosen = replace(plan, blocks=blocks)

        def step(chosen: MemorySchedule = chosen) -> None:
            patches = chosen.apply(run.model)
            run.step()
            patches.undo()

        step()
        alive = [*run.model.parameters(), *run.model.buffers(), *state_of([run.optimizer])]
        if unique_bytes(alive) + peak_step_bytes(step) <= budget:
            sides[str(ways) if sides else "planned"] = step
    spent = interleaved_ms(sides, rounds=7, warm_up=1)
    best = min((name for name in sides if name != "planned"), key=lambda name: statistics.median(spent[name]))
    ratio = median_ratio(spent["planned"], spent[best])
    row = [
        f"{share:.0%}",
        f"{len(choices)}, {len(sides) - 1} of which fit",
        _words(plan.policies.values()),
        _words(ways for ways in best.strip("()").replace("'", "").split(", ")),
        f"{100 * (ratio - 1):+.1f}%",
    ]
    medians = {name: statistics.median(times) for name, times in spent.items()}
    return row, {"share": share, "budget": budget, "planned": plan.policies, "best": best, "median_step_ms": medians}


def _words(ways: Any) -> str:
    return ", ".join(f"{count} {way}" for way, count in Counter(ways).items())


def main() -> None:
    command = "python benchmarks/memory_budget.py"
    measured = {name: keeps_budgets(name) for name in TASKS}
    publish(
        "memory_budget",
        command,
        ["network", "budget", "measured peak", "off the budget", "step, to plain", "blocks"],
        [row for rows, _ in measured.values() for row in rows],
        {name: details for name, (_, details) in measured.items()},
    )
    tried = [exhaustive(share) for share in (0.7, 0.4)]
    publish(
        "memory_budget_exhaustive",
        command,
        ["budget", "choices tried", "planned", "best of all", "planned takes longer by"],
        [row for row, _ in tried],
        [details for _, details in tried],
    )


if __name__ == "__main__":
    sys.exit(main())
