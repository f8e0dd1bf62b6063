"""The report when a step has run out of memory: who asked, what held memory, and what would fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.memory.inventory import Inventory

ROOM = 0.95
"""The usable share of a limit, since allocators leave gaps."""

SAME_WHERE = "the same gradients where the loss is a mean over samples and no batch norm trains"
"""When gradients stay the same if a batch is split."""

_MOST_PIECES = 64


class StepMemoryError(RuntimeError):
    """A step did not fit into memory and could not be made to fit. Its cause is torch's error."""


class DeviceStepMemoryError(StepMemoryError, torch.OutOfMemoryError):
    """The error for a GPU. Code that catches torch's own error catches it."""


class HostStepMemoryError(StepMemoryError, MemoryError):
    """The error if Python or NumPy ran out of memory."""


@dataclass(frozen=True)
class Remedy:
    """One setting that would need less memory."""

    python: str  # the argument of the plugin
    yaml: str  # the same in YAML
    keeps: float | None  # approximate share of activations that remains; None if unknown
    remark: str = ""


def error_with(page: str, cause: BaseException) -> StepMemoryError:
    """Returns an error of the same kind as its cause. Its first line is that of the cause, which others search for."""
    if isinstance(cause, torch.OutOfMemoryError):
        return DeviceStepMemoryError(page)
    return HostStepMemoryError(page) if isinstance(cause, MemoryError) else StepMemoryError(page)


def page(
    cause: BaseException,
    headline: str,  # which step failed, and why the run cannot go on
    asked: str,  # the result of who_asked(); may be empty
    inventory: Inventory,
    tried: Sequence[str],  # what was already switched on, one line each
    remedies: Sequence[Remedy],  # what settings could still do, the cheapest in time first
    batch_size: int | None,  # samples in the batch; None if unknown
    accumulate: int | None,  # over how many batches gradients are accumulated; None outside training
    *,
    may_split: bool = False,  # whether the plugin can split the batch within the step
) -> str:
    """Returns the whole report."""
    first_line = str(cause).strip().split("\n")[0] or type(cause).__name__
    unknown = "  not known: autograd's engine does not say for which module it computes"
    held = f"What held it, of {format_bytes(inventory.limit_bytes)} on {inventory.device}:"
    parts = [first_line, "", headline, "", "Who asked:", asked or unknown, "", held, inventory.table()]
    if tried:
        parts += ["", "What was put on before:", *(f"  {line}" for line in tried)]
    parts += ["", "What to do, cheapest first:", *_listed(inventory, remedies, batch_size, accumulate, may_split)]
    return "\n".join(parts)


def _listed(
    inventory: Inventory,
    remedies: Sequence[Remedy],
    batch_size: int | None,
    accumulate: int | None,
    may_split: bool,
) -> list[str]:
    fixed, rest, limit = inventory.fixed_bytes, inventory.rest_bytes, ROOM * inventory.limit_bytes
    lines: list[str] = []
    has_marked = False
    for remedy in remedies:
        remark = f"; {remedy.remark}" if remedy.remark else ""
        need = None if remedy.keeps is None else fixed + remedy.keeps * (rest + (inventory.asked_bytes or 0))
        amount = "" if need is None else f"  # about {format_bytes(need)}"
        if need is not None and need <= limit and not has_marked:
            has_marked, amount = True, f"{amount}: the cheapest that should fit"
        lines += [f"  AccelPlugin({remedy.python}){amount}{remark}"]
        lines += [f"    YAML: {remedy.yaml}"]
    if fixed > limit:
        lines.append(
            f"  What every step holds ({format_bytes(fixed)}) does not fit whatever the batch: shard it"
            " (strategy='accel_fsdp'), train fewer parameters, or take an optimizer with smaller states."
        )
    elif batch_size is not None and batch_size > 1:
        pieces = _pieces(inventory, batch_size)
        smaller = f"  DataLoader(batch_size={max(1, batch_size // pieces)})"
        about = f"  # about {format_bytes(fixed + (rest + (inventory.asked_bytes or 0)) / pieces)}"
        if accumulate is None:
            lines.append(f"{smaller}{about}")
            return lines
        if may_split:
            splits = "AccelPlugin(memory=MemoryOptions(on_oom='split'))"
            lines.append(f"  {splits}{about}, in parts within the step; {SAME_WHERE}")
            lines.append("    YAML: memory: {on_oom: split}")
        lines.append(f"{smaller}, Trainer(accumulate_grad_batches={pieces * accumulate}){about}; {SAME_WHERE}")
    return lines or [
        "  An optimizer with smaller states, states that are sharded (strategy='accel_fsdp'), a smaller model, or a"
        " device with more memory."
    ]


def _pieces(inventory: Inventory, batch_size: int) -> int:
    """Returns into how many pieces, a power of two, the batch must be split, if activations grow with it."""
    room = max(1.0, ROOM * inventory.limit_bytes - inventory.fixed_bytes)
    needed = (inventory.rest_bytes + (inventory.asked_bytes or 0)) / room
    return min(1 << max(1, math.ceil(math.log2(max(1.0, needed)))), _MOST_PIECES, batch_size)
