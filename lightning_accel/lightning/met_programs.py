"""What is known of a program before its fit: by this process, which forgets when it ends, by files and checkpoints."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_accel.core.compiled import is_compiled
from lightning_accel.core.host import Host
from lightning_accel.core.purse import SHARE
from lightning_accel.core.torch_private.compilation import compiling_ms
from lightning_accel.core.tree import tensors_in
from lightning_accel.experiment.store import Key
from lightning_accel.lightning.live_trials import program_of
from lightning_accel.lightning.packages import LightningModule
from lightning_accel.lightning.run_state import RunState
from lightning_accel.settings import Plan
from lightning_accel.tuning import verdict_cache
from lightning_accel.tuning.model_fingerprint import described
from lightning_accel.tuning.tuning_result import Tuning
from lightning_accel.tuning.verdict_cache import Known

_MOST = 256  # programs; then all of them are forgotten


@dataclass
class Met:
    """What is known of one program.

    Attributes:
        held: What its module held before its first step, in words, and the shapes of its first batch.
        step_s: Seconds that a plain step took.
        opening_s: Seconds that it took to put the plan to work; 0.0 if the run was over before.
        tuning: What live trials have settled.
    """

    held: tuple[str, Any]
    step_s: float
    opening_s: float = 0.0
    tuning: Tuning | None = None


PROGRAMS: dict[Any, Met] = {}
"""By :func:`signature_of`."""


def signature_of(module: LightningModule, plan: Plan) -> Any:
    """What tells a program from others of this process, at nearly no cost: classes, parameters, plan."""
    if len(PROGRAMS) > _MOST:
        PROGRAMS.clear()
    kinds = tuple(type(part) for part in module.modules())
    shapes = tuple((p.shape, p.dtype) for p in module.parameters() if not torch.nn.parameter.is_lazy(p))
    trainer = module.trainer
    terms = torch.get_num_threads(), module.device, type(trainer.strategy), trainer.accumulate_grad_batches
    return kinds, shapes, terms, plan


class FitProgram:
    """What is known of the program of one fit."""

    def __init__(self, module: LightningModule, host: Host, plan: Plan, kept: RunState) -> None:
        self._module, self._host, self._plan, self._kept = module, host, plan, kept
        self.program: Key | None = None  # for the cache of verdicts, once it was looked up
        self.known: Known | None = None  # what the cache has of it
        self.earlier: Tuning | None = None  # what trials of one like it have settled in this process
        self._compiling_ms = compiling_ms()
        self._signature: Any = None
        self._held = ""  # by the module before its first step, which changes it: in words
        self._first: list[Tensor] = []  # the first batch, without its data

    def meet(self, batch: Any) -> Met | None:
        """Takes the shapes of the first batch. Returns what this process knows of a program of this signature."""
        tensors = [tensor for tensor in tensors_in(batch) if not tensor.is_nested]
        self._first = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]
        self._signature = signature_of(self._module, self._plan)
        return PROGRAMS.get(self._signature)

    def describe(self) -> None:
        """Describes what the module holds, by which its program is told from others of the same signature."""
        self._held = described(self._module)

    def met(self) -> Met | None:
        """What this process knows of this very program."""
        met = PROGRAMS.get(self._signature)
        if met is None or met.held != self._whole:
            return None
        self.earlier = met.tuning and replace(copy.deepcopy(met.tuning), is_earlier=True)
        return met

    def is_too_short(self, met: Met, steps: float) -> bool:
        """Whether a run of so many steps can never pay for a look, even if they take twice as long as expected."""
        now, then = (sum(shape.numel() for shape, _ in shapes) for shapes in (self._whole[1], met.held[1]))
        larger: float = max(1.0, now / max(1, then))
        return 2 * larger * SHARE * steps * met.step_s < (met.opening_s or self.opening_s)

    @functools.cached_property
    def opening_s(self) -> float:
        """Estimated seconds to put the plan to work, with the longer first steps after it, by the number of modules.

        It leaves the trials of techniques out. Compiled modules are compiled once more, for another number format.
        """
        modules = list(self._module.modules())
        is_first = not any(met.opening_s for met in PROGRAMS.values())  # what a process imports once
        compiling_s = (compiling_ms() - self._compiling_ms) / 1e3 if any(map(is_compiled, modules)) else 0.0
        return 0.022 * is_first + 0.022 + 0.0002 * len(modules) + compiling_s

    @property
    def _whole(self) -> tuple[str, Any]:
        return self._held, tuple((tensor.shape, tensor.dtype) for tensor in self._first)

    @property
    def tuning(self) -> Tuning | None:
        """What an earlier run has settled for this module, this program, or one that looks like it."""
        of_program = None if self.known is None else self.known.tuning
        return self._kept.tuning or of_program or self.earlier

    @property
    def is_decided(self) -> bool:
        """Whether an earlier run of the module, or the checkpoint that this one goes on from, has decided."""
        return self._kept.tuning is not None or bool(self._kept.decisions or self._kept.put_on)

    def recall(self) -> None:
        """Looks the program up in the cache of verdicts."""
        if self.program is None and not self.is_decided:
            if self._held:
                trainer = self._module.trainer
                self.program = program_of(trainer, self._first, self._host, repr(self._plan), self._held)
            self.known = None if self.program is None else verdict_cache.recall(self.program)

    def restart(self, settled: Tuning) -> None:
        """Has only ``settled`` be known."""
        self._kept.tuning, self.known, self.earlier = None, None, settled

    def remember(self, step_s: float | None, opening_s: float) -> None:
        """Keeps, where the plan goes to work, what a plain step and that took."""
        if self._signature is not None and step_s is not None:
            PROGRAMS[self._signature] = Met(self._whole, step_s, opening_s, self.tuning)

    def end(self, step_s: float | None, settled: Tuning | None) -> None:
        """Keeps what live trials have settled and what a step took, for the next fit of this program."""
        met = PROGRAMS.get(self._signature)
        if met is not None:
            met.tuning = copy.deepcopy(settled) or met.tuning
        elif self._signature is not None and step_s is not None:
            PROGRAMS[self._signature] = Met(self._whole, step_s)
