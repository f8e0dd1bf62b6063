"""Which techniques a plan comes to, and their face for a plain PyTorch loop: :func:`accelerate`."""

from __future__ import annotations

import torch
from torch import nn

from lightning_accel.core.device import device_of
from lightning_accel.core.host import Host
from lightning_accel.engine import Engine
from lightning_accel.settings import Plan
from lightning_accel.techniques.activation_offloading import ActivationOffloading
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.compilation import Compilation
from lightning_accel.techniques.flash_attention import FlashAttention
from lightning_accel.techniques.gradient_checkpointing import GradientCheckpointing, MemoryBudget, blocks_for
from lightning_accel.techniques.inplace_activations import InplaceActivations
from lightning_accel.techniques.memory_format import MemoryFormat, wants_channels_last
from lightning_accel.techniques.mixed_precision import DTYPES, MixedPrecision
from lightning_accel.techniques.preprocessing import Preprocessing
from lightning_accel.techniques.sparse_activations import SparseActivations


def module_techniques(
    plan: Plan,
    model: nn.Module,
    *,
    device: torch.device | None = None,
) -> list[Technique]:
    """The techniques that edit modules, in the order in which they are applied, as ``plan`` asks for them.

    Args:
        plan: The settings.
        model: What they will be applied to.
        device: Where it will compute; None: where it is.
    """
    device = device or device_of(model)
    techniques: list[Technique] = []
    attention = FlashAttention(plan.attention, verify=plan.verify)
    if plan.attention.backend != "off":
        techniques.append(attention)
    if plan.inplace_activations:
        techniques.append(InplaceActivations(skip=_not_in_place(plan, model)))
    if plan.memory_format != "preserve":
        techniques.append(MemoryFormat(plan.memory_format, verify=plan.verify))
    if plan.sparse_activations != "off":
        techniques.append(SparseActivations(model))
    if plan.offloading.always and plan.checkpointing.budget is None:
        techniques.append(ActivationOffloading(plan.offloading, model, device))
    if plan.checkpointing.budget is not None:
        techniques.append(MemoryBudget(plan.checkpointing, plan.offloading, device, verify=plan.verify))
    elif plan.checkpointing.mode != "off":
        techniques.append(GradientCheckpointing(plan.checkpointing, verify=plan.verify))
    if plan.compile != "off":
        # What is compiled is captured anew, past the places where attention is sent to its kernels.
        techniques.append(Compilation(plan.compile, verify=plan.verify, prepare=attention.fuse_captured))
    return techniques


def _not_in_place(plan: Plan, model: nn.Module) -> dict[str, str]:
    """Where activations are not to work in place for the sake of other techniques: prefixes of sites → why."""
    if plan.checkpointing.budget is not None:
        # What a block has packed away is no longer counted as held, and still must not be changed.
        return {"": "with a memory budget: what its plan packs away must stay as it is"}
    recomputed = blocks_for(plan.checkpointing, model) if plan.checkpointing.mode != "off" else ()
    return dict.fromkeys(recomputed, "inside a checkpointed block, whose activations do not last anyway")


def accelerate(model: nn.Module, plan: Plan | None = None, *, host: Host | None = None) -> Engine:
    """Accelerates a model in a plain PyTorch loop.

    .. code-block:: python

        handle = accelerate(model, Plan(precision="bf16-mixed"))
        for inputs, targets in loader:
            with handle.step():
                loss = loss_fn(model(handle.batch(inputs)), targets)
            handle.scaler.scale(loss).backward()
            handle.scaler.step(optimizer)
            handle.scaler.update()
            optimizer.zero_grad()
        handle.undo()

    The scaler passes everything through unless the precision is ``"16-mixed"``.

    Args:
        model: The module, on its device.
        plan: What to do; by default what ``AccelPlugin()`` does.
        host: The machine to decide for; by default the one that holds the model's parameters.

    Returns:
        A handle: ``step()`` around forward and loss, ``batch()`` for inputs, ``scaler``, ``report``, ``undo()``.

    Raises:
        ValueError: The plan names something that the model does not have.
        AccelError: The plan is strict, and part of it cannot be done here.
    """
    plan = plan or Plan()
    host = host or Host.detect(next((parameter.device for parameter in model.parameters()), None))
    precision, of_module = MixedPrecision(plan.precision, host), module_techniques(plan, model)
    techniques: list[Technique] = [precision, *of_module]
    if plan.transforms:
        dtype = DTYPES.get(precision.precision, torch.float32)
        techniques.insert(0, Preprocessing(plan.transforms, device_of(model), dtype, wants_channels_last(of_module)))
    return Engine(model, plan, host, techniques)
