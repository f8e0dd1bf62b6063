"""A run from its first step to its last, as a page shows it: few enough points to be read, whatever its length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_accel.evidence.events import StepMeasured, pieces_of
from lightning_accel.evidence.record import Record

Curve = list[tuple[float, float]]

MOST_POINTS = 400
MOST_EPOCHS = 200

_OF_CARDS = {
    "sm_clock_mhz": "clock of the GPU, MHz",
    "throttled_frac": "share of the time in which its clocks were throttled",
    "power_w": "its power, W",
    "temperature_c": "its temperature, °C",
    "utilisation_percent": "its utilisation, %",
    "memory_mib": "its memory in use, by all processes, MiB",
}
EPOCH_COLUMNS = {
    "epoch": ("epoch", False),
    "samples_per_sec": ("samples/s", False),
    "steps_per_sec": ("steps/s", False),
    "step_ms_p50": ("median step, ms", False),
    "step_ms_p95": ("95th percentile, ms", False),
    "data_wait_frac": ("waiting for data", True),
    "peak_memory_mib": ("peak, MiB", False),
    "host_rss_mib": ("host, MiB", False),
    "tflops": ("TFLOP/s", False),
    "mfu": ("share of the device's FLOP/s", True),
    "loss_scale": ("loss scale", False),
    "skipped_steps": ("skipped steps", False),
    "energy_j_per_sample": ("J/sample", False),
    "stragglers_slowest_rank": ("slowest rank", False),
    "stragglers_step_ms_p95": ("its 95th percentile, ms", False),
    "stragglers_step_ms_p95_mean": ("mean of ranks, ms", False),
    "stragglers_latest_rank": ("last rank at backward", False),
    "stragglers_data_wait_ms": ("its data wait, ms", False),
}
"""What a page shows of an epoch → the head of its column, and whether it is a share."""


def curves_of(record: Record) -> dict[str, Curve]:
    """Name → step numbers and values over the run; those that nothing is known of are left out."""
    cycles = [(float(piece.first), piece.ms) for some in record.steps for piece in some.pieces()]
    waits = [ms for some in record.steps for ms in some.wait_ms]
    found = {
        "step, ms": cycles,
        "waiting for data, ms": [(number, ms) for (number, _), ms in zip(cycles, waits, strict=False)],
        "memory held, MiB": _spread(record.steps, [some.held_mib for some in record.steps]),
        "loss": [(float(step), loss) for step, loss in sorted(record.losses.items())],
        "loss scale, at the end of each epoch": list(_scales(record)),
        **{
            shown: _spread(record.steps, [some.card.get(name, []) for some in record.steps])
            for name, shown in _OF_CARDS.items()
        },
    }
    return {name: thinned(points) for name, points in found.items() if any(math.isfinite(value) for _, value in points)}


def _spread(steps: Sequence[StepMeasured], each: Sequence[Sequence[float]]) -> Curve:
    """Values that were taken every so often in some steps, at about the steps at which they were."""
    found: Curve = []
    for some, values in zip(steps, each, strict=True):
        length = (some.last - some.first + 1) / max(1, len(values))
        found += [(some.first + length * (place + 1), value) for place, value in enumerate(values)]
    return found


def _scales(record: Record) -> Iterator[tuple[float, float]]:
    steps = record.steps[0].first - 1 if record.steps else 0
    for epoch in record.epochs:
        steps += epoch.get("steps") or 0
        if (scale := number(epoch.get("loss_scale"))) is not None:
            yield float(steps), scale


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> Curve:
    """Means over consecutive pieces of equal length, without what is no number."""
    finite = [(float(at), float(value)) for at, value in points if math.isfinite(value)]
    return [(piece[0][0], math.fsum(value for _, value in piece) / len(piece)) for piece in pieces_of(finite, most)]


def quantiles_ms(record: Record) -> list[float]:
    """The 50th, 95th and 99th percentile over pieces, each as often as it has steps."""
    pieces = sorted((piece.ms, piece.steps) for some in record.steps for piece in some.pieces())
    if not pieces:
        return []
    reached = list(itertools.accumulate(count for _, count in pieces))
    wanted = [share * reached[-1] for share in (0.5, 0.95, 0.99)]
    return [next(ms for (ms, _), upto in zip(pieces, reached, strict=True) if upto >= need) for need in wanted]


def epochs_of(record: Record) -> list[dict[str, float]]:
    """What was measured of each epoch, of several ranks also who held up the others; of many epochs, every so many."""
    stride = -(-len(record.epochs) // MOST_EPOCHS) or 1
    chosen = [one for place, one in enumerate(record.epochs, start=1 - len(record.epochs)) if place % stride == 0]
    return [_of_epoch(one) for one in chosen]


def _of_epoch(epoch: dict[str, Any]) -> dict[str, float]:
    values = {**epoch, **{f"stragglers_{name}": value for name, value in (epoch.get("stragglers") or {}).items()}}
    return {name: known for name in EPOCH_COLUMNS if (known := number(values.get(name))) is not None}


def number(value: Any) -> float | None:
    """A finite number as one; None of all else: a record has NaN and infinity as text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None
