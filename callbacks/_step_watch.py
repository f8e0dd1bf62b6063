"""Steps that are watched operation by operation: their FLOPs are counted, and for the record they are taken apart.

Beside the FLOPs is what the device could do at most.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lightning_accel.callbacks._allowance import Allowance
from lightning_accel.callbacks._announcements import tuning_of
from lightning_accel.callbacks._epoch_ends import is_last_of_epoch, reaches_max_steps
from lightning_accel.callbacks._phase_sampler import PhaseSampler
from lightning_accel.callbacks._record import FitRecord
from lightning_accel.core.clocks import clock_for
from lightning_accel.core.compiled import is_compiled
from lightning_accel.core.hidden_warnings import hidden_warnings
from lightning_accel.core.torch_private.compilation import dynamo_is_loaded
from lightning_accel.evidence.flops import FlopMode
from lightning_accel.evidence.op_profiler import AnatomyMode
from lightning_accel.lightning.packages import Trainer, get_available_flops

_FIRST_COUNTED_STEP = 3
_TAKEN_APART_AGAIN = 100  # steps, if live trials have settled by then, else so many later
_OPERATION_S = 2e-4  # of those that a parameter has in a step, each watched
_TAKING_APART_S = 0.03


def has_settled(trainer: Trainer) -> bool:
    """Whether live trials are over, or there are none."""
    tuning = tuning_of(trainer)
    return tuning is None or tuning.is_settled


class StepWatch:
    """Decides which steps of a fit are watched.

    Attributes:
        phases: Knows which phase a step is in; None if steps are not taken apart.
        next_at: The number of steps after which one is to be watched; None if none is.
    """

    def __init__(self, trainer: Trainer, flops: FlopMeter, allowance: Allowance) -> None:
        self._trainer, self._flops, self._allowance = trainer, flops, allowance
        self.phases: PhaseSampler | None = None
        self.next_at: int | None = None
        self._was_taken_apart = False
        self._parameters = 0  # counted once

    def look(self, steps: int) -> bool:
        """Has the next step watched if the run can pay for that. Returns whether there is a step to be watched."""
        is_to_come = self._flops.is_due or (self.phases is not None and not self._was_taken_apart)
        if is_to_come and self._allowance.can_pay(self._costs_s()):
            self.next_at = steps
        return is_to_come

    def begin_if_time(self, steps: int, batch: Any, batch_idx: int) -> None:
        """Watches the step that begins after ``steps`` others, if it is one to watch."""
        is_time = steps + 1 >= _FIRST_COUNTED_STEP or self._is_last_chance(batch_idx)
        if not self._flops.is_due and not has_settled(self._trainer):
            self.next_at = steps + _TAKEN_APART_AGAIN
            return
        trainer, phases = self._trainer, self.phases
        module, device = trainer.lightning_module, trainer.strategy.root_device
        if not (is_time and has_room_for_eager_step(module, device)):
            return
        if phases is None:
            self._flops.open(FlopMode())
            return
        phases.watch()
        # Not among the first steps, in which memory budgets are planned by the same meter.
        meters = steps >= _TAKEN_APART_AGAIN
        mode = AnatomyMode(module, clock_for(device), lambda: phases.is_at_optimizer, meters=meters)
        mode.begin(batch, trainer.optimizers)
        self._flops.open(mode)

    def ended(self, steps: int, record: FitRecord | None) -> None:
        """Takes up what a watched step has shown, when it has ended as the step with this number."""
        self._was_taken_apart |= self.phases is not None
        mode = self._flops.close(keep=True)
        if not self._flops.is_due:  # else it is tried again at the next one
            is_to_come = self.phases is not None and steps < _TAKEN_APART_AGAIN
            is_payable = is_to_come and self._allowance.can_pay(self._costs_s())
            self.next_at = _TAKEN_APART_AGAIN if is_payable else None
        if isinstance(mode, AnatomyMode) and record is not None:
            with self._allowance.paying():
                record.took_apart(lambda: mode.taken(self._trainer.optimizers))

    def _costs_s(self) -> float:
        """What it takes to watch a step, about: it runs uncompiled, and is told of every operation."""
        self._parameters = self._parameters or sum(1 for _ in self._trainer.lightning_module.parameters())
        told_s = 0.0 if self.phases is None else _TAKING_APART_S
        return 2 * self._allowance.step_s + _OPERATION_S * self._parameters + told_s

    def _is_last_chance(self, batch_idx: int) -> bool:
        """Whether no step is to follow, and this one is the user's own: AccelPlugin's early steps hold its trials."""
        trainer = self._trainer
        if any(kind.__module__.startswith("lightning_accel.") for kind in type(trainer.precision_plugin).__mro__):
            return False
        is_last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
        return (is_last_epoch and is_last_of_epoch(trainer, batch_idx)) or reaches_max_steps(trainer)


class FlopMeter:
    """Counts one training step of a run, opened and closed by hand in two hooks."""

    _MAX_TRIES = 5

    def __init__(self) -> None:
        self.flops: int | None = None  # the FLOPs of one step; None until known
        self.is_due = True  # whether a step should still be counted
        self.is_open = False  # whether one is being counted
        self._tries = 0
        self._mode: FlopMode | None = None
        self._contexts = ExitStack()

    def open(self, mode: FlopMode) -> None:
        self._tries += 1
        if dynamo_is_loaded():
            # Under a dispatch mode torch.compile marks what it meets as never to be compiled, and forgets what it
            # has compiled: one counted step would turn compilation off for the rest of the run (torch 2.13). In this
            # stance it leaves its cache alone and runs the step eagerly, where every operation can be seen as well.
            self._contexts.enter_context(torch.compiler.set_stance("force_eager"))
        self._mode = self._contexts.enter_context(mode)
        self.is_open = True

    def close(self, *, keep: bool = False) -> FlopMode | None:
        """Leaves the mode, in whatever state the step ended; ``keep`` takes its count if it is a whole step's.

        Returns:
            The mode, if its count was taken.
        """
        mode, self._mode, self.is_open = self._mode, None, False
        self._contexts.close()
        if mode is None or not keep:
            return None
        # A step without a backward pass (training_step returned None) says nothing about the others.
        is_whole = mode.saw_backward and mode.failure is None
        if is_whole:
            self.flops = mode.flops or None
        self.is_due = not is_whole and self.flops is None and self._tries < self._MAX_TRIES
        return mode if is_whole else None


def has_room_for_eager_step(model: nn.Module, device: torch.device) -> bool:
    """Whether one step of ``model`` can run uncompiled without a risk of running out of device memory.

    Eager mode keeps more activations than compiled code does, though never twice the whole pool.
    """
    if device.type != "cuda" or not any(map(is_compiled, model.modules())):
        return True
    total = torch.cuda.get_device_properties(device).total_memory
    return bool(2 * torch.cuda.memory_reserved(device) <= total)


_DTYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}

# Lightning 2.6 lists the H200 by a name that no H200 has, and with its rates for sparse matrices. Dense rates, from
# https://www.nvidia.com/en-us/data-center/h200/ (the SXM part; the NVL part has "NVL" in its name).
_H200_SXM = {torch.float64: 33.5e12, torch.float32: 66.9e12, torch.float16: 989.4e12, torch.bfloat16: 989.4e12}
_H200_SXM_TF32 = 494.7e12


def peak_flops_per_sec(device: torch.device, precision: str) -> float | None:
    """What ``device`` can do at most in the dtype of a Lightning ``precision`` such as ``"bf16-mixed"``."""
    dtype = _DTYPES.get(precision.partition("-")[0])
    if dtype is None or device.type != "cuda":
        return None
    if torch.cuda.get_device_name(device).upper() == "NVIDIA H200":
        uses_tf32 = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
        return _H200_SXM_TF32 if uses_tf32 else _H200_SXM.get(dtype)
    with hidden_warnings():  # it warns about every device it does not know
        try:
            return get_available_flops(device, dtype)
        except Exception:  # parses device names by position, and stumbles over new ones
            return None
