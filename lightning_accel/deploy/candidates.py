"""One model in several forms, each ready to be called: in Python with smaller numbers, or out of a file."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from lightning_accel.core.checks import nearest
from lightning_accel.core.device import synchronize
from lightning_accel.core.tree import tensors_in
from lightning_accel.deploy.exporting import export
from lightning_accel.deploy.forms import FORMS
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.deploy.plain import plain_copy
from lightning_accel.deploy.quantizing import Mode, Quantized, quantize, saved_bytes

EAGER = "eager"
MODES: tuple[str, ...] = get_args(Mode)
_INT8 = tuple(mode for mode in MODES if mode.startswith("int8"))

# A process of its own: in one that has freed memory before, what is loaded takes what lies there, and nothing grows.
_GROWTH = """
import sys, psutil, torch
from pathlib import Path
from lightning_accel.deploy.forms import FORMS
held = lambda: psutil.Process().memory_info().rss
form, path, device = sys.argv[1:]
before = held()
model = FORMS[form].load(Path(path), torch.device(device))
print(held() - before)
"""


@dataclass(frozen=True)
class Candidate:
    """A form that is to be measured.

    Attributes:
        name: ``"eager"``, a mode of ``quantize``, a form of ``export``, or both: ``"torchscript+int8-dynamic"``.
        call: The model, called as the original is.
        disk_bytes: Of the file, or of the saved weights where there is none.
        memory_bytes: Of the weights, or by how much a process grows that loads the file; None: not known.
        first_call_ms: Loading and calling it for the first time.
        remarks: What is to be known of it.
    """

    name: str
    call: Callable[..., Any] = field(repr=False)
    disk_bytes: int
    memory_bytes: int | None
    first_call_ms: float
    remarks: tuple[str, ...] = ()


def check_form(name: str) -> None:
    """Raises a ``ValueError`` unless ``name`` is a form, a mode, or one of each with a plus."""
    form, _, mode = name.partition("+")
    is_known = name == EAGER or name in MODES or (form in FORMS and (not mode or mode in MODES))
    if not is_known:
        allowed = (EAGER, *FORMS, *MODES)
        raise ValueError(
            f"forms: {name!r}{nearest(name, allowed) or '.'} Allowed: {', '.join(allowed)}, and one of each kind with a"
            " plus, 'torchscript+int8-dynamic'."
        )


def make(name: str, model: nn.Module, arguments: Arguments, calibration: Iterable[Any], folder: Path) -> Candidate:
    """A model in one form.

    Args:
        name: As :func:`check_form` lets pass.
        model: The original.
        arguments: An example.
        calibration: Batches.
        folder: For files.

    Raises:
        ExportError: The model cannot be had in this form.
        MissingPackageError: Something is not installed.
    """
    form, _, mode = name.partition("+") if name.split("+")[0] in FORMS else ("", "", name)
    made: nn.Module | Quantized = plain_copy(model)
    remarks: list[str] = []
    if mode in _INT8 or (mode in MODES and not form):
        made = quantize(model, mode, calibration=calibration)  # type: ignore[arg-type]
        remarks = [f"{layer} in float: {why}" for layer, why in made.kept.items()]
    if not form:
        module = made.model if isinstance(made, Quantized) else made
        num_bytes = saved_bytes(module)
        return Candidate(name, module, num_bytes, num_bytes, _first_call_ms(module, arguments), tuple(remarks))
    args, kwargs = arguments
    exported = export(
        made,
        kwargs or args,
        form,  # type: ignore[arg-type]
        path=folder / f"{name}{FORMS[form].ending}",
        precision=mode if mode in ("fp16", "bf16") else "32",  # type: ignore[arg-type]
    )
    remarks += [f"{dimension} is {size}, fixed by the model" for dimension, size in exported.fixed.items()]
    began = time.perf_counter()
    call = exported.load()
    loading_ms = 1e3 * (time.perf_counter() - began)
    first_ms = loading_ms + _first_call_ms(call, arguments)
    growth = _growth(form, exported.path, exported.device_type)
    return Candidate(name, call, exported.num_bytes, growth, first_ms, tuple(remarks))


def _first_call_ms(call: Callable[..., Any], arguments: Arguments) -> float:
    device = next((tensor.device for tensor in tensors_in(arguments)), torch.device("cpu"))
    began = time.perf_counter()
    with torch.no_grad():
        call(*arguments[0], **arguments[1])
    synchronize(device)
    return 1e3 * (time.perf_counter() - began)


def _growth(form: str, path: Path, device_type: str) -> int | None:
    """By how many bytes a process grows that loads a file; None where it fails."""
    command = [sys.executable, "-c", _GROWTH, form, str(path), device_type]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    last = found.stdout.strip().split("\n")[-1]
    return int(last) if found.returncode == 0 and last.isdigit() else None
