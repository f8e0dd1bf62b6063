"""What ranks measure from one telling to the next, an epoch or several short ones, each for itself and together."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch

from lightning_accel.callbacks._batch_size import SampleCounter, SizeReader
from lightning_accel.callbacks._fit_timeline import timeline_of
from lightning_accel.callbacks._nvml import EnergyMeter
from lightning_accel.callbacks._step_watch import FlopMeter, peak_flops_per_sec
from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.step_timeline import Driver, StepTally, StepTimes
from lightning_accel.evidence.epoch_speed import EpochSpeed, Stragglers
from lightning_accel.evidence.speed import FEWEST
from lightning_accel.lightning.packages import Trainer


class Interval:
    """The meters of one rank.

    Attributes:
        timeline: The fit's, told of every fetch and step.
        tally: The times of the interval's steps.
        flops: Counts one of the steps.
        energy: Told of every pause.
        memory: None until the run can pay for it.
        samples: Counts the samples of a batch.
        knows_samples: Whether every batch has told how many samples it holds.
        fetches_from: After how many timed steps fetches were told of; None if they are not.
    """

    def __init__(self, trainer: Trainer, batch_size_fn: SizeReader | None) -> None:
        self._trainer = trainer
        device = trainer.strategy.root_device
        self.samples = SampleCounter(batch_size_fn, rank_zero_info, "SpeedMemoryLogger", "samples_per_sec")
        self._skipped_before = self._skipped_steps()
        self._peak_flops = peak_flops_per_sec(device, str(trainer.precision))
        self.timeline, self.tally = timeline_of(trainer), StepTally()
        self.timeline.claim(self, Driver.LOGGER)
        self.timeline.listeners.append(self._took)
        self.flops = FlopMeter()
        self.energy = EnergyMeter.open(device)
        self.memory: PeakMemory | None = None
        self.knows_samples = True
        self.fetches_from: int | None = None

    def restart(self) -> None:
        """Begins a new interval of measurement, and forgets the present one."""
        self.flops.close()
        self.timeline.restart()
        self.tally = StepTally()
        if self.memory is not None:
            self.memory.restart()
        self.energy.restart()
        self.knows_samples = True
        self.fetches_from = None if self.fetches_from is None else 0

    def close(self) -> None:
        """Listens no more."""
        self.flops.close()
        self.energy.close()
        self.timeline.forget(self._took)
        self.timeline.release(self)

    def _took(self, step: StepTimes) -> None:
        is_own = step.together or self.timeline.driver is self
        # What another driver reports in a rest is without fetches: its waiting is as unknown as that of several steps.
        self.tally.took(step if is_own else step._replace(together=1))

    def measured(self, all_steps: int, epochs: Sequence[int]) -> RankEpoch:
        """What the interval of these epochs has come to, with ``all_steps`` steps, timed or not."""
        self.flops.close()
        self.timeline.settle()
        tally, told = self.tally, slice(self.fetches_from, None)
        steps, seconds = len(tally.cycle_ms), sum(tally.cycle_ms) / 1e3
        is_measured = steps >= FEWEST
        scaler = self._scaler()
        before, now = self._skipped_before, self._skipped_steps()
        self._skipped_before = now
        wait_ms, cycle_ms = tally.wait_ms[told], tally.cycle_ms[told]
        knows_wait = self.fetches_from is not None and len(cycle_ms) >= FEWEST
        samples = (tally.samples + tally.samples_apart) * all_steps / max(1, steps + tally.steps_apart)
        return RankEpoch(
            epoch=epochs[-1],
            first_epoch=epochs[0],
            steps=all_steps,
            samples=round(samples) if self.knows_samples else None,
            train_seconds=seconds,
            samples_per_sec=_per(tally.samples, seconds) if self.knows_samples and is_measured else None,
            steps_per_sec=_per(steps, seconds) if is_measured else None,
            data_wait_frac=_per(sum(wait_ms), sum(cycle_ms)) if knows_wait else None,
            data_wait_ms=_per(sum(wait_ms), len(cycle_ms)) if knows_wait else None,
            peak_memory_mib=None if self.memory is None else self.memory.peak_bytes() / 2**20,
            peak_memory_source="" if self.memory is None else self.memory.source,
            host_rss_mib=None if self.memory is None else _host_rss_mib(),
            flops_per_step=self.flops.flops,
            peak_flops=self._peak_flops,
            loss_scale=None if scaler is None else float(scaler.get_scale()),
            skipped_steps=None if before is None or now is None else now - before,
            energy_j=self.energy.joules(),
            step_ms=thinned(tally.step_ms),
            before_backward_ms=thinned(tally.before_backward_ms),
        )

    def _scaler(self) -> torch.amp.GradScaler | None:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None

    def _skipped_steps(self) -> int | None:
        return getattr(self._scaler(), "skipped_steps", None)


def _host_rss_mib() -> float | None:
    try:
        return float(psutil.Process().memory_info().rss) / 2**20
    except (OSError, psutil.Error):  # without /proc, or where no file can be opened any more
        return None


def _per(amount: float, total: float) -> float:
    return amount / total if total > 0 else 0.0


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
