"""Techniques built from a plan, and what applies them in a plain PyTorch loop: `accelerate`, `plan_memory`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_accel.arguments import MemoryOptions
from lightning_accel.core.device import device_of
from lightning_accel.core.host import Host
from lightning_accel.core.optimizers import living_optimizers
from lightning_accel.core.options import Options
from lightning_accel.core.report import AccelError, Report
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.engine import Engine
from lightning_accel.memory.planner import MAX_STEPS
from lightning_accel.memory.schedule import MemorySchedule
from lightning_accel.settings import Plan
from lightning_accel.techniques.activation_offloading import OffloadingOptions, OffloadingSetting
from lightning_accel.techniques.base import BuildContext, OomFallback, Technique
from lightning_accel.techniques.gradient_checkpointing import MemoryBudget
from lightning_accel.techniques.mixed_precision import MixedPrecision
from lightning_accel.techniques.registry import declarations, plain
from lightning_accel.tuning.tuning_result import Tuning
from lightning_accel.tuning.turns import LoopTuning

LIGHTNINGS_OWN = ("precision", "preprocess")
"""Techniques that plugins and loops of Lightning carry out in a Lightning run."""


def build_context(
    plan: Plan,
    model: nn.Module,
    host: Host,
    *,
    device: torch.device | None = None,
    in_plain_loop: bool = False,
) -> BuildContext:
    """Builds the techniques that ``plan`` enables, in the order of application, and the data that they share.

    Args:
        plan: The settings.
        model: The model to which the techniques will be applied.
        host: The machine.
        device: The device on which the model will compute. None stands for the model's current device.
        in_plain_loop: Whether to build the techniques that Lightning carries out itself, too.
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
    """A way to need less memory, with the name of its technique.

    Attributes:
        name: The technique's name.
        fallback: The way to need less memory.
    """

    name: str
    fallback: OomFallback

    @property
    def settings(self) -> Any:
        """Returns the settings as plain values for checkpoints: ``"full"``, or a mapping if one word is not enough."""
        settings = self.fallback.settings
        return plain(settings.short() if isinstance(settings, Options) else settings)

    @property
    def plan(self) -> Plan:
        """Returns a plan that uses the fallback from the first step on."""
        return Plan().replace(**{self.name: self.fallback.settings})

    def __str__(self) -> str:
        return repr(self.plan)[len("Plan(") : -1]

    def make(self, around: BuildContext) -> Technique | None:
        """Builds the technique with these settings for a run under way, and adds it to ``around``."""
        around.settings = {**around.settings, self.name: self.fallback.settings}
        technique = declarations()[self.name].technique.from_settings(self.fallback.settings, around)
        if technique is not None:
            technique.run.verify = around.verify
            technique.run.on_by_default = True  # the user did not ask for it: if it fails, another one may follow
            around.techniques = [*(one for one in around.techniques if one.name != self.name), technique]
        return technique


def fallbacks_for(around: BuildContext) -> list[NamedFallback]:
    """Returns the techniques' fallbacks for a step that ran out of memory, the one that costs the least time first."""
    found = [
        NamedFallback(name, fallback)
        for name, declaration in declarations().items()
        for fallback in declaration.technique.traits.oom_fallbacks(around.settings[name], around)
    ]
    return sorted(found, key=lambda one: one.fallback.costs)


class AcceleratedModel:
    """A model accelerated by a plan in a plain PyTorch loop, as :func:`accelerate` returns it.

    Attributes:
        model: The module that was passed in.
        engine: The engine, which decides on the techniques and applies them.
        scaler: The gradient scaler. It does nothing unless the precision is ``"16-mixed"``.
    """

    def __init__(self, engine: Engine, scaler: torch.amp.GradScaler, tuning: LoopTuning | None = None) -> None:
        self.model = engine.model
        self.engine = engine
        self.scaler = scaler
        self._tuning = tuning

    @property
    def report(self) -> Report:
        """Returns the report: the changes, their sites, and the reasons why other sites stay unchanged."""
        return self.engine.report

    @property
    def memory_schedule(self) -> MemorySchedule | None:
        """Returns what each block does for the memory budget, also after the run. None if no budget or undecided."""
        budget = self.engine.technique(MemoryBudget)
        return None if budget is None else budget.memory_schedule

    @property
    def tuning(self) -> Tuning | None:
        """Returns the results of live trials, also after the run. None if no trials have begun."""
        return None if self._tuning is None else self._tuning.tuning

    def step(self, stage: str = "train") -> AbstractContextManager[None]:
        """Returns a context for forward and loss of a ``"train"``, ``"validate"``, ``"test"`` or ``"predict"`` step."""
        if self._tuning is not None:
            self._tuning.step_begins() if stage == "train" else self._tuning.interrupt()
        return self.engine.step(stage)

    def batch(self, batch: Any, stage: str | None = None) -> Any:
        """Moves a batch, any structure of tensors, to the device and applies the plan's layout and transforms.

        The stage defaults to that of the current step, else to ``"train"`` or ``"validate"`` by the model's own mode.
        """
        return self.engine.batch(batch, stage)

    def undo(self) -> None:
        """Undoes every edit, so that the model is again as it was passed in. The report stays."""
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
        plan: The settings; by default those of ``AccelPlugin()``.
        optimizers: The optimizers that train the model. If they are not torch's own, or lack some of its parameters,
            the first step searches the whole process for others. An optimizer that is made later and given a state of
            another layout is not noticed.
        steps: The approximate number of training steps. It limits how much time live trials may take.
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
