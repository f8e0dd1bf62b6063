"""Which rank is slow, and which one the others wait for: not the same where ranks wait within their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    latest_rank: int | None
    before_backward_ms_p95: float | None
    before_backward_ms_p95_mean: float | None
    data_wait_ms: float | None
    data_wait_ms_mean: float | None

    def metrics(self) -> dict[str, float]:
        """What is logged, without a prefix."""
        values = {"step_ms_p95_slowest_rank": self.step_ms_p95}
        if self.before_backward_ms_p95 is not None:
            values["before_backward_ms_p95_latest_rank"] = self.before_backward_ms_p95
        return values

    def line(self) -> str:
        """In a part of a line."""
        mean = f"mean of ranks {self.step_ms_p95_mean:.4g}"
        parts = [f"slowest rank {self.slowest_rank}: p95 {self.step_ms_p95:.4g} ms ({mean})"]
        if self.latest_rank is not None:
            parts.append(
                f"latest at backward rank {self.latest_rank}: p95 {self.before_backward_ms_p95:.4g} ms"
                f" (mean of ranks {self.before_backward_ms_p95_mean:.4g})"
            )
            if self.data_wait_ms is not None:
                parts.append(f"its data wait {self.data_wait_ms:.4g} ms (mean of ranks {self.data_wait_ms_mean:.4g})")
        return ", ".join(parts)


def rank_row(step_ms: Tensor, before_backward_ms: Tensor, data_wait_ms: float) -> Tensor:
    """What :func:`compare_ranks` needs of a rank, shape ``(1, 3)``.

    Args:
        step_ms: Of its steps, shape ``(N,)``.
        before_backward_ms: Of its steps with a backward pass, shape ``(M,)``.
        data_wait_ms: The mean over its steps; NaN is "not known".
    """
    p95s = [values.quantile(0.95).item() if values.numel() else math.nan for values in (step_ms, before_backward_ms)]
    return torch.tensor([[*p95s, data_wait_ms]], dtype=torch.float32, device=step_ms.device)


def compare_ranks(rows: Tensor) -> Stragglers | None:
    """The ranks' rows, by rank, shape ``(R, 3)``; None for a single rank, or where one has made no step."""
    step_ms, before_backward_ms, data_wait_ms = rows.T.tolist()
    if len(rows) == 1 or not _known(step_ms):
        return None
    slowest = step_ms.index(max(step_ms))
    latest = before_backward_ms.index(max(before_backward_ms)) if _known(before_backward_ms) else None
    has_wait = latest is not None and _known(data_wait_ms)
    return Stragglers(
        slowest_rank=slowest,
        step_ms_p95=step_ms[slowest],
        step_ms_p95_mean=_mean(step_ms),
        latest_rank=latest,
        before_backward_ms_p95=None if latest is None else before_backward_ms[latest],
        before_backward_ms_p95_mean=None if latest is None else _mean(before_backward_ms),
        data_wait_ms=data_wait_ms[latest] if has_wait else None,
        data_wait_ms_mean=_mean(data_wait_ms) if has_wait else None,
    )


def _known(values: Sequence[float]) -> bool:
    return not any(map(math.isnan, values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
