"""The table of settings that the tests of all techniques go through, and a loop that trains by it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accel.assembly import Handle, accelerate, surroundings_for
from lightning_accel.core.host import Host
from lightning_accel.data import Map
from lightning_accel.settings import Plan
from lightning_accel.techniques.registry import Declaration, declarations
from support.models import Task

HOST = Host(kind="cpu", device_name="a CPU", native_bf16=True, compiler="g++")


class Row(NamedTuple):
    """Settings, the technique that they are about, and how far their losses may be from the plain ones (relative)."""

    settings: dict[str, Any]
    technique: str
    tolerance: float


def _unchanged(xp: Any, batch: Any) -> Any:
    return batch


ALL: dict[str, Any] = {
    "flash_attention": "sdpa",
    "inplace_activations": "auto",
    "memory_format": "channels_last",
    "gradient_checkpointing": "full",
}
# The models are so small that by default no tensor of theirs would be moved.
HOST_MEMORY = {"to": "host", "min_bytes": 64}
SMALL = {"host": HOST_MEMORY, "disk": {"to": "disk", "min_bytes": 64}}

TOLERANCES = {"exact": 0.0, "rounding": 1e-5, "precision": 0.05, "changes training": 0.05}

COMBINED = {
    "nothing": Row({}, "precision", 0.0),
    "preprocess": Row({"preprocess": [Map(_unchanged)]}, "preprocess", 0.0),
    "channels_last": Row({"memory_format": "channels_last"}, "memory_format", 1e-5),
    "all in float32": Row(ALL, "gradient_checkpointing", 1e-5),
    "all, compiled": Row({**ALL, "compile": "on"}, "gradient_checkpointing", 1e-5),
    "all in bfloat16": Row({**ALL, "precision": "bf16-mixed"}, "gradient_checkpointing", 0.05),
    "all in float16": Row(
        {**ALL, "precision": "16-mixed", "gradient_checkpointing": "selective"}, "gradient_checkpointing", 0.01
    ),
    "all that saves memory": Row(
        {**ALL, "sparse_activations": "auto", "activation_offloading": HOST_MEMORY}, "activation_offloading", 1e-5
    ),
    "all, unverified": Row({**ALL, "verify": False}, "gradient_checkpointing", 1e-5),
}


def table() -> dict[str, Row]:
    """Every technique with its default and with what it declares to be worth showing, and all of them together."""
    return alone() | COMBINED


def alone() -> dict[str, Row]:
    """Every technique with its default, where that is not off, and with what it declares to be worth showing."""
    rows = {}
    for name, declaration in declarations().items():
        for value in (declaration.default, *declaration.shown):
            if not declaration.is_off(value) and _acts(declaration, value):
                chosen = SMALL.get(value, value) if name == "activation_offloading" else value
                tolerance = 0.01 if value == "16-mixed" else TOLERANCES[declaration.exactness]
                rows[f"{name}={value}"] = Row({name: chosen}, name, tolerance)
    return rows


def _acts(declaration: Declaration, value: Any) -> bool:
    """Whether the tests' host has the technique so, and a plan that asks for it alone."""
    plan = Plan(**off() | {declaration.name: value})
    techniques = surroundings_for(plan, nn.Linear(2, 2), HOST, in_plain_loop=True).techniques
    return any(technique.name == declaration.name and technique.unavailable(HOST) is None for technique in techniques)


def off() -> dict[str, Any]:
    """The settings that leave everything as it is."""
    return {name: declaration.off for name, declaration in declarations().items()}


def start(model: nn.Module, row: Row) -> Handle:
    """Puts the plan of a row to work."""
    return accelerate(model, Plan(**off() | row.settings), host=HOST)


def model_for(task: Task, row: Row) -> nn.Module:
    """The task's model; without dropout where compiled code recomputes, which draws other random numbers."""
    model = task.model()
    if "compile" in row.settings and "gradient_checkpointing" in row.settings:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


class Loop:
    """A plain PyTorch training loop, with or without a handle."""

    def __init__(self, model: nn.Module, task: Task, handle: Handle | None = None, *, clips: bool = False) -> None:
        self.model, self.task, self.handle, self.clips = model, task, handle, clips
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(self, index: int) -> float:
        inputs, targets = self.task.batch(index)
        torch.manual_seed(index)
        self.optimizer.zero_grad()
        if self.handle is None:
            loss = self.task.loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            return loss.item()
        with self.handle.step():
            loss = self.task.loss(self.model(self.handle.batch(inputs)), targets)
        scaler = self.handle.scaler
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
        return loss.item()

    def run(self, steps: range) -> list[float]:
        return [self.step(index) for index in steps]


def structure(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that undoing must restore, but for the values of its parameters and buffers."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    plain = {
        f"{name}.{key}": value
        for name, module in model.named_modules(remove_duplicate=False)
        for key, value in vars(module).items()
        if not key.startswith("_") and not isinstance(value, Tensor)
    }
    return {
        "modules": {name: id(module) for name, module in model.named_modules(remove_duplicate=False)},
        "classes": {name: type(module) for name, module in model.named_modules()},
        "parameters": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "buffers": {name: id(b) for name, b in model.named_buffers(remove_duplicate=False)},
        "strides": {name: p.stride() for name, p in model.named_parameters()},
        "gradient strides": {name: p.grad.stride() for name, p in model.named_parameters() if p.grad is not None},
        "needs gradients": {name: p.requires_grad for name, p in model.named_parameters()},
        "hooks": {name: [len(getattr(m, hook)) for hook in hooks] for name, m in model.named_modules()},
        "compiled": {name: m._compiled_call_impl for name, m in model.named_modules()},
        "attributes": plain,
    }
