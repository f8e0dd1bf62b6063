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
    """Plans for each block of ``model`` what lets a training step fit into ``budget`` and costs the least time.

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

    It runs ``step_fn`` about ten times, and over sixty more times if no torch optimizer steps in ``step_fn``.
    Afterwards it restores parameters, buffers, gradients, random streams and the state of the optimizers that stepped.
    Other changes stay: a gradient scaler, a learning rate scheduler, other modules.

    Args:
        model: The model, on its device.
        batch: The largest batch that the training will have.
        budget: The most memory that a training step may have allocated at one time, everything included: bytes, text
            such as ``"12GiB"``, or a share of the device, ``"40%"``.
        step_fn: A whole training step, forward, backward and optimizer, called as ``step_fn(model, batch)``.
        blocks: Class names or module paths of the blocks; if empty, the repeated blocks are found automatically.
        offloading: Where blocks may offload to. ``"auto"``: the host's memory on a GPU, nowhere on a CPU. ``"off"``:
            nowhere.

    Returns:
        The plan, with predicted and measured values.

    Raises:
        ValueError: The budget is not an amount of memory, or is too small. The message names the least possible amount.
        RuntimeError: Another profiler is active (on a CPU), or ``step_fn`` calls no block with gradients.
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
