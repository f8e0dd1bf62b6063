"""What one rank measures from one telling to the next: an epoch, or several short ones."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from lightning_accel.callbacks._batch_size import SampleCounter, SizeReader
from lightning_accel.callbacks._fit_timeline import timeline_of
from lightning_accel.callbacks._flops import FlopMeter, peak_flops_per_sec
from lightning_accel.callbacks._nvml import EnergyMeter
from lightning_accel.callbacks._ranks import RankEpoch, thinned
from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.step_timeline import Driver, StepTally, StepTimes
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
            host_rss_mib=None if self.memory is None else psutil.Process().memory_info().rss / 2**20,
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


def _per(amount: float, total: float) -> float:
    return amount / total if total > 0 else 0.0
