"""The result of planning: the policy of each block, and where the memory of a step goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.device import device_of
from lightning_accel.core.optimizers import state_of
from lightning_accel.core.patch import PatchSet
from lightning_accel.core.text_columns import aligned
from lightning_accel.core.tree import unique_bytes
from lightning_accel.memory.costs import OFFLOADING, BlockCosts, Policy, run_block
from lightning_accel.memory.knapsack import Policies, Stage
from lightning_accel.memory.offload import Offloader, Offloading
from lightning_accel.memory.recompute import Run, trained_patch
from lightning_accel.memory.saved_tensors import saving

_OTHER = "other activations, transients"


@dataclass(frozen=True, kw_only=True)
class FixedMemory:
    """What a training step always holds, whatever its blocks do, in bytes. Each storage is counted once."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @classmethod
    def of(cls, model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> FixedMemory:
        return cls(
            parameters=unique_bytes(model.parameters()),
            gradients=unique_bytes(p for p in model.parameters() if p.requires_grad),
            optimizer=unique_bytes(state_of(optimizers)),
            buffers=unique_bytes(model.buffers()),
        )

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True, kw_only=True)
class BlockSchedule:
    """The plan for one call of a block."""

    site: str  # the block's name in the model
    call: str  # the site, with a number where the block is called more than once a step
    kind: str  # its class
    policy: Policy  # keeps, recomputes ("selective", "full") or offloads its activations
    kept_bytes: int  # held from forward to backward, as planned
    plain_bytes: int | None  # held if everything is kept; None if that could not be run
    extra_ms: float | None  # time beyond keeping everything; None likewise
    saved_by_operator: Mapping[str, int]  # plain_bytes by operator, with arguments and results

    @classmethod
    def of(cls, stage: Stage, policy: Policy, costs: BlockCosts, kind: str) -> BlockSchedule:
        plain = stage.by_policy.get("keep")
        return cls(
            site=stage.call.site,
            call=str(stage.call),
            kind=kind,
            policy=policy,
            kept_bytes=stage.by_policy[policy].kept_bytes,
            plain_bytes=None if plain is None else plain.kept_bytes,
            extra_ms=None if plain is None else costs.by_policy[policy].ms - costs.by_policy["keep"].ms,
            saved_by_operator=costs.saved_by_operator,
        )


@dataclass(frozen=True, kw_only=True)
class MemorySchedule:
    """The plan by which a training step fits into its budget.

    Attributes:
        budget_bytes: The budget.
        blocks: Every call of a block, in the order of the forward pass.
        fixed: What the step always holds.
        offloading: Where blocks offload to; None if none may.
        offloads_rest: Whether tensors saved outside of blocks are offloaded too.
        plain_peak_bytes: The predicted peak of the step with everything kept; None if that could not be run.
        plain_ms: The predicted time of that step; None likewise.
        predicted_peak_bytes: The predicted peak as planned.
        predicted_ms: The predicted time of a step as planned.
        measured_peak_bytes: The peak of a step as planned; None until one was measured.
        measured_ms: The median time of steps as planned; None until some were measured.
    """

    budget_bytes: int
    blocks: tuple[BlockSchedule, ...]
    fixed: FixedMemory
    offloading: Offloading | None
    offloads_rest: bool = False
    plain_peak_bytes: int | None
    plain_ms: float | None
    predicted_peak_bytes: int
    predicted_ms: float
    measured_peak_bytes: int | None = None
    measured_ms: float | None = None

    @property
    def policies(self) -> Policies:
        """Site → the policy of its block."""
        return {block.site: block.policy for block in self.blocks}

    ways = policies  # the public name

    @property
    def kept_bytes(self) -> int:
        """The bytes that all blocks hold at the end of the forward pass, as planned."""
        return sum(block.kept_bytes for block in self.blocks)

    def apply(self, model: nn.Module) -> PatchSet:
        """Applies the plan to the blocks of ``model``, until ``.undo()`` of the result.

        Args:
            model: The planned model, or one with the same sites.

        Raises:
            AttributeError: ``model`` has no module at one of the sites.
        """
        offloader = None
        if self.offloading and (self.offloads_rest or any(policy in OFFLOADING for policy in self.policies.values())):
            depth = 0 if self.offloads_rest else 1
            offloader = Offloader(device_of(model), self.offloading, prefetch_depth=depth, by_blocks=True)
        patches = PatchSet(
            trained_patch(site, policy, model.get_submodule(site), partial(run_block, policy, offloader=offloader))
            for site, policy in self.policies.items()
            if policy != "keep" or self.offloads_rest
        )
        if offloader is not None and self.offloads_rest:
            patches.add(trained_patch("", "what is saved outside blocks is offloaded", model, _offloading(offloader)))
        patches.apply()
        return patches

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        """Returns the plan as text: a line per run of equal blocks, then predicted and measured peak and time."""
        rows: list[tuple[str, ...]] = [
            ("block", "class", "does", "keeps", "of", "extra time", "saved, plain, by what made it")
        ]
        alike = attrgetter("kind", "policy", "kept_bytes", "plain_bytes")
        rows += [_row(list(group)) for _, group in itertools.groupby(self.blocks, alike)]
        lines = aligned(rows)
        fixed = self.fixed
        lines += [
            f"fixed: parameters {format_bytes(fixed.parameters)}, gradients {format_bytes(fixed.gradients)},"
            f" optimizer {format_bytes(fixed.optimizer)}, buffers {format_bytes(fixed.buffers)}",
            f"beside these and the blocks, at the peak: {format_bytes(self._stack(planned=True)[_OTHER])} ({_OTHER})",
            *(["what is saved outside these blocks is offloaded too"] if self.offloads_rest else []),
            f"peak of a step: budget {format_bytes(self.budget_bytes)}, predicted"
            f" {format_bytes(self.predicted_peak_bytes)}, measured {_maybe(self.measured_peak_bytes, format_bytes)};"
            f" everything kept {_maybe(self.plain_peak_bytes, format_bytes)} (predicted)",
            f"time of a step: predicted {_ms(self.predicted_ms)}, measured {_maybe(self.measured_ms, _ms)};"
            f" everything kept {_maybe(self.plain_ms, _ms)} (predicted)",
        ]
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draws the memory of a step before and after planning, as two stacked bars, into an image at ``path``.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plot() draws with Matplotlib: pip install matplotlib") from error
        axes = (figure := Figure(figsize=(7, 6), layout="constrained")).subplots()
        before, after = self._stack(planned=False), self._stack(planned=True)
        blocks = {block.call for block in self.blocks}
        bottoms = [0.0, 0.0]
        for name in before:
            heights = [before[name] / 2**20, after[name] / 2**20]
            # One colour for all blocks, separated by edges: a legend of fifty names would be useless.
            style: dict[str, Any] = {"label": name}
            if name in blocks:
                style = {"color": "tab:cyan", "edgecolor": "white", "linewidth": 0.5}
            axes.bar(["everything kept", "as planned"], heights, bottom=bottoms, **style)
            if name in blocks and heights[0] > 0.03 * sum(before.values()) / 2**20:
                axes.annotate(name, (0, bottoms[0] + heights[0] / 2), ha="center", va="center", fontsize=7)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.axhline(self.budget_bytes / 2**20, color="black", linestyle="--", label="budget")
        axes.bar([], [], color="tab:cyan", label="activations, by block")
        axes.set_ylabel("peak of a training step, MiB")
        axes.legend(loc="upper right")
        figure.savefig(path)

    def _stack(self, *, planned: bool) -> dict[str, int]:
        """Returns the parts of the peak in bytes, from the bottom up. The last part is temporary memory."""
        parts = {
            "parameters and buffers": self.fixed.parameters + self.fixed.buffers,
            "gradients": self.fixed.gradients,
            "optimizer": self.fixed.optimizer,
        }
        peak = self.predicted_peak_bytes if planned else (self.plain_peak_bytes or 0)
        for block in self.blocks:
            parts[block.call] = block.kept_bytes if planned else (block.plain_bytes or 0)
        parts[_OTHER] = max(0, peak - sum(parts.values()))
        return parts


def _offloading(offloader: Offloader) -> Run:
    def run(module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with saving(offloader, module):
            return original(module, *args, **kwargs)

    return run


def _row(alike: Sequence[BlockSchedule]) -> tuple[str, ...]:
    """Returns the table row for neighbours that differ only in their names."""
    first, last = alike[0], alike[-1]
    operators = sorted(first.saved_by_operator.items(), key=lambda item: -item[1])
    return (
        first.call if first is last else f"{first.call} … {last.call} ({len(alike)})",
        first.kind,
        first.policy,
        format_bytes(first.kept_bytes),
        _maybe(first.plain_bytes, format_bytes),
        _maybe(first.extra_ms, lambda ms: f"{ms:+.1f} ms"),
        ", ".join(f"{name} {format_bytes(size)}" for name, size in operators[:3]),
    )


def _maybe(value: Any, write: Any) -> str:
    return "not measured" if value is None else write(value)


def _ms(ms: float) -> str:
    return f"{ms:.0f} ms"
