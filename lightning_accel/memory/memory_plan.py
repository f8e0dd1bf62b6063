"""What a planner decided: which blocks keep, recompute or offload, and where the memory of a step goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.device import device_of
from lightning_accel.core.patch import MethodPatch, PatchSet
from lightning_accel.core.tree import tensors_in
from lightning_accel.memory.costs import OFFLOADING, Way, run_block
from lightning_accel.memory.offload import Offloader, offloader_for
from lightning_accel.memory.saved import saving, unique_bytes
from lightning_accel.settings import OffloadingPlan

_OTHER = "other activations, transients"


@dataclass(frozen=True, kw_only=True)
class FixedMemory:
    """What a training step holds whatever its blocks do, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @classmethod
    def of(cls, model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> FixedMemory:
        """Of a model and the optimizers that train it, every storage counted once."""
        return cls(
            parameters=unique_bytes(model.parameters()),
            gradients=unique_bytes(p for p in model.parameters() if p.requires_grad),
            optimizer=unique_bytes(state_of(optimizers)),
            buffers=unique_bytes(model.buffers()),
        )

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


def state_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The tensors that optimizers keep for their parameters."""
    return [t for optimizer in optimizers for t in tensors_in([dict(s) for s in optimizer.state.values()])]


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """One call of a block.

    Attributes:
        site: The block's name in the model.
        call: The site, with a number where the block is called more than once a step.
        kind: Its class.
        way: What it does: keep its activations, recompute (``"selective"``, ``"full"``), or offload them.
        kept_bytes: What it then holds from its forward to its backward pass.
        plain_bytes: What it would hold, keeping everything; None where that could not be run.
        extra_ms: The time that it takes beyond keeping everything; None likewise.
        saved_by_operator: ``plain_bytes`` by the operator that made them, arguments and results included.
    """

    site: str
    call: str
    kind: str
    way: Way
    kept_bytes: int
    plain_bytes: int | None
    extra_ms: float | None
    saved_by_operator: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a training step fits into its budget.

    Attributes:
        budget_bytes: The budget.
        blocks: Every call of a block, in the order of the forward pass.
        fixed: What the step holds in any case.
        offloading: Where blocks that offload do so.
        offloads_rest: Whether what is saved outside all blocks is offloaded too.
        plain_peak_bytes: The predicted peak of the step with everything kept; None where that could not be run.
        plain_ms: Its predicted time; None likewise.
        predicted_peak_bytes: The predicted peak as planned.
        predicted_ms: The predicted time of a step as planned.
        measured_peak_bytes: The peak of a step as planned; None until one was measured.
        measured_ms: The median time of steps as planned; None until some were measured.
    """

    budget_bytes: int
    blocks: tuple[BlockPlan, ...]
    fixed: FixedMemory
    offloading: OffloadingPlan
    offloads_rest: bool = False
    plain_peak_bytes: int | None
    plain_ms: float | None
    predicted_peak_bytes: int
    predicted_ms: float
    measured_peak_bytes: int | None = None
    measured_ms: float | None = None

    @property
    def ways(self) -> dict[str, Way]:
        """Site → what the block there does."""
        return {block.site: block.way for block in self.blocks}

    @property
    def kept_bytes(self) -> int:
        """What all blocks hold at the end of the forward pass, as planned."""
        return sum(block.kept_bytes for block in self.blocks)

    def apply(self, model: nn.Module) -> PatchSet:
        """Makes the blocks of ``model`` do what is planned for them, until the edits are undone.

        Args:
            model: The model that was planned for, or one with the same sites.

        Returns:
            The edits; ``.undo()`` takes them back.

        Raises:
            AttributeError: ``model`` has no module at one of the sites.
        """
        offloads = self.offloads_rest or any(way in OFFLOADING for way in self.ways.values())
        offloader = offloader_for(self.offloading, device_of(model)) if offloads else None
        patches = PatchSet(
            _planned(site, model.get_submodule(site), way, offloader)
            for site, way in self.ways.items()
            if way != "keep" or self.offloads_rest
        )
        if offloader is not None and self.offloads_rest:
            offloader.prefetch_depth = 0
            patches.add(_rest_offloaded(model, offloader))
        patches.apply()
        return patches

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        """The plan as text: a line for each run of equal blocks, then predicted and measured peak and time."""
        rows: list[tuple[str, ...]] = [
            ("block", "class", "does", "keeps", "of", "extra time", "saved, plain, by what made it")
        ]
        rows += [_row(first, last, count) for first, last, count in _runs(self.blocks)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
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
        """Draws where the memory of a step goes, before and after, as two stacked bars: an image at ``path``.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("MemoryPlan.plot() draws with Matplotlib: pip install matplotlib") from error
        axes = (figure := Figure(figsize=(7, 6), layout="constrained")).subplots()
        before, after = self._stack(planned=False), self._stack(planned=True)
        bottoms = [0.0, 0.0]
        for name in before:
            heights = [before[name] / 2**20, after[name] / 2**20]
            # One colour for all blocks, with an edge between them: a legend of fifty names tells nobody anything.
            style: dict[str, Any] = {"color": "tab:cyan", "edgecolor": "white", "linewidth": 0.5}
            is_block = name in {block.call for block in self.blocks}
            axes.bar(["everything kept", "as planned"], heights, bottom=bottoms, **(style if is_block else {}),
                     label=None if is_block else name)  # fmt: skip
            if is_block and heights[0] > 0.03 * sum(before.values()) / 2**20:
                axes.annotate(name, (0, bottoms[0] + heights[0] / 2), ha="center", va="center", fontsize=7)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.axhline(self.budget_bytes / 2**20, color="black", linestyle="--", label="budget")
        axes.bar([], [], color="tab:cyan", label="activations, by block")
        axes.set_ylabel("peak of a training step, MiB")
        axes.legend(loc="upper right")
        figure.savefig(path)

    def _stack(self, *, planned: bool) -> dict[str, int]:
        """What makes up the peak, in bytes, from the bottom up; the rest is what is there for a moment only."""
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


def _planned(site: str, block: nn.Module, way: Way, offloader: Offloader | None) -> MethodPatch:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(self, *args, **kwargs)
            return run_block(way, self, original, args, kwargs, offloader)

        return forward

    return MethodPatch(site, way, block, "forward", wrap)


def _rest_offloaded(model: nn.Module, offloader: Offloader) -> MethodPatch:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(self, *args, **kwargs)
            with saving(offloader, self):
                return original(self, *args, **kwargs)

        return forward

    return MethodPatch("", "what is saved outside blocks is offloaded", model, "forward", wrap)


def _runs(blocks: Iterable[BlockPlan]) -> list[tuple[BlockPlan, BlockPlan, int]]:
    """Neighbours that are alike in everything but the name: first, last, how many."""
    found: list[tuple[BlockPlan, BlockPlan, int]] = []
    for block in blocks:
        if found and _alike(found[-1][0]) == _alike(block):
            found[-1] = (found[-1][0], block, found[-1][2] + 1)
        else:
            found.append((block, block, 1))
    return found


def _alike(block: BlockPlan) -> tuple[Any, ...]:
    return block.kind, block.way, block.kept_bytes, block.plain_bytes


def _row(first: BlockPlan, last: BlockPlan, count: int) -> tuple[str, ...]:
    operators = sorted(first.saved_by_operator.items(), key=lambda item: -item[1])
    return (
        first.call if count == 1 else f"{first.call} … {last.call} ({count})",
        first.kind,
        first.way,
        format_bytes(first.kept_bytes),
        _maybe(first.plain_bytes, format_bytes),
        _maybe(first.extra_ms, lambda ms: f"{ms:+.1f} ms"),
        ", ".join(f"{name} {format_bytes(size)}" for name, size in operators[:3]),
    )


def _maybe(value: Any, write: Any) -> str:
    return "not measured" if value is None else write(value)


def _ms(ms: float) -> str:
    return f"{ms:.0f} ms"
