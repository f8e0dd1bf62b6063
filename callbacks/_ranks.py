"""One epoch's numbers of each rank, brought from rank to rank and put together."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_accel.evidence.epoch_speed import EpochSpeed, Stragglers
from lightning_accel.evidence.speed import FEWEST


@dataclass(frozen=True, kw_only=True)
class RankEpoch(EpochSpeed):
    """What one rank measured, before the ranks are put together; None is "not known here"."""

    data_wait_ms: float | None = None
    peak_flops: float | None = None
    energy_j: float | None = None
    step_ms: Sequence[float] = ()
    before_backward_ms: Sequence[float] = ()


_OVER_RANKS: dict[str, Callable[[Iterable[Any]], Any]] = {
    **dict.fromkeys(("samples", "samples_per_sec", "energy_j", "peak_flops"), sum),
    **dict.fromkeys(("peak_memory_mib", "host_rss_mib", "loss_scale", "skipped_steps"), max),
    **dict.fromkeys(("steps", "train_seconds", "steps_per_sec", "data_wait_frac", "flops_per_step"), statistics.fmean),
}


def thinned(values: array[float], most: int = 4096) -> array[float]:
    """At most so many values with the same percentiles: a rank's million steps need not travel."""
    if len(values) <= most:
        return values
    ordered = sorted(values)
    return array("d", (ordered[round(at * (len(ordered) - 1) / (most - 1))] for at in range(most)))


def put_together(ranks: Sequence[RankEpoch]) -> EpochSpeed | None:
    """What an epoch, or several, have come to over all ranks; None when none has made a step.

    What one rank does not know is unknown of all, so that every rank logs the same names.
    """
    if not any(rank.steps for rank in ranks):
        return None
    step_ms = [ms for rank in ranks for ms in rank.step_ms]
    median_ms, p95_ms = _percentiles(step_ms, 50, 95) if len(step_ms) >= FEWEST else (None, None)
    found: dict[str, Any] = {}
    for name, reduce in _OVER_RANKS.items():
        values = [getattr(rank, name) for rank in ranks]
        found[name] = None if None in values else reduce(values)
    energy_j, peak_flops, samples = found.pop("energy_j"), found.pop("peak_flops"), found["samples"]
    flops, steps_per_sec = found["flops_per_step"], found["steps_per_sec"]
    tflops = None if flops is None or steps_per_sec is None else flops * steps_per_sec * len(ranks) / 1e12
    here = {name: getattr(ranks[0], name) for name in ("epoch", "first_epoch", "peak_memory_source")}
    return EpochSpeed(
        **here | found | {"steps": round(found["steps"])},
        world_size=len(ranks),
        step_ms_p50=median_ms,
        step_ms_p95=p95_ms,
        tflops=tflops,
        mfu=None if tflops is None or not peak_flops else tflops * 1e12 / peak_flops,
        energy_j_per_sample=energy_j / samples if energy_j is not None and samples else None,
        stragglers=compare_ranks(ranks),
    )


def compare_ranks(ranks: Sequence[RankEpoch]) -> Stragglers | None:
    """The ranks beside each other; None for a single one, or where one has made too few steps to tell."""
    if len(ranks) == 1 or not all(len(rank.step_ms) >= FEWEST for rank in ranks):
        return None
    step_ms = [_percentiles(rank.step_ms, 95)[0] for rank in ranks]
    slowest = step_ms.index(max(step_ms))
    found = Stragglers(slowest_rank=slowest, step_ms_p95=step_ms[slowest], step_ms_p95_mean=statistics.fmean(step_ms))
    if not all(rank.before_backward_ms for rank in ranks):
        return found
    before_ms = [_percentiles(rank.before_backward_ms, 95)[0] for rank in ranks]
    latest = before_ms.index(max(before_ms))
    found = replace(
        found,
        latest_rank=latest,
        before_backward_ms_p95=before_ms[latest],
        before_backward_ms_p95_mean=statistics.fmean(before_ms),
    )
    waits_ms = [rank.data_wait_ms for rank in ranks if rank.data_wait_ms is not None]
    if len(waits_ms) < len(ranks):
        return found
    return replace(found, data_wait_ms=waits_ms[latest], data_wait_ms_mean=statistics.fmean(waits_ms))


def _percentiles(values: Sequence[float], *percents: float) -> list[float]:
    found: list[float] = np.percentile(values, percents).tolist()
    return found
