"""Which techniques a plan comes to, and their face for a plain PyTorch loop: :func:`accelerate`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_accel.core.device import device_of
from lightning_accel.core.host import Host
from lightning_accel.core.options import Options
from lightning_accel.core.report import Report
from lightning_accel.engine import Engine
from lightning_accel.memory.schedule import MemorySchedule
from lightning_accel.settings import Plan
from lightning_accel.techniques.base import BuildContext, OomFallback, Technique
from lightning_accel.techniques.gradient_checkpointing import MemoryBudget
from lightning_accel.techniques.mixed_precision import MixedPrecision
from lightning_accel.techniques.registry import declarations, plain
from lightning_accel.tuning.loop import LoopTuning
from lightning_accel.tuning.tuning_result import Tuning

LIGHTNINGS_OWN = ("precision", "preprocess")
"""Techniques that Lightning's own parts do in a Lightning run."""


def build_context(
    plan: Plan,
    model: nn.Module,
    host: Host,
    *,
    device: torch.device | None = None,
    in_plain_loop: bool = False,
) -> BuildContext:
    """The techniques that ``plan`` asks for, in the order in which they are applied, and what they have for each other.

    Args:
        plan: The settings.
        model: What they will be applied to.
        host: The machine.
        device: Where the model will compute; None: where it is.
        in_plain_loop: Whether to do, too, what Lightning does itself.
    """
    around = BuildContext(model, host, device or device_of(model), plan.trust != "unchecked", plan.settings())
    for name, declaration in declarations().items():
        settings = around.settings[name]
        if declaration.is_off(settings) or (name in LIGHTNINGS_OWN and not in_plain_loop):
            continue
        technique = declaration.technique.from_settings(settings, around)
        if technique is not None:
            run, is_auto = technique.run, declaration.switch(settings) == "auto"
            run.verify, run.timed = plan.trust != "unchecked", plan.trust != "checked"
            run.on_by_default = settings == declaration.default
            run.explicit = not (run.on_by_default or is_auto)
            around.techniques.append(technique)
    return around


@dataclass(frozen=True)
class NamedFallback:
    """A way to need less memory, and whose it is.

    Attributes:
        name: The technique's.
        fallback: The way.
    """

    name: str
    fallback: OomFallback

    @property
    def settings(self) -> Any:
        """As plain values, for checkpoints: ``"full"``, or a mapping where that does not say it."""
        settings = self.fallback.settings
        return plain(settings.short() if isinstance(settings, Options) else settings)

    @property
    def plan(self) -> Plan:
        """A plan that has it from the beginning."""
        return Plan().replace(**{self.name: self.fallback.settings})

    def __str__(self) -> str:
        return repr(self.plan)[len("Plan(") : -1]

    def make(self, around: BuildContext) -> Technique | None:
        """The technique with these settings, for a run under way; it becomes one of ``around``."""
        around.settings = {**around.settings, self.name: self.fallback.settings}
        technique = declarations()[self.name].technique.from_settings(self.fallback.settings, around)
        if technique is not None:
            technique.run.verify = around.verify
            technique.run.on_by_default = True  # nobody asked for it: where it cannot be had, another one may
            around.techniques = [*(one for one in around.techniques if one.name != self.name), technique]
        return technique


def fallbacks_for(around: BuildContext) -> list[NamedFallback]:
    """What the techniques can do where a step has run out of memory, beginning with what costs the least time."""
    found = [
        NamedFallback(name, fallback)
        for name, declaration in declarations().items()
        for fallback in declaration.technique.traits.oom_fallbacks(around.settings[name], around)
    ]
    return sorted(found, key=lambda one: one.fallback.costs)


class AcceleratedModel:
    """A model at work under a plan, in a plain PyTorch loop: what :func:`accelerate` returns.

    Attributes:
        model: The module that was passed in.
        engine: What does it all: decisions, techniques.
        scaler: The gradient scaler; it passes everything through unless the precision is ``"16-mixed"``.
    """

    def __init__(self, engine: Engine, scaler: torch.amp.GradScaler, tuning: LoopTuning | None = None) -> None:
        self.model = engine.model
        self.engine = engine
        self.scaler = scaler
        self._tuning = tuning

    @property
    def report(self) -> Report:
        """What was done, where, and why not elsewhere."""
        return self.engine.report

    @property
    def memory_schedule(self) -> MemorySchedule | None:
        """With a memory budget, what each block does for it, once that is decided; else None. It outlives the run."""
        budget = self.engine.technique(MemoryBudget)
        return None if budget is None else budget.memory_schedule

    @property
    def tuning(self) -> Tuning | None:
        """What live trials have come to; None before they began, and where there are none. It outlives the run."""
        return None if self._tuning is None else self._tuning.tuning

    def step(self, stage: str = "train") -> AbstractContextManager[None]:
        """Enter it around forward and loss of every step: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``."""
        if self._tuning is not None:
            self._tuning.step_begins() if stage == "train" else self._tuning.interrupt()
        return self.engine.step(stage)

    def batch(self, batch: Any, stage: str | None = None) -> Any:
        """Prepares a batch, any structure of tensors: on the device, in the layout and with the transforms of the plan.

        The stage is that of the step under way, else ``"train"`` or ``"validate"`` as the model's own mode has it.
        """
        return self.engine.batch(batch, stage)

    def undo(self) -> None:
        """Takes every edit back: the model is again the one that was passed in. The report stays."""
        if self._tuning is not None:
            self._tuning.close()
        self.engine.undo()


def accelerate(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    steps: int = 1000,
    host: Host | None = None,
) -> AcceleratedModel:
    """Accelerates a model in a plain PyTorch loop.

    ```python
    optimizer = torch.optim.AdamW(model.parameters())
    handle = accelerate(model, Plan(precision="bf16-mixed"), optimizers=optimizer)
    for inputs, targets in loader:
        with handle.step():
            loss = loss_fn(model(handle.batch(inputs)), targets)
        handle.scaler.scale(loss).backward()
        handle.scaler.step(optimizer)
        handle.scaler.update()
        optimizer.zero_grad()
    handle.undo()
    ```

    Args:
        model: The module, on its device.
        plan: What to do; by default what ``AccelPlugin()`` does.
        optimizers: Those that train the model. Unless they are torch's own and have all of its parameters, others are
            looked for at the first step, in the whole process; one that is made later, and given a state of another
            layout, would not be noticed.
        steps: How many training steps there will be, about: what live trials may cost hangs on it.
        host: The machine to decide for; by default the one that holds the model's parameters.

    Raises:
        ValueError: The plan names something that the model does not have.
        AccelError: The plan is strict, and part of it cannot be done here.
    """
    plan = plan or Plan()
    host = host or Host.detect(next((parameter.device for parameter in model.parameters()), None))
    techniques = build_context(plan, model, host, in_plain_loop=True).techniques
    engine = Engine(model, host, techniques, names=list(declarations()), strict=plan.strict)
    engine.add_optimizers([optimizers] if isinstance(optimizers, Optimizer) else optimizers)
    scaler = next((t.autocast.scaler for t in techniques if isinstance(t, MixedPrecision)), None)
    tuning = LoopTuning(engine, device_of(model), steps) if plan.trust == "measured" else None
    return AcceleratedModel(engine, scaler or torch.amp.GradScaler(host.device_type, enabled=False), tuning)
