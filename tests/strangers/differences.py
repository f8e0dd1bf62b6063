"""In what two runs differ, in words, and how far they may."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from strangers.harness import Run
from strangers.table import Training

NOISE_FACTOR = 10
"""By so much a run may be further from the plain one than a plain one with nudged weights is."""

FORMAT_FACTOR = 10
"""The same in another number format, against the distance of Lightning's own bfloat16."""

ROUNDING = 512 * torch.finfo(torch.float32).eps
FORMAT_ROUNDING = 8 * torch.finfo(torch.bfloat16).eps


def differences(
    training: Training,
    actual: Run,
    expected: Run,
    noise: Sequence[Run],
    formats: Sequence[Run] = (),
    mixed: Run | None = None,
) -> list[str]:
    """In what ``actual`` is not what was expected.

    Args:
        training: What was run.
        actual: With the plugin.
        expected: Plain.
        noise: Plain, from weights that were nudged, each in its own way.
        formats: Where ``actual`` may compute in bfloat16, others that do, in their own ways.
        mixed: That of them under Lightning's own bfloat16.
    """
    found = [*_felt(training, actual, expected), *_kept(actual, expected, mixed), *_left(training, actual, expected)]
    return [*found, *_losses(actual, expected, noise, formats), *_weights(actual, expected, noise, formats)]


def _felt(training: Training, actual: Run, expected: Run) -> Iterator[str]:
    a, e = actual.seen, expected.seen
    if len(a.batches) != len(e.batches):
        yield f"{len(a.batches)} steps, not {len(e.batches)}"
    if not training.weights_choose:
        yield from _first("batches", a.batches, e.batches)
        for stream in ("python", "numpy", "torch"):
            yield from _first(f"the {stream} stream", [s[stream] for s in a.streams], [s[stream] for s in e.streams])
    yield from _first("layouts of batches", a.layouts, e.layouts)
    yield from _first("dtypes of gradients", a.grads, e.grads)


def _kept(actual: Run, expected: Run, mixed: Run | None) -> Iterator[str]:
    """What outlives a step, or the run."""
    for what, words in (("returned", "what step {} returned"), ("outliving", "what outlives step {}")):
        mine, theirs = getattr(actual.seen, what), getattr(expected.seen, what)
        remark = _by_format(mine, None if mixed is None else getattr(mixed.seen, what))
        for step, (one, other) in enumerate(zip(mine, theirs, strict=False)):
            if one != other:
                yield f"{words.format(step)}{remark}: {_nested(one, other)}"
                break
    if actual.kept != expected.kept:
        remark = _by_format(actual.kept, None if mixed is None else mixed.kept)
        yield f"kept at the end{remark}: {_nested(actual.kept, expected.kept)}"


def _by_format(mine: Any, mixed: Any) -> str:
    return " (all as under bf16-mixed)" if mine == mixed else ""


def _left(training: Training, actual: Run, expected: Run) -> Iterator[str]:
    if actual.streams != expected.streams and not training.weights_choose:
        yield f"streams at the end: {[k for k in actual.streams if actual.streams[k] != expected.streams[k]]}"
    if list(actual.state) != list(expected.state):
        yield f"keys of the state_dict: {sorted(set(actual.state) ^ set(expected.state))}"
    if actual.modules != expected.modules:
        yield f"modules at the end: {_nested(actual.modules, expected.modules)}"
    if actual.optimizers != expected.optimizers:
        yield f"optimizers: {_nested(actual.optimizers, expected.optimizers)}"
    for name, mine, theirs in zip(
        ("callback", "logged", "progress_bar"), actual.metrics, expected.metrics, strict=True
    ):
        if mine != theirs:
            yield f"{name}_metrics: {sorted(set(mine) ^ set(theirs))}"
    if actual.callbacks != expected.callbacks:
        yield f"trainer.callbacks: {actual.callbacks}, not {expected.callbacks}"


def _losses(actual: Run, expected: Run, noise: Sequence[Run], formats: Sequence[Run]) -> Iterator[str]:
    """Step by step; what may be apart is as much as the other runs have been so far."""
    by_noise, by_format = _farthest(noise, expected), _farthest(formats, expected)
    for step, (mine, theirs) in enumerate(zip(actual.seen.losses, expected.seen.losses, strict=False)):
        if len(mine) != len(theirs):
            yield f"step {step} gave {len(mine)} numbers, not {len(theirs)}"
            return
        for one, other in zip(mine, theirs, strict=True):
            allowed = NOISE_FACTOR * by_noise[step] + ROUNDING * max(1.0, abs(other))
            if formats:
                allowed += FORMAT_FACTOR * by_format[step] + FORMAT_ROUNDING * max(1.0, abs(other))
            if not (abs(one - other) <= allowed or (math.isnan(one) and math.isnan(other))):
                yield f"the loss of step {step}: {one:.6g}, not {other:.6g} (allowed {allowed:.2g})"
                return


def _farthest(others: Sequence[Run], expected: Run) -> list[float]:
    return list(map(max, zip(*(_apart(other, expected) for other in others), strict=False)))


def _apart(other: Run, expected: Run) -> list[float]:
    """The largest distance of two runs' losses up to each step."""
    steps = zip_longest(other.seen.losses, expected.seen.losses, fillvalue=())
    each = (max((abs(a - b) for a, b in zip(*rows, strict=False)), default=0.0) for rows in steps)
    return list(accumulate(each, max))


def _weights(actual: Run, expected: Run, noise: Sequence[Run], formats: Sequence[Run]) -> Iterator[str]:
    for name, theirs in expected.state.items():
        mine = actual.state.get(name)
        if not _is_like(mine, theirs):
            continue
        scale = max(1.0, float(_wide(theirs).abs().nan_to_num().max())) if theirs.numel() else 1.0
        allowed = NOISE_FACTOR * _moved(name, theirs, noise) + ROUNDING * scale
        if formats:
            allowed += FORMAT_FACTOR * _moved(name, theirs, formats) + FORMAT_ROUNDING * scale
        if not _distance(mine, theirs) <= allowed:
            yield f"weight {name}: off by {_distance(mine, theirs):.2g} (allowed {allowed:.2g})"
            return


def _moved(name: str, theirs: Tensor, others: Sequence[Run]) -> float:
    """By how much a weight is another in other runs."""
    found = [other.state.get(name) for other in others]
    return max((_distance(one, theirs) for one in found if _is_like(one, theirs)), default=0.0)


def _is_like(mine: Any, theirs: Any) -> bool:
    are_tensors = isinstance(theirs, Tensor) and isinstance(mine, Tensor) and not is_lazy(theirs)
    return are_tensors and mine.shape == theirs.shape


def _distance(one: Tensor, other: Tensor) -> float:
    one, other = _wide(one), _wide(other)
    are_same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(are_same, 0.0, (one - other).abs())
    return float(apart.max()) if one.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _first(what: str, mine: list[Any], theirs: list[Any]) -> Iterator[str]:
    for step, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            yield f"{what}, from step {step}" + ("" if isinstance(one, str) else f": {_nested(one, other)}")
            return


def _nested(mine: Any, theirs: Any) -> str:
    """The first place within two values where they differ."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        more = f"; and {len(keys) - 1} more" if len(keys) > 1 else ""
        return f"[{keys[0]}] {_nested(mine.get(keys[0]), theirs.get(keys[0]))}{more}"
    are_rows = isinstance(mine, list | tuple) and isinstance(theirs, list | tuple) and len(mine) == len(theirs)
    if are_rows and any(isinstance(one, list | tuple | dict) for one in mine):
        index = next(i for i, (one, other) in enumerate(zip(mine, theirs, strict=True)) if one != other)
        return f"[{index}] {_nested(mine[index], theirs[index])}"
    if isinstance(mine, list) and isinstance(theirs, list):
        return f"{[m for m in mine if m not in theirs]}, not {[t for t in theirs if t not in mine]}"
    return f"{mine}, not {theirs}"
