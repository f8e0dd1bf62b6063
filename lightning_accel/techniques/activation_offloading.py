"""Activation offloading: what is saved for the backward pass waits for it in host memory, or on a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn
from typing_extensions import Self, override

from lightning_accel.core.byte_size import format_bytes, parse_bytes
from lightning_accel.core.clocks import clock_for
from lightning_accel.core.options import Options, Rule
from lightning_accel.core.step_timeline import StepTimeline
from lightning_accel.experiment.pair_schedule import Schedule
from lightning_accel.experiment.screening import fastest
from lightning_accel.memory.offload import Offloader, Offloading
from lightning_accel.memory.saved_tensors import saving
from lightning_accel.techniques.base import BuildContext, OomFallback, Technique, Traits
from lightning_accel.techniques.registry import register

OffloadingSetting = Literal["host", "disk", "auto", "off"]
Folder = Annotated[str, Rule("a folder that exists", lambda name, folder: Path(folder).is_dir())] | None

DEPTHS = (1, 2, 4, 8)
WARM_UP_STEPS = 3  # the trials of other techniques, and buffers that are made
ROUNDS = 5
_RECORDING = ("reduce-overhead", "max-autotune")  # modes of compile by which torch records CUDA graphs


@dataclass(frozen=True, kw_only=True, repr=False)
class OffloadingOptions(Options, owner="memory.offload"):
    """Activation offloading in detail: what ``MemoryOptions(offload=)`` takes when a place is not enough.

    Attributes:
        to: ``"host"`` moves what is saved for the backward pass to pinned memory of the host and back, ``"disk"`` to a
            memory-mapped file. With a memory budget the planner decides which blocks do so: none with ``"off"``; with
            ``"auto"`` it may take the host's memory on a GPU, and without a budget nothing is moved.
        min_bytes: Saved tensors smaller than this stay on the device: bytes, or text such as ``"256KiB"``.
        folder: Where the file is made; None: the folder for temporary files.
    """

    to: OffloadingSetting = "auto"
    min_bytes: Annotated[int | str, Rule("an int of bytes, or text such as '256KiB'", parse_bytes)] = 1 << 20
    folder: Folder = None

    @property
    def always(self) -> bool:
        """Whether it is asked for, memory budget or not."""
        return self.to in ("host", "disk")

    def on(self, device_type: str) -> Offloading | None:
        """Where what a device saves may be offloaded to; None: nowhere. ``"auto"`` is the host's memory on a GPU."""
        to = ("host" if device_type == "cuda" else "off") if self.to == "auto" else self.to
        if to == "off":
            return None
        return Offloading(to, int(parse_bytes("activation_offloading.min_bytes", self.min_bytes)), self.folder)


def _conflicts(settings: OffloadingOptions, all_settings: Mapping[str, Any], verify: bool) -> None:
    compiled = all_settings["compile"]
    if settings.always and compiled in _RECORDING:
        raise ValueError(
            f"memory.offload={settings.to!r} with compile={compiled!r}, which records CUDA"
            " graphs: their activations have fixed places in memory and cannot be moved."
            " Give compile='on' or 'max-autotune-no-cudagraphs', or memory.offload='off'."
        )


def _oom_fallbacks(settings: OffloadingOptions, context: BuildContext) -> Iterator[OomFallback]:
    # What the host holds is no use to a CPU; and graphs that were recorded, or a budget, have plans of their own.
    is_taken = context.settings["memory_budget"].budget != "off"
    is_recorded = context.settings["compile"] in _RECORDING
    if settings.to == "auto" and context.device.type == "cuda" and not (is_taken or is_recorded):
        yield OomFallback(replace(settings, to="host"), costs=0.25, keeps=0.1)


@register("activation_offloading", options=OffloadingOptions, after="sparse_activations", exactness="exact")
class ActivationOffloading(Technique):
    """Offloads the saved tensors of every training step."""

    traits = Traits(
        acts_without_sites=True,
        not_on={
            "mps": "an Apple GPU computes in the host's memory, of which moving would free none, and to a disk nothing"
            " is moved from there. Use gradient_checkpointing to need less memory",
            "xla": "XLA moves what it computes with itself, and nothing can be copied beside it. Use"
            " torch_xla.utils.checkpoint to need less memory",
        },
        conflicts=_conflicts,
        oom_fallbacks=_oom_fallbacks,
    )

    def __init__(self, plan: OffloadingOptions, model: nn.Module, device: torch.device) -> None:
        offloading = plan.on(device.type)
        assert offloading is not None
        self.offloader = Offloader(device, offloading)
        self.run.at_end.callback(self.offloader.close)
        self._plan = plan
        self._model = model
        self._search = DepthSearch(device)
        self._gains_nothing = plan.to == "host" and device.type == "cpu"
        self.run.status = self._describe(None)

    @classmethod
    @override
    def from_settings(cls, settings: OffloadingOptions, context: BuildContext) -> Self | None:
        if not settings.always or context.settings["memory_budget"].budget != "off":
            return None  # the planner of the budget decides what is offloaded
        return cls(settings, context.model, context.device)

    @override
    @contextmanager
    def step(self, stage: str) -> Iterator[None]:
        if stage != "train" or not torch.is_grad_enabled():
            self._search.interrupt()
            yield
            return
        self._search.next_step()
        self.offloader.prefetch_depth = self._search.depth
        before = self.offloader.stats.bytes_out
        try:
            with saving(self.offloader, self._model):
                yield
        finally:
            for complaint in self.offloader.complaints:
                self.run.warn(complaint)
            self.offloader.complaints.clear()
            self.run.status = self._describe(self.offloader.stats.bytes_out - before)

    def _describe(self, step_bytes: int | None) -> str:
        if step_bytes is None:
            amount = "waiting for the first step"
        elif step_bytes == 0:
            amount = f"no saved tensor has {self._plan.min_bytes} bytes: min_bytes sets how large they must be"
        else:
            amount = f"{format_bytes(step_bytes)} a step out and back, {self._search.describe()}"
        if self._gains_nothing:
            amount += " (on a CPU that is the memory they come from, so none is saved: memory.offload='disk' saves it)"
        return f"{self._plan.to}: {amount}"


class DepthSearch:
    """How far ahead to bring tensors back: every depth for some steps, then the smallest that is as fast as any.

    What is timed goes from the beginning of one training step to that of the next. A GPU's clock is read when it
    has got there; nothing waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.depth = 2  # to use now
        self._left_to_warm_up = WARM_UP_STEPS
        self._ms = ms = {depth: list[float]() for depth in DEPTHS}  # of each step
        self._steps = dict.fromkeys(DEPTHS, 0)  # how many there were, also of those whose time is not known yet
        self._timeline = StepTimeline(clock_for(device), lambda step: ms[step.labels[self]].append(step.cycle_ms))
        self._schedule, self._is_over = Schedule(), False

    def describe(self) -> str:
        """The depth, and whence it is."""
        is_exempt = torch.are_deterministic_algorithms_enabled()
        how = "a deterministic run goes by no clock" if is_exempt else "being measured"
        return f"prefetch depth {self.depth} ({'measured' if self._is_over else how})"

    def next_step(self) -> None:
        """A training step begins."""
        if self._is_over or torch.are_deterministic_algorithms_enabled():
            return
        if self._left_to_warm_up > 0:
            self._left_to_warm_up -= 1
            return
        self._timeline.labels[self] = self.depth
        self._steps[self.depth] += self._timeline.steps_ended(1)
        if min(map(len, self._ms.values())) >= ROUNDS:
            self.depth = fastest(self._ms)
            self._is_over = True
            return
        self.depth = min(self._schedule.order(DEPTHS), key=self._steps.__getitem__)

    def interrupt(self) -> None:
        """Something else than a training step happens: the time until the next one tells nothing."""
        self._timeline.pause()
