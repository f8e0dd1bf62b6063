"""One epoch's measurement: of a rank, put together over the ranks, and as users read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lightning_accel.callbacks._stragglers import Stragglers, compare_ranks, rank_row

PREFIX = "accel/"
_LOGGED = (
    "samples_per_sec",
    "steps_per_sec",
    "step_ms_p50",
    "step_ms_p95",
    "data_wait_frac",
    "peak_memory_mib",
    "host_rss_mib",
    "tflops",
    "mfu",
    "loss_scale",
    "skipped_steps",
    "energy_j_per_sample",
)


@dataclass(frozen=True, kw_only=True)
class EpochSpeed:
    """What one training epoch measured, over all ranks. A value that does not exist here is None.

    A *step* is one batch of the train dataloader, one call of ``training_step``, with or without an optimizer step.

    Attributes:
        epoch: Lightning's number of the epoch.
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

    epoch: int
    world_size: int
    steps: int
    samples: int | None
    train_seconds: float
    samples_per_sec: float | None
    steps_per_sec: float
    step_ms_p50: float
    step_ms_p95: float
    data_wait_frac: float | None
    peak_memory_mib: float
    peak_memory_source: str
    host_rss_mib: float
    flops_per_step: float | None
    tflops: float | None
    mfu: float | None
    loss_scale: float | None
    skipped_steps: int | None
    energy_j_per_sample: float | None
    stragglers: Stragglers | None

    @property
    def slowest_rank(self) -> int | None:
        """The rank whose steps took longest; None for a single one. See :class:`Stragglers` for who held it up."""
        return None if self.stragglers is None else self.stragglers.slowest_rank

    def metrics(self) -> dict[str, float]:
        """What is logged, under ``accel/``."""
        values = {name: getattr(self, name) for name in _LOGGED}
        values |= {} if self.stragglers is None else self.stragglers.metrics()
        return {f"{PREFIX}{name}": float(value) for name, value in values.items() if value is not None}

    def line(self) -> str:
        """The epoch in one line of text."""
        parts = [
            f"{self.steps_per_sec:,.4g} steps/s",
            f"step {self.step_ms_p50:.4g} ms (p95 {self.step_ms_p95:.4g})",
            f"peak {self.peak_memory_mib:,.0f} MiB ({self.peak_memory_source})",
            f"host RSS {self.host_rss_mib:,.0f} MiB",
        ]
        if self.data_wait_frac is not None:
            parts.insert(2, f"data wait {self.data_wait_frac:.1%}")
        if self.samples_per_sec is not None:
            parts.insert(0, f"{self.samples_per_sec:,.5g} samples/s")
        if self.tflops is not None:
            parts.append(f"{self.tflops:.3g} TFLOP/s" + (f" (MFU {self.mfu:.1%})" if self.mfu is not None else ""))
        if self.loss_scale is not None:
            skipped = f", {self.skipped_steps} skipped" if self.skipped_steps is not None else ""
            parts.append(f"loss scale {self.loss_scale:g}{skipped}")
        if self.energy_j_per_sample is not None:
            parts.append(f"{self.energy_j_per_sample:.3g} J/sample")
        if self.stragglers is not None:
            parts.append(self.stragglers.line())
        return f"{PREFIX} epoch {self.epoch}: " + " · ".join(parts)


@dataclass(frozen=True, kw_only=True)
class RankEpoch:
    """One rank's numbers, before they are put together. NaN is "not known here".

    Each field but the last three names its reduction over the ranks in ``EpochMeter``.
    """

    steps: float
    samples: float
    train_seconds: float
    samples_per_sec: float
    steps_per_sec: float
    data_wait_frac: float
    peak_memory_mib: float
    host_rss_mib: float
    flops_per_step: float
    peak_flops: float
    loss_scale: float
    skipped_steps: float
    energy_j: float
    data_wait_ms: float
    before_backward_ms: Sequence[float]
    step_ms: Sequence[float]


_REDUCTIONS = {
    "steps": "mean",
    "samples": "sum",
    "train_seconds": "mean",
    "samples_per_sec": "sum",
    "steps_per_sec": "mean",
    "data_wait_frac": "mean",
    "peak_memory_mib": "max",
    "host_rss_mib": "max",
    "flops_per_step": "mean",
    "peak_flops": "sum",
    "loss_scale": "max",
    "skipped_steps": "max",
    "energy_j": "sum",
}


class EpochMeter(Metric):
    """Puts the ranks' numbers together; torchmetrics brings them from rank to rank.

    Sums, means and maxima all hand a NaN on, so what one rank does not know is unknown on every rank alike, and all
    of them log the same names.
    """

    full_state_update = False
    step_ms: list[Tensor]
    rows: list[Tensor]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, reduction in _REDUCTIONS.items():
            self.add_state(name, torch.tensor(math.nan), dist_reduce_fx=reduction)
        self.add_state("step_ms", [], dist_reduce_fx="cat")
        self.add_state("rows", [], dist_reduce_fx="cat")

    @override
    def update(self, rank: RankEpoch) -> None:
        for name in _REDUCTIONS:
            setattr(self, name, torch.tensor(getattr(rank, name), dtype=torch.float32, device=self.device))
        step_ms, before_backward_ms = (
            _thin_out(torch.tensor(values, dtype=torch.float32, device=self.device))
            for values in (rank.step_ms, rank.before_backward_ms)
        )
        self.step_ms = [step_ms]
        self.rows = [rank_row(step_ms, before_backward_ms, rank.data_wait_ms)]

    @override
    def compute(self) -> dict[str, Any]:
        """The numbers of all ranks; ``step_ms_p50`` and ``step_ms_p95`` are NaN when no rank has made a step."""
        values: dict[str, Any] = {name: _known(getattr(self, name)) for name in _REDUCTIONS}
        step_ms = dim_zero_cat(self.step_ms).double().cpu()
        has_steps = step_ms.numel() > 0
        for percent in (50, 95):
            values[f"step_ms_p{percent}"] = step_ms.quantile(percent / 100).item() if has_steps else math.nan
        values["rows"] = dim_zero_cat(self.rows)
        return values


def _thin_out(step_ms: Tensor, most: int = 4096) -> Tensor:
    """At most so many values with the same percentiles: a rank's million steps need not travel."""
    if step_ms.numel() <= most:
        return step_ms
    positions = torch.linspace(0, step_ms.numel() - 1, most, dtype=torch.float64, device="cpu").round().long()
    return step_ms.sort().values[positions.to(step_ms.device)]


def _known(value: Tensor) -> float | None:
    number = value.item()
    return None if math.isnan(number) else number


def put_together(rank: RankEpoch, device: torch.device, **about: Any) -> EpochSpeed | None:
    """The epoch over all ranks, the same on each; None when none has made a step. A collective call.

    Args:
        rank: This rank's numbers.
        device: Where the process group can send tensors from.
        about: ``epoch``, ``world_size`` and ``peak_memory_source`` of :class:`EpochSpeed`. With a ``world_size`` of 1
            the epoch is this rank's, and no other is asked.
    """
    meter = EpochMeter(sync_on_compute=about["world_size"] > 1).to(device)
    meter.update(rank)
    values = meter.compute()
    if math.isnan(values["step_ms_p50"]):
        return None
    energy_j, peak_flops = values.pop("energy_j"), values.pop("peak_flops")
    samples, flops, skipped = values["samples"], values["flops_per_step"], values["skipped_steps"]
    tflops = None if flops is None else flops * values["steps_per_sec"] * about["world_size"] / 1e12
    values |= {
        "stragglers": compare_ranks(values.pop("rows")),
        "steps": round(values["steps"]),
        "samples": None if samples is None else round(samples),
        "skipped_steps": None if skipped is None else round(skipped),
        "tflops": tflops,
        "mfu": None if tflops is None or not peak_flops else tflops * 1e12 / peak_flops,
        "energy_j_per_sample": energy_j / samples if energy_j is not None and samples else None,
    }
    return EpochSpeed(**values, **about)
