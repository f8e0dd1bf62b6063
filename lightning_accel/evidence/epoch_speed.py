"""One epoch's measurement, as users read it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_accel.evidence.amounts import duration

PREFIX = "accel/"
_LOGGED = (
    *("samples_per_sec", "steps_per_sec", "step_ms_p50", "step_ms_p95", "data_wait_frac", "peak_memory_mib"),
    *("host_rss_mib", "tflops", "mfu", "loss_scale", "skipped_steps", "energy_j_per_sample"),
)


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """One epoch's ranks beside each other.

    Ranks that train together wait for the last of them in every backward pass, so that the steps of all become as
    long as those of the slowest, and ``slowest_rank`` may be any. What a rank did before it came to the backward pass
    is its own: logging, waiting for data, the forward pass. The rank that takes longest over it is ``latest_rank``.
    That says nothing where a rank waits for others before, as in FSDP's and SyncBatchNorm's forward passes, in
    metrics synchronised at every step and in DDP's second step of a run (its wait for data is its own all the same),
    nor does it show a rank that is slow in the backward pass or in the optimizer's step only.

    Attributes:
        slowest_rank: The rank with the largest ``step_ms_p95``.
        step_ms_p95: The 95th percentile over its steps.
        step_ms_p95_mean: The mean of the ranks' 95th percentiles.
        latest_rank: The rank that comes to the backward pass last; None where no backward pass was seen.
        before_backward_ms_p95: The 95th percentile of its time from the end of a step to the next backward pass.
        before_backward_ms_p95_mean: The mean of the ranks' 95th percentiles.
        data_wait_ms: How long ``latest_rank`` waited for data, in the mean of its steps; None where that is not known.
        data_wait_ms_mean: The mean of the ranks.
    """

    slowest_rank: int
    step_ms_p95: float
    step_ms_p95_mean: float
    latest_rank: int | None = None
    before_backward_ms_p95: float | None = None
    before_backward_ms_p95_mean: float | None = None
    data_wait_ms: float | None = None
    data_wait_ms_mean: float | None = None

    def metrics(self) -> dict[str, float]:
        """What is logged, without a prefix."""
        values = {"step_ms_p95_slowest_rank": self.step_ms_p95}
        if self.before_backward_ms_p95 is not None:
            values["before_backward_ms_p95_latest_rank"] = self.before_backward_ms_p95
        return values

    def line(self) -> str:
        """In a part of a line."""
        parts = [f"slowest rank {self.slowest_rank}: p95 {_beside_mean(self.step_ms_p95, self.step_ms_p95_mean)}"]
        if self.before_backward_ms_p95 is not None and self.before_backward_ms_p95_mean is not None:
            took = _beside_mean(self.before_backward_ms_p95, self.before_backward_ms_p95_mean)
            parts.append(f"latest at backward rank {self.latest_rank}: p95 {took}")
        if self.data_wait_ms is not None and self.data_wait_ms_mean is not None:
            parts.append(f"its data wait {_beside_mean(self.data_wait_ms, self.data_wait_ms_mean)}")
        return ", ".join(parts)


def _beside_mean(ms: float, mean_ms: float) -> str:
    return f"{duration(ms)} (mean of ranks {duration(mean_ms)})"


@dataclass(frozen=True, kw_only=True)
class EpochSpeed:
    """What a training epoch measured, or several short ones together, over all ranks. What is not known here is None.

    A *step* is one batch of the train dataloader, one call of ``training_step``, with or without an optimizer step.
    Times and rates of fewer than three timed steps are not known.

    Attributes:
        epoch: Lightning's number of the epoch, of several of the last one.
        first_epoch: The same of the first one.
        world_size: How many ranks took part.
        steps: The steps of one rank.
        samples: The samples of all ranks; None when a batch does not tell how many it holds.
        train_seconds: The time that the rates refer to (see :class:`~lightning_accel.callbacks.SpeedMemoryLogger`),
            of one rank.
        samples_per_sec: Summed over the ranks.
        steps_per_sec: Of one rank; the ranks step together.
        step_ms_p50: The median over the steps of all ranks.
        step_ms_p95: The 95th percentile over the steps of all ranks.
        data_wait_frac: The part of ``train_seconds`` spent waiting for the dataloader, between 0 and 1.
        peak_memory_mib: The largest peak of a rank.
        peak_memory_source: Whose peak that is, and since when.
        host_rss_mib: What the largest rank holds in host memory at the end of the epoch.
        flops_per_step: Counted in one step of one rank, recomputation left out.
        tflops: 10^12 FLOPs a second, summed over the ranks.
        mfu: ``tflops`` as a part of what the devices could do, between 0 and 1.
        loss_scale: The gradient scaler's scale at the end of the epoch.
        skipped_steps: Optimizer steps that the scaler skipped in the epoch.
        energy_j_per_sample: Of the cards alone.
        stragglers: The ranks beside each other; None for a single one.
    """

    epoch: int = 0
    first_epoch: int = 0
    world_size: int = 1
    steps: int = 0
    samples: int | None = None
    train_seconds: float = 0.0
    samples_per_sec: float | None = None
    steps_per_sec: float | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    data_wait_frac: float | None = None
    peak_memory_mib: float | None = None
    peak_memory_source: str = ""
    host_rss_mib: float | None = None
    flops_per_step: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None
    energy_j_per_sample: float | None = None
    stragglers: Stragglers | None = None

    def metrics(self) -> dict[str, float]:
        """What is logged, under ``accel/``."""
        values = {name: getattr(self, name) for name in _LOGGED}
        values |= {} if self.stragglers is None else self.stragglers.metrics()
        return {f"{PREFIX}{name}": float(value) for name, value in values.items() if value is not None}
