"""The FLOPs of one real training step, and what the device could do at most."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import torch
from torch import nn

from lightning_accel.core.compiled import is_compiled
from lightning_accel.core.torch_private.compilation import dynamo_is_loaded
from lightning_accel.evidence.flops import FlopMode
from lightning_accel.lightning.packages import get_available_flops


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
        if mode is not None and keep:
            # A step without a backward pass (training_step returned None) says nothing about the others.
            is_whole = mode.saw_backward and mode.failure is None
            if is_whole:
                self.flops = mode.flops or None
            self.is_due = not is_whole and self.flops is None and self._tries < self._MAX_TRIES
            return mode if is_whole else None
        return None


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about every device it does not know
        try:
            return get_available_flops(device, dtype)
        except Exception:  # parses device names by position, and stumbles over new ones
            return None
