"""A model in one of several forms, ready to be called: in Python with other numbers, or loaded from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.device import synchronize
from lightning_accel.core.module_copies import plain_copy
from lightning_accel.core.tree import tensors_in
from lightning_accel.deploy.combinations import split
from lightning_accel.deploy.exporting import export
from lightning_accel.deploy.forms import FORMS
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.quantizing import Quantized, quantize, saved_bytes
from lightning_accel.experiment.subprocess_runner import SubprocessError, Worker

_PATIENCE_S = 600.0  # for loading a form, such as building an engine

# A separate process, since a process with freed memory reuses that and does not grow.
_GROWTH = """
import sys, psutil, torch
from pathlib import Path
from lightning_accel.experiment.subprocess_runner import connect
from lightning_accel.deploy.forms import FORMS
held = lambda: psutil.Process().memory_info().rss
form, path, device = sys.argv[1:]
before = held()
model = FORMS[form].load(Path(path), torch.device(device))
connect().send(held() - before)
"""


@dataclass(frozen=True)
class Candidate:
    """A form to be measured."""

    call: Callable[..., Any] = field(repr=False)  # the model, called as the original is
    disk_bytes: int  # of the file, or of the saved weights if there is no file
    memory_bytes: int | None  # of the weights, or the growth of a process that loads the file; None if unknown
    first_call_ms: float  # loading, and the first call
    remarks: tuple[str, ...] = ()  # remarks for users


def make(name: str, model: nn.Module, arguments: Arguments, calibration: Iterable[Any], folder: Path) -> Candidate:
    """Makes a model in one form: ``"eager"``, a mode of ``quantize``, a form of ``export``, or both with a plus.

    Raises:
        ExportError: The model cannot be exported to this form.
        MissingPackageError: A package is not installed.
    """
    form, numbers = split(name)
    made: nn.Module | Quantized = plain_copy(model)
    remarks: list[str] = []
    if numbers != "32":
        made = quantize(model, numbers, calibration=calibration)
        remarks = [f"{layer or 'the model'} in float: {why}" for layer, why in made.kept.items()]
    if not form:
        module = made.model if isinstance(made, Quantized) else made
        num_bytes = saved_bytes(module)
        return Candidate(module, num_bytes, num_bytes, _first_call_ms(module, arguments), tuple(remarks))
    args, kwargs = arguments
    exported = export(made, kwargs or args, form, path=folder / f"{name}{FORMS[form].ending}")
    remarks += [f"{dimension} is {size}, fixed by the model" for dimension, size in exported.fixed.items()]
    stopwatch = Stopwatch()
    call = exported.load()
    loading_ms = 1e3 * stopwatch.seconds()
    first_ms = loading_ms + _first_call_ms(call, arguments)
    growth = _growth(form, exported.path, exported.device_type)
    return Candidate(call, exported.num_bytes, growth, first_ms, tuple(remarks))


def _first_call_ms(call: Callable[..., Any], arguments: Arguments) -> float:
    device = next((tensor.device for tensor in tensors_in(arguments)), torch.device("cpu"))
    stopwatch = Stopwatch()
    with torch.no_grad():
        call(*arguments[0], **arguments[1])
    synchronize(device)
    return 1e3 * stopwatch.seconds()


def _growth(form: str, path: Path, device_type: str) -> int | None:
    """Returns by how many bytes a process grows that loads a file; None if loading fails."""
    with suppress(SubprocessError), Worker(_GROWTH, form, str(path), device_type, patience_s=_PATIENCE_S) as loader:
        growth: int = loader.answer()
        return growth if growth >= 0 else None
    return None
