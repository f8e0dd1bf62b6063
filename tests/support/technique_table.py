"""The table of settings that the tests of all techniques go through, and a loop that trains by it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.assembly import AcceleratedModel, accelerate, build_context
from lightning_accel.core.host import Host
from lightning_accel.core.options import choices_of
from lightning_accel.data import Map
from lightning_accel.experiment import trial
from lightning_accel.memory import eight_bits
from lightning_accel.memory.packer import Packer
from lightning_accel.settings import Plan
from lightning_accel.techniques import allocator, compiled_blocks, cudnn_benchmark, float8
from lightning_accel.techniques.activation_offloading import ActivationOffloading
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.graphs import Graphs
from lightning_accel.techniques.loss import technique as loss
from lightning_accel.techniques.registry import Declaration, declarations
from lightning_accel.techniques.sparse_activations import SparseActivations
from support.models import TASKS, TEXT, Task
from support.shown_values import shown_values
from support.simulated_graphs import SimulatedGraphs

T = TypeVar("T", bound=Technique)

HOST = Host(kind="cpu", device_name="a CPU", native_bf16=True, compiler="g++")
CARD = Host(kind="cuda", device_name="a simulated card", capability=(9, 0), native_bf16=True, compiler="g++")

SIMULATED = ("float8", "matmul_precision", "cudnn_benchmark", "graphs")
"""What a CPU does not have, and what can be shown of without a card: that it comes and goes, and changes no number."""


class Row(NamedTuple):
    """Settings, the technique that they are about, and how far their losses may be from the plain ones (relative)."""

    settings: dict[str, Any]
    technique: str
    tolerance: float
    host: Host = HOST


def _copied(xp: Any, batch: Any) -> Any:
    return batch.copy()


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
    "preprocess": Row({"preprocess": [Map(_copied)]}, "preprocess", 0.0),
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
    "all, unverified": Row({**ALL, "trust": "unchecked"}, "gradient_checkpointing", 1e-5),
}

TASKS_OF = {
    "loss": {"transformer": TASKS["transformer"], "text": TEXT},
    "padding": {"text": TEXT},
    "float8": {"text": TEXT},
    "graphs": {"cnn": TASKS["cnn"], "text": TEXT},
}
"""What techniques are shown with that act on neither of the tasks, or on one only."""

NOTHING_TO_DO = {
    ("loader=auto", "cnn"): "in a Trainer's run only: test_loader.py, and technique_ranks.py",
    ("loader=auto", "transformer"): "in a Trainer's run only",
    ("memory_format=auto", "transformer"): "no convolutions",
    ("channels_last", "transformer"): "no convolutions",
    ("flash_attention=auto", "cnn"): "no attention",
    ("flash_attention=sdpa", "cnn"): "no attention",
    ("flash_attention=flash", "cnn"): "no attention",
    ("cudnn_benchmark=auto", "transformer"): "no convolutions",
}
"""Rows whose technique finds nothing to do, each with the reason; tests hold that, and that all others act."""


COME_AND_GO = (
    "precision=auto",
    "precision=16-mixed",
    "flash_attention=sdpa",
    "inplace_activations=auto",
    "float8=tensorwise",
    "loss=auto",
    "matmul_precision=auto",
    "memory_format=auto",
    "cudnn_benchmark=auto",
    "optimizer_8bit=on",
    "optimizer=auto",
    "padding=64",
    "sparse_activations=auto",
    "activation_offloading=host",
    "gradient_checkpointing=full",
    "gradient_checkpointing=selective",
    "memory_budget=12GiB",
    "graphs=on",
    "threads=auto",
    "compile=on",
    "allocator=auto",
    "preprocess",
    "all in float32",
)
"""One setting of each technique, or two where they are other code, and all of them: what is undone, copied, pickled."""

WHATEVER_THE_MODEL = (
    "precision",
    "matmul_precision",
    "cudnn_benchmark",
    "optimizer_8bit",
    "optimizer",
    "memory_budget",
    "sparse_activations",
    "activation_offloading",
    "threads",
    "compile",
    "allocator",
    "preprocess",
)
"""Techniques that come and go in the same way with every model: shown with one."""


def table() -> dict[str, Row]:
    """Every technique with its default and with what it declares to be worth showing, and all of them together."""
    return alone() | COMBINED


def tasks_of(name: str, row: Row) -> dict[str, Task]:
    """The tasks that a row is shown with."""
    return TASKS_OF.get(row.technique, TASKS) if len(row.settings) == 1 else TASKS


def comes_and_goes(name: str, row: Row, task: str) -> bool:
    """Whether the default suite shows with this task how a row comes and goes."""
    return name in COME_AND_GO and (row.technique not in WHATEVER_THE_MODEL or task == next(iter(tasks_of(name, row))))


def alone() -> dict[str, Row]:
    """Every technique with its default, with ``"auto"`` and with what it declares to be worth showing: all but off."""
    rows = {}
    for name, declaration in declarations().items():
        for value in dict.fromkeys(
            (declaration.switch(declaration.default), *_auto(declaration), *shown_values(declaration))
        ):
            host = None if value == declaration.off else _host_of(declaration, value)
            if host is not None:
                tolerance = 0.03 if value == "16-mixed" else TOLERANCES[declaration.exactness]
                rows[f"{name}={value}"] = Row(_settings(name, value), name, tolerance, host)
    return rows


def _auto(declaration: Declaration) -> tuple[str, ...]:
    return ("auto",) if "auto" in choices_of(declaration.switch_type) else ()


def _settings(name: str, value: Any) -> dict[str, Any]:
    if name == "activation_offloading":
        value = SMALL.get(value, value)
    # Only where nobody has asked for float32.
    return {name: value} | ({"precision": "auto"} if (name, value) == ("matmul_precision", "auto") else {})


def _host_of(declaration: Declaration, value: Any) -> Host | None:
    """The first of the tests' hosts that has the technique so, with a plan that asks for it alone."""
    plan = Plan().replace(**off() | _settings(declaration.name, value))
    for host in (HOST, CARD) if declaration.name in SIMULATED else (HOST,):
        techniques = build_context(plan, nn.Linear(2, 2), host, in_plain_loop=True).techniques
        if any(one.name == declaration.name and one.unavailable(host) is None for one in techniques):
            return host
    return None


def make_small_models_do(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has models and runs of the tests' sizes count as large, clocks decide little, and a card be simulated.

    A compiled graph is captured, and runs as it is (test_compiled_blocks.py compiles). For what is never faster
    here (float8, emulated) or not on every machine (layouts, kernels of attention), no clock decides at all: the test
    has to take back that the run is deterministic. Memory that is freed counts as asked for again.
    """

    def compile_call(module: nn.Module, options: dict[str, Any], *_: Any) -> None:
        module._compiled_call_impl = torch.compile(
            lambda *args, **kwargs: module._call_impl(*args, **kwargs), backend=backend
        )

    # Only what captures the backward pass, too, recomputes without counting running statistics as modified.
    backend = "aot_eager" if "gradient_checkpointing" in row.settings else "eager"

    monkeypatch.setattr(compiled_blocks, "compile_call", compile_call)
    monkeypatch.setattr(trial, "PAIRS", 1)
    monkeypatch.setattr(eight_bits, "BLOCK", 64)  # the models are so small that no weight of theirs would be packed
    monkeypatch.setattr(eight_bits, "LEAST_ELEMENTS", 64)
    monkeypatch.setattr(loss, "FEWEST_CLASSES", 11)
    monkeypatch.setattr(loss, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(allocator, "LEAST_FAULTS", 0)
    monkeypatch.setattr(cudnn_benchmark, "REPEATED", 1)
    if row.host is CARD:
        monkeypatch.setitem(Graphs.__init__.__kwdefaults__, "capture", SimulatedGraphs().capture)
        monkeypatch.setattr(float8, "configuration", functools.partial(_emulated, float8.configuration))
    monkeypatch.setitem(Packer.__init__.__kwdefaults__, "min_bytes", 64)
    monkeypatch.setitem(Packer.__init__.__kwdefaults__, "max_time_share", 100.0)
    if "threads" in row.settings:  # two threads, simulated: a busy machine takes its time for two that are there
        count = [2]
        monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
        monkeypatch.setattr(torch, "set_num_threads", functools.partial(count.__setitem__, 0))
    if {*row.settings} & {"float8", "memory_format", "flash_attention"}:
        torch.use_deterministic_algorithms(True)


def _emulated(configuration: Callable[..., Any], recipe: str, *, emulate: bool = True) -> Any:
    return configuration(recipe, emulate=True)


def off() -> dict[str, Any]:
    """The settings that leave everything as it is."""
    return {name: declaration.off for name, declaration in declarations().items()}


def start(model: nn.Module, row: Row, **run: Any) -> AcceleratedModel:
    """Puts the plan of a row to work, with settings of the run."""
    return accelerate(model, Plan().replace(**off() | row.settings | run), host=row.host)


def acts(handle: AcceleratedModel, technique: str, task: Task) -> bool:
    """Whether a technique has done something in the steps that were run, or live trials may have it do something."""
    if handle.report.applied(technique) or any(arm.name == technique for arm in handle.engine.arms()):
        return True
    seen = WITHOUT_SITES.get(technique)
    return seen is not None and seen(handle, task)


def _computes_in_half_precision(handle: AcceleratedModel, task: Task) -> bool:
    with handle.step("validate"):
        return torch.is_autocast_enabled("cpu")


def _makes_another_batch(handle: AcceleratedModel, task: Task) -> bool:
    inputs = task.batch()[0]
    now = handle.batch(inputs, "train")
    if isinstance(inputs, Mapping):
        return all(now[name].shape[1] > part.shape[1] for name, part in inputs.items())
    return bool(now.data_ptr() != inputs.data_ptr())


def _found(handle: AcceleratedModel, kind: type[T]) -> T:
    found = handle.engine.technique(kind)
    assert found is not None
    return found


WITHOUT_SITES: dict[str, Callable[[AcceleratedModel, Task], bool]] = {
    "precision": _computes_in_half_precision,
    "padding": _makes_another_batch,
    "preprocess": _makes_another_batch,
    "sparse_activations": lambda handle, _: _found(handle, SparseActivations).packer.report().packed > 0,
    "activation_offloading": lambda handle, _: _found(handle, ActivationOffloading).offloader.stats.bytes_out > 0,
    "memory_budget": lambda handle, _: handle.memory_schedule is not None,
}
"""What shows that a technique acts which edits no site."""


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

    def __init__(
        self, model: nn.Module, task: Task, handle: AcceleratedModel | None = None, *, clips: bool = False
    ) -> None:
        self.model, self.task, self.handle, self.clips = model, task, handle, clips
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.streams: list[Tensor] = []  # where the random stream has come to by the end of each step

    def step(self, index: int) -> float:
        loss = self._step(index)
        self.streams.append(torch.get_rng_state())
        return loss

    def _step(self, index: int) -> float:
        inputs, targets = self.task.batch(index)
        torch.manual_seed(index)
        self.optimizer.zero_grad()
        if self.handle is None:
            loss = self.task.loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            return loss.item()
        with self.handle.step():
            inputs = self.handle.batch(inputs)
            targets = inputs["labels"] if isinstance(inputs, Mapping) else targets  # padded with the rest
            loss = self.task.loss(self.model(inputs), targets)
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
