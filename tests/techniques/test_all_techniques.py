"""One table of settings, one set of promises: what holds for every technique, and for all of them together.

A new technique adds a row to ``SETTINGS``.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.assembly import accelerate
from lightning_accel.core import trial
from lightning_accel.core.host import Host
from lightning_accel.data import Map
from lightning_accel.engine import Engine
from lightning_accel.settings import Plan
from lightning_accel.techniques import compilation
from support.models import TASKS, Task, TinyCNN

HOST = Host(kind="cpu", device_name="a CPU", native_bf16=True, compiler="g++")

OFF: dict[str, Any] = {
    "precision": "32-true",
    "flash_attention": "off",
    "memory_format": "preserve",
    "inplace_activations": False,
}
ALL: dict[str, Any] = {
    "flash_attention": "sdpa",
    "inplace_activations": True,
    "memory_format": "channels_last",
    "gradient_checkpointing": "full",
}


def _unchanged(xp: Any, batch: Any) -> Any:
    return batch


HOST_MEMORY = {"to": "host", "min_bytes": 64}
DISK = {"to": "disk", "min_bytes": 64}

# Settings, the technique that they are about, and how far its losses may be from the plain ones (relative).
SETTINGS: dict[str, tuple[dict[str, Any], str, float]] = {
    "nothing": ({}, "precision", 0.0),
    "preprocessing": ({"preprocess": [Map(_unchanged)]}, "preprocess", 0.0),
    "bf16-mixed": ({"precision": "bf16-mixed"}, "precision", 0.05),
    "16-mixed": ({"precision": "16-mixed"}, "precision", 0.01),
    "flash attention": ({"flash_attention": "sdpa"}, "flash_attention", 1e-5),
    "flash attention, auto": ({"flash_attention": "auto"}, "flash_attention", 1e-5),
    "in-place activations": ({"inplace_activations": True}, "inplace_activations", 0.0),
    "channels_last": ({"memory_format": "channels_last"}, "memory_format", 1e-5),
    "memory format, auto": ({"memory_format": "auto"}, "memory_format", 1e-5),
    "checkpointing, full": ({"gradient_checkpointing": "full"}, "gradient_checkpointing", 1e-6),
    "checkpointing, selective": ({"gradient_checkpointing": "selective"}, "gradient_checkpointing", 1e-6),
    "checkpointing, budget": ({"gradient_checkpointing": {"budget": "1GiB"}}, "gradient_checkpointing", 0.0),
    "sparse activations": ({"sparse_activations": "auto"}, "sparse_activations", 0.0),
    "offloading, host": ({"activation_offloading": HOST_MEMORY}, "activation_offloading", 0.0),
    "offloading, disk": ({"activation_offloading": DISK}, "activation_offloading", 0.0),
    "compilation": ({"compile": "on"}, "compile", 1e-5),
    "all in float32": (ALL, "gradient_checkpointing", 1e-5),
    "all, compiled": ({**ALL, "compile": "on"}, "gradient_checkpointing", 1e-5),
    "all in bfloat16": ({**ALL, "precision": "bf16-mixed"}, "gradient_checkpointing", 0.05),
    "all in float16": (
        {**ALL, "precision": "16-mixed", "gradient_checkpointing": "selective"},
        "gradient_checkpointing",
        0.01,
    ),
    "all that saves memory": (
        {**ALL, "sparse_activations": "auto", "activation_offloading": HOST_MEMORY},
        "activation_offloading",
        1e-5,
    ),
    "all, unverified": ({**ALL, "verify": False}, "gradient_checkpointing", 1e-5),
}

# Rows whose technique may find nothing to do: no layout in a transformer, a slower one taken back.
NOTHING_TO_DO = {
    ("channels_last", False),
    ("memory format, auto", False),
    ("memory format, auto", True),
    ("in-place activations", False),
    ("flash attention", True),
    ("flash attention, auto", True),
    ("flash attention, auto", False),
}

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.filterwarnings("ignore:memory_format was asked for and found no site"),
    pytest.mark.filterwarnings("ignore:flash_attention was asked for and found no site"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
# The rows that only join what other rows have: their numbers are checked with everybody's, how they come and go in
# `make test-slow`.
JOINED = ("flash attention, auto", "all in bfloat16", "all in float16", "all that saves memory", "all, unverified")


def rows(*slow: str) -> pytest.MarkDecorator:
    """Every row of the table, those named only in `make test-slow`."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in SETTINGS]
    )


every_setting = rows("all, compiled")
every_technique = rows("all, compiled", *JOINED)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Captures, and runs the graph as it is (test_compilation.py compiles for real); times once."""

    def compile_call(module: nn.Module, options: dict[str, Any], prepare: Any = None) -> None:
        module._compiled_call_impl = torch.compile(
            lambda *args, **kwargs: module._call_impl(*args, **kwargs), backend="eager"
        )

    monkeypatch.setattr(compilation, "compile_call", compile_call)
    monkeypatch.setattr(trial, "MIN_PAIRS", 1)
    monkeypatch.setattr(trial, "MAX_PAIRS", 1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def start(model: nn.Module, name: str) -> Engine:
    return accelerate(model, Plan(**{**OFF, **SETTINGS[name][0]}), host=HOST)


def model_for(task: Task, name: str) -> nn.Module:
    """The task's model; without dropout where compiled code recomputes, which draws other random numbers."""
    model = task.model()
    settings = SETTINGS[name][0]
    if "compile" in settings and "gradient_checkpointing" in settings:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


class Loop:
    """A plain PyTorch training loop, with or without a handle."""

    def __init__(self, model: nn.Module, task: Task, handle: Engine | None = None, *, clips: bool = False) -> None:
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


@every_task
@every_setting
def test_training_gives_the_plain_loops_losses(task: Task, name: str) -> None:
    settings, technique, tolerance = SETTINGS[name]
    plain = model_for(task, name)
    model = copy.deepcopy(plain)
    handle = start(model, name)
    losses = Loop(model, task, handle).run(range(5))
    assert losses == pytest.approx(Loop(plain, task).run(range(5)), rel=max(tolerance, 1e-12))
    if settings and (name, isinstance(plain, TinyCNN)) not in NOTHING_TO_DO:
        assert handle.report.of(technique).is_on, handle.report.to_text()
    handle.undo()


@every_task
@every_technique
def test_undone_it_is_the_model_that_was_passed_in(task: Task, name: str) -> None:
    model = model_for(task, name)
    Loop(model, task).run(range(1))
    before = structure(model)
    handle = start(model, name)
    Loop(model, task, handle).run(range(3))
    handle.undo()
    assert structure(model) == before
    plain = copy.deepcopy(model)
    assert Loop(model, task).run(range(3)) == Loop(plain, task).run(range(3))


@every_task
@every_setting
def test_state_dict_does_not_notice(task: Task, name: str) -> None:
    model = model_for(task, name)
    before = copy.deepcopy(model.state_dict())
    handle = start(model, name)

    def assert_same() -> None:
        now = model.state_dict()
        assert list(now) == list(before)
        for key, value in now.items():
            assert (value.shape, value.dtype) == (before[key].shape, before[key].dtype)
            assert torch.equal(value, before[key])

    assert_same()
    Loop(model, task, handle).run(range(3))
    fresh = task.model(seed=7)
    fresh.load_state_dict(model.state_dict())
    model.load_state_dict(before)
    assert_same()
    handle.undo()
    assert_same()


@every_task
@every_technique
def test_a_copy_made_in_the_middle_of_a_run_is_independent(task: Task, name: str) -> None:
    """As EMA and SWA make it: the copy's forward must use the copy's weights, and train on its own."""
    model = model_for(task, name)
    handle = start(model, name)
    loop = Loop(model, task, handle)
    loop.run(range(3))
    twin = copy.deepcopy(model)
    inputs = task.batch()[0]
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model(inputs)
        for parameter in model.parameters():
            parameter.zero_()
        torch.manual_seed(0)
        torch.testing.assert_close(twin(inputs), expected, rtol=1e-4, atol=1e-4)
    handle.undo()
    losses = Loop(twin, task).run(range(3))
    assert losses[-1] > 0.1
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert not any(parameter.any() for parameter in model.parameters())
    for module in twin.modules():
        bound = vars(module).get("forward")
        assert bound is None or bound.__self__ is module


@every_task
@every_technique
def test_pickled_in_the_middle_of_a_run_it_is_a_plain_model(task: Task, name: str) -> None:
    model = model_for(task, name)
    handle = start(model, name)
    Loop(model, task, handle).run(range(3))
    twin = pickle.loads(pickle.dumps(model))
    handle.undo()
    assert Loop(twin, task).run(range(3)) == pytest.approx(Loop(model, task).run(range(3)), rel=1e-5)


@every_task
@every_technique
@pytest.mark.filterwarnings("ignore:.* was asked for and found no site. already:lightning_accel.AccelWarning")
def test_applied_twice_is_applied_once(task: Task, name: str) -> None:
    plain = model_for(task, name)
    before = structure(plain)
    model = copy.deepcopy(plain)
    once, twice = start(plain, name), start(model, name)
    again = start(model, name)  # finds its work done
    losses = Loop(model, task, twice).run(range(4))
    assert losses == pytest.approx(Loop(plain, task, once).run(range(4)), rel=1e-4)
    again.undo()
    twice.undo()
    once.undo()
    assert structure(plain)["attributes"].keys() == before["attributes"].keys()
    assert not any("forward" in vars(m) or m._compiled_call_impl for m in model.modules())
    assert all(p.stride() == q.stride() for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@every_task
@every_technique
def test_an_exception_in_the_middle_of_a_step_restores_everything(task: Task, name: str) -> None:
    model = model_for(task, name)
    Loop(model, task).run(range(1))
    before = structure(model)
    handle = start(model, name)
    loop = Loop(model, task, handle)

    def crash() -> None:
        with handle.step():
            model(handle.batch(task.batch()[0]))
            raise KeyError("user's bug")

    for index in range(3):
        with pytest.raises(KeyError, match="user's bug"):
            crash()
        loop.step(index)  # the run can go on
    handle.undo()
    assert structure(model) == before


@every_task
@every_technique
def test_undone_in_the_middle_it_can_be_applied_again(task: Task, name: str) -> None:
    tolerance = SETTINGS[name][2]
    plain = model_for(task, name)
    model = copy.deepcopy(plain)
    handle = start(model, name)
    loop = Loop(model, task, handle)
    losses = loop.run(range(2))
    handle.undo()
    loop.handle = None
    losses += loop.run(range(2, 4))
    loop.handle = start(model, name)
    losses += loop.run(range(4, 6))
    loop.handle.undo()
    assert losses == pytest.approx(Loop(plain, task).run(range(6)), rel=max(tolerance, 1e-6), abs=1e-6)


@every_task
@every_setting
def test_evaluation_between_steps_gives_what_the_plain_model_gives(task: Task, name: str) -> None:
    model = model_for(task, name)
    handle = start(model, name)
    loop = Loop(model, task, handle)
    inputs = task.batch(9)[0]
    for index in range(3):
        loop.step(index)
        plain = pickle.loads(pickle.dumps(model)).eval()
        model.eval()
        with torch.inference_mode() if index % 2 else torch.no_grad():
            with handle.step("validate"):
                outputs = model(handle.batch(inputs)).float()
            expected = plain(inputs)
        model.train()
        torch.testing.assert_close(outputs, expected, rtol=0.05, atol=0.05)
    handle.undo()


@every_task
@every_technique
def test_the_report_has_a_reason_for_every_site(task: Task, name: str) -> None:
    model = model_for(task, name)
    handle = start(model, name)
    Loop(model, task, handle).run(range(3))
    for technique, record in handle.report.techniques.items():
        assert record.status
        assert all(model.get_submodule(site) is not None for site in handle.report.applied(technique))
        assert all(handle.report.refused(technique).values())
        assert not {*handle.report.applied(technique)} & {*handle.report.refused(technique)}
    handle.undo()
