"""What held memory when a step ran out of it, which module asked for more, and the report: with what would fit."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.oom_errors import asked_bytes
from lightning_accel.core.optimizers import state_of
from lightning_accel.core.text_columns import aligned
from lightning_accel.core.tree import tensors_in, unique_bytes
from lightning_accel.core.user_frames import is_users
from lightning_accel.memory.meter import device_memory_bytes

ROOM = 0.95
"""The usable share of a limit, since allocators leave gaps."""

SAME_WHERE = "the same gradients where the loss is a mean over samples and no batch norm trains"
"""When gradients stay the same if a batch is split."""

_MOST_PIECES = 64


@dataclass(frozen=True)
class Inventory:
    """The memory held on a device, by owner."""

    device: str
    limit_bytes: int  # total memory available to this process
    asked_bytes: int | None  # the failed request; None if unknown
    fixed_bytes: int  # held by every step: parameters, gradients, optimizer states, buffers
    rest_bytes: int  # the rest without the batch, mostly activations
    held_bytes: int  # by this process in total
    parts: dict[str, int]  # the rows of the page, by name

    @property
    def wanted_bytes(self) -> int:
        """The bytes with which the step would have got past the failed allocation."""
        return self.held_bytes + (self.asked_bytes or 0)

    def table(self) -> str:
        """Returns one line for each part, the largest first."""
        rows = sorted(self.parts.items(), key=lambda part: part[1], reverse=True)
        return "\n".join(aligned((f"  {name}", f"{format_bytes(size):>12}") for name, size in rows if size))


def take_inventory(
    model: nn.Module, optimizers: Iterable[Optimizer], batch: Any, device: torch.device, error: BaseException
) -> Inventory:
    """Counts what ``device`` holds now. While the frames of ``error`` live, this includes activations."""

    def held(tensors: Iterable[Tensor | None]) -> int:
        return unique_bytes(t for t in tensors if t is not None and not is_lazy(t) and t.device.type == device.type)

    optimizers = list(optimizers)
    names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    fixed = {
        "parameters": held(model.parameters()),
        "gradients": held(p.grad for p in model.parameters() if not is_lazy(p)),
        "buffers": held(model.buffers()),
        f"states of {names}": held(state_of(optimizers)),
    }
    batch_bytes = held(tensors_in(batch))
    known = sum(fixed.values()) + batch_bytes
    if device.type == "cuda":
        held_bytes = torch.cuda.memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        parts = {
            "activations, and what was being computed": max(0, held_bytes - known),
            "free, and reserved by torch in pieces": reserved - held_bytes,
            "other processes, and CUDA itself": max(0, total - free - reserved),
        }
    else:
        held_bytes = psutil.Process().memory_info().rss
        parts = {"activations, and all else in this process": max(0, held_bytes - known)}
    return Inventory(
        device=str(device),
        limit_bytes=limit_bytes(device),
        asked_bytes=asked_bytes(error),
        fixed_bytes=sum(fixed.values()),
        rest_bytes=max(0, held_bytes - known),
        held_bytes=held_bytes,
        parts={**fixed, "the batch": batch_bytes, **parts},
    )


def limit_bytes(device: torch.device) -> int:
    """Returns how much of a device's memory this process may use. On a CPU: of machine, container or ``ulimit``."""
    whole = device_memory_bytes(device)
    if device.type == "cuda":
        return int(torch.cuda.get_per_process_memory_fraction(device) * whole)
    return min([whole, *own_limits()])


def own_limits() -> list[int]:
    """Returns the limits that ``ulimit -v`` and ``-d`` set to the memory of this process, in bytes."""
    if sys.platform == "win32":
        return []
    import resource

    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return [limit for limit in limits if limit != resource.RLIM_INFINITY]


def who_asked(error: BaseException, model: nn.Module) -> str:
    """Returns the origin of an error: the innermost modules of ``model`` and the user's line; empty if unknown.

    Autograd's threads and kernels have no Python frames, so that in a backward pass no module is known.
    """
    names = {id(module): name for name, module in model.named_modules()}
    chain: list[str] = []
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if is_users(file):
            place = f"{file}:{line}, in {frame.f_code.co_name}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            called = f"{names[id(owner)]} ({type(owner).__name__})"
            if called not in chain:
                chain.append(called)
    return "\n".join(
        [f"  {name}" for name in reversed(chain[-3:])] + ([f"  at {place}" if chain else f"  {place}"] if place else [])
    )


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
        lines += [f"  AccelPlugin({remedy.python}){amount}{remark}", f"    YAML: {remedy.yaml}"]
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
