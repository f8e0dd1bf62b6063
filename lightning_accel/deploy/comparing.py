"""Compares a model in several forms by speed, size and accuracy, and recommends one."""

from __future__ import annotations

import inspect
import math
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.device import device_of
from lightning_accel.core.module_copies import plain_copy
from lightning_accel.core.report import one_line
from lightning_accel.deploy import accuracy, form_latency
from lightning_accel.deploy.accuracy import Judged
from lightning_accel.deploy.candidates import Candidate, make
from lightning_accel.deploy.checking import attempt
from lightning_accel.deploy.combinations import EAGER, split
from lightning_accel.deploy.errors import ExportError, MissingPackageError, QuantizeError
from lightning_accel.deploy.inputs import Arguments, arguments_of, inputs_and_targets, on_device, shapes_in
from lightning_accel.deploy.int8 import without_deprecations
from lightning_accel.deploy.losses import least_of, measure_of
from lightning_accel.deploy.measured_forms import Comparison, Measured
from lightning_accel.deploy.quantizing import MAX_ERROR
from lightning_accel.deploy.shapes import dimensions_of, resized, sizes_of
from lightning_accel.experiment.pair_test import RatioInterval

AS_FAST = 1.05
"""Forms whose latencies differ by less than this ratio count as equally fast: the smaller one wins."""

_AS_FAST_AS_ITSELF = RatioInterval(1.0, 1.0, 1.0)
_ROUNDING = 0.01
"""Limit of rounding errors as a share of the outputs' norm, for forms of the same precision, also bfloat16."""


def compare_forms(
    model: nn.Module,
    forms: Sequence[str],
    loader: Iterable[Any],
    metrics: Metric | Mapping[str, Metric] | None = None,
    *,
    batch_sizes: Sequence[int] = (1, 8, 32),
    max_drop: float = 0.01,
    max_batches: int = 50,
    seconds: float = 5.0,
) -> Comparison:
    """Measures a model in several forms, in turns, and recommends one.

    Candidates must be proven faster than the original (the tuner's pair test, 95%) with metrics worse by ``max_drop``
    at most. The fastest at batch 1 is recommended; of forms within 5% of it, the smallest on disk.

    Args:
        model: Accelerated or not.
        forms: Forms of ``export`` (``"onnx"``), modes of ``quantize`` (``"int8-dynamic"``), or both,
            ``"torchscript+int8-dynamic"``. The original, ``"eager"``, is always measured.
        loader: Batches of ``(inputs, targets)``, of ``(first, second, targets)`` if ``forward`` needs two inputs, or
            mappings. They are also used for calibration. A form with wrong outputs on any of them is left out.
        metrics: One torchmetrics metric, or several by name, updated with the model's first output and the targets.
            Intervals come from 100 bootstrap samples, the same for all forms.
        batch_sizes: Batch sizes at which throughput is measured.
        max_drop: How much worse a metric may be, in its own unit: 0.01 is one point of accuracy.
        max_batches: How many batches of the loader are used.
        seconds: About how long calls are timed for each form and batch size.

    Raises:
        ValueError: A form is unknown or does not support the precision; the loader is empty; batches, targets or
            metrics do not fit the model; sizes or limits are invalid.
        TypeError: ``forms`` is not a list, or ``metrics`` are not from torchmetrics.
    """
    _check(forms, batch_sizes, max_drop, max_batches, seconds)
    batches = list(islice(loader, max_batches))
    if not batches:
        raise ValueError("loader gave no batches: give one of (inputs, targets) such as the model will be served.")
    original, wanted = plain_copy(model), accuracy.named(metrics)
    first = arguments_of(original, inputs_and_targets(original, batches[0])[0])
    first = on_device(first, device_of(original))
    candidates: dict[str, Candidate] = {}
    judged: dict[str, Judged] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, without_deprecations():
        for name in dict.fromkeys((EAGER, *forms)):
            try:
                candidate = make(name, original, first, batches, Path(folder))
                found = accuracy.judge(candidate.call, original, batches, wanted)
                if name != EAGER and (off := _off(name, found, judged[EAGER])):
                    left_out[name] = off
                else:
                    judged[name], candidates[name] = found, candidate
            except (ExportError, QuantizeError, MissingPackageError) as error:
                left_out[name] = str(error)
            except Exception as error:
                if name == EAGER:
                    raise _not_taken(original, first, error) from error
                left_out[name] = one_line(error)
        size, spent, per_second = _timed(candidates, first, batch_sizes, seconds, device_of(original))
    measured = {
        name: Measured(
            latency=form_latency.latency_of(times),
            speedup=_AS_FAST_AS_ITSELF if name == EAGER else form_latency.speedup_of(spent[EAGER], times),
            samples_per_sec=per_second[name],
            first_call_ms=candidates[name].first_call_ms,
            disk_bytes=candidates[name].disk_bytes,
            memory_bytes=candidates[name].memory_bytes,
            error=accuracy.error_of(judged[name], judged[EAGER]),
            scores=accuracy.scores_of(judged[name], judged[EAGER], wanted),
            remarks=candidates[name].remarks,
        )
        for name, times in spent.items()
    }
    left_out |= {name: f"it does not take a batch of {size}" for name in candidates if name not in spent}
    recommended, why = _recommended(measured, max_drop, size)
    return Comparison(measured, left_out, max_drop, recommended, why)


def _check(forms: Sequence[str], batch_sizes: Sequence[int], max_drop: float, max_batches: int, seconds: float) -> None:
    if isinstance(forms, str):
        raise TypeError(f"forms={forms!r}: give a list, [{forms!r}].")
    for name in forms:
        split(name)
    if not min(max_batches, seconds, *batch_sizes) > 0:
        given = f"max_batches={max_batches!r}, seconds={seconds!r}, batch_sizes={batch_sizes!r}"
        raise ValueError(f"{given}. Allowed: numbers above 0.")
    if not max_drop >= 0:
        raise ValueError(f"max_drop={max_drop!r}. Allowed: 0 and more, 0.01 for a point of accuracy.")


def _off(name: str, form: Judged, original: Judged) -> str:
    """Returns how a form is wrong on the data, beyond the one batch of its own check; empty if it is right."""
    error = accuracy.error_of(form, original)
    least = _ROUNDING if split(name)[1] == "32" else MAX_ERROR
    allowed = max(least_of(outputs, least) for outputs in original.outputs)
    if error <= allowed:
        return ""
    measure = measure_of(original.outputs)
    amount = f"{error:.2g} {measure}" if math.isfinite(error) else "infinite, or no numbers, as the model's may be"
    return (
        f"on the loader's data its outputs are off: by {amount}, allowed is {allowed:g}. Python's own if, for and"
        " .item() on values of tensors are fixed where a model is traced."
    )


def _not_taken(model: nn.Module, arguments: Arguments, error: Exception) -> Exception:
    if isinstance(error, ValueError):
        return error
    return ValueError(
        f"the model cannot be called with the loader's first batch, {shapes_in(arguments)}: {one_line(error)}. Give"
        f" batches of (inputs, targets), with inputs such as forward{inspect.signature(model.forward)} takes: a tuple"
        " of positional arguments, or a mapping."
    )


@torch.no_grad()
def _timed(
    candidates: Mapping[str, Candidate], first: Arguments, batch_sizes: Sequence[int], seconds: float, device: Any
) -> tuple[int, dict[str, list[float]], dict[str, dict[int, float]]]:
    """Returns a batch size, name → seconds of calls at it, and name → batch size → samples per second, if the form can.

    The batch size is 1, or the loader's if the model takes no batch of 1.
    """
    batched = dimensions_of(first, "batch")
    per_second: dict[str, dict[int, float]] = {name: {} for name in candidates}
    spent: dict[str, list[float]] = {}
    own = sizes_of(first, batched).get("batch")
    is_free = bool(own) and attempt(candidates[EAGER].call, resized(first, batched, {"batch": 1})) is not None
    sizes = [*dict.fromkeys((1, *batch_sizes))] if is_free else [own or 1]
    for size in sizes:
        arguments = resized(first, batched, {"batch": size}) if is_free else first
        able = {name: one.call for name, one in candidates.items() if attempt(one.call, arguments) is not None}
        found = form_latency.timed(able, arguments, seconds * len(able), device)
        for name, times in found.items():
            if size in batch_sizes or not is_free:
                per_second[name][size] = size / statistics.median(times)
        spent = spent or found
    return sizes[0], spent, per_second


def _recommended(forms: Mapping[str, Measured], max_drop: float, size: int = 1) -> tuple[str, str]:
    exact = {name: form for name, form in forms.items() if not form.drops_more_than(max_drop)}
    faster = {name: form for name, form in exact.items() if form.speedup.low > 1}
    if not faster:
        worse = len(forms) - len(exact)
        more = f" ({worse} dropped a metric by more than {max_drop:g})" if worse else ""
        return EAGER, f"no other form is proven to be faster at batch {size} and as exact{more}"
    quickest = min(form.latency.p50 for form in faster.values())
    alike = [name for name, form in faster.items() if form.latency.p50 <= AS_FAST * quickest]
    chosen = min(alike, key=lambda name: faster[name].disk_bytes)
    form, eager = faster[chosen], forms[EAGER]
    disk = f"{format_bytes(form.disk_bytes)} on disk, the original {format_bytes(eager.disk_bytes)}"
    said = [f"{form.speedup} the original's speed at batch {size}", disk]
    said += [f"{name} {score}, worse by {score.drop:.2g}" for name, score in form.scores.items()]
    if len(alike) > 1:
        said.append(f"of {', '.join(alike)}, which are as fast, the smallest")
    return chosen, "; ".join(said)
