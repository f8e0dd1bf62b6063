"""Memory planning for a plain PyTorch loop: :func:`plan_memory`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_accel.arguments import MemoryOptions
from lightning_accel.assembly import accelerate
from lightning_accel.core.device import device_of
from lightning_accel.core.optimizers import living_optimizers
from lightning_accel.core.report import AccelError
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.memory.planner import MAX_STEPS
from lightning_accel.memory.schedule import MemorySchedule
from lightning_accel.settings import Plan
from lightning_accel.techniques.activation_offloading import OffloadingOptions, OffloadingSetting


def plan_memory(
    model: nn.Module,
    batch: Any,
    budget: int | str,
    step_fn: Callable[[nn.Module, Any], Any],
    *,
    blocks: Sequence[str] = (),
    offloading: OffloadingSetting | OffloadingOptions = "auto",
) -> MemorySchedule:
    """Finds what each block of ``model`` should do so that a training step fits into ``budget``, at the least time.

    ```python
    def train_step(model, batch):
        loss = loss_fn(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = plan_memory(model, batch, "12GiB", train_step)
    print(plan.table())
    patches = plan.apply(model)  # patches.undo() takes it back
    ```

    It runs ``step_fn`` about ten times (over sixty more where no optimizer of torch's steps in it). Parameters,
    buffers, gradients, random streams and the state of the optimizers that stepped are afterwards as they were; what
    else it changes stays changed: a gradient scaler, a learning rate scheduler, other modules.

    Args:
        model: The model, on its device.
        batch: A batch, the largest that will come.
        budget: The most that a training step may have allocated at one time, everything included: bytes, text such as
            ``"12GiB"``, or a share of the device, ``"40%"``.
        step_fn: Called as ``step_fn(model, batch)``: a whole training step, forward, backward and optimizer.
        blocks: Class names or module paths of the blocks; empty: found by themselves.
        offloading: Where blocks may offload to; ``"auto"``: the host's memory on a GPU, nowhere on a CPU; ``"off"``:
            nowhere.

    Returns:
        The plan, predicted and measured.

    Raises:
        ValueError: The budget is no amount of memory, or less than any choice needs; the least is named.
        RuntimeError: Another profiler is at work (on a CPU), or ``step_fn`` calls no block with gradients.
    """
    settings = Plan(
        precision="32-true",
        memory=MemoryOptions(budget=budget, blocks=tuple(blocks), offload=offloading),
        techniques=dict.fromkeys(("flash_attention", "memory_format", "inplace_activations"), "off"),
        strict=True,
    )
    optimizers, host = living_optimizers(model), torch.device("cpu")  # copies wait on the host: the device may be full
    with StateSnapshot(model, Level.TRAINING, device_of(model), optimizers=optimizers, copies_on=host):
        handle = accelerate(model, settings)
        try:
            for _ in range(MAX_STEPS):
                with handle.step():
                    step_fn(model, batch)
                plan = handle.memory_schedule
                if plan is not None and plan.measured_ms is not None:
                    return plan
            raise AccelError(handle.report.of("memory_budget").status)
        except AccelError as error:
            raise RuntimeError(f"plan_memory: nothing was planned. {error}") from error
        finally:
            handle.undo()
