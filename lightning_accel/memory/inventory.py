"""Lists what held memory when it ran out, and which module asked for more."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.oom_errors import asked_bytes
from lightning_accel.core.text_columns import aligned
from lightning_accel.core.tree import tensors_in, unique_bytes
from lightning_accel.core.user_frames import is_users
from lightning_accel.memory.meter import device_memory_bytes


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
    states = [tensor for optimizer in optimizers for tensor in tensors_in(list(optimizer.state.values()))]
    names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    fixed = {
        "parameters": held(model.parameters()),
        "gradients": held(p.grad for p in model.parameters() if not is_lazy(p)),
        "buffers": held(model.buffers()),
        f"states of {names}": held(states),
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
    return min([whole, *_own_limits()])


def has_limit_of_its_own() -> bool:
    """Returns whether ``ulimit -v`` or ``-d`` limits the memory of this process."""
    return bool(_own_limits())


def _own_limits() -> list[int]:
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
