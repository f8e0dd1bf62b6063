"""The measurements of a model's forms, and the printed table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.core.measured import finite
from lightning_accel.core.text_columns import aligned
from lightning_accel.deploy.accuracy import Score
from lightning_accel.deploy.form_latency import Latency
from lightning_accel.experiment.pair_test import RatioInterval


@dataclass(frozen=True)
class Measured:
    """The measurements of one form.

    Attributes:
        latency: At batch 1, or at the batch size of the loader if the model takes no batch of 1.
        speedup: The latency's ratio to the original, as how many times as fast.
        samples_per_sec: Batch size → throughput, for the sizes that the form accepts.
        first_call_ms: Loading, and the first call.
        disk_bytes: Size of its file, or of the saved weights.
        memory_bytes: Size of the weights, or the growth of a process that loads the file; None if unknown.
        error: The error of its outputs on the data, as a share of the norm of the original's.
        scores: Metric → value, interval and drop.
        remarks: Remarks for users: layers left in float, fixed dimensions.
    """

    latency: Latency
    speedup: RatioInterval
    samples_per_sec: Mapping[int, float]
    first_call_ms: float
    disk_bytes: int
    memory_bytes: int | None
    error: float
    scores: Mapping[str, Score]
    remarks: tuple[str, ...]

    def drops_more_than(self, limit: float) -> list[str]:
        """Returns the metrics that are worse than the original's by more than ``limit``."""
        return [name for name, score in self.scores.items() if not score.drop <= limit]  # NaN is worse


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`~lightning_accel.deploy.comparing.compare_forms`.

    Attributes:
        forms: Name → measurements. The first is ``"eager"``, the original.
        left_out: Name → why a form was left out.
        max_drop: How much worse a metric may be.
        recommended: The recommended form.
        why: The reason, in words.
    """

    forms: Mapping[str, Measured]
    left_out: Mapping[str, str]
    max_drop: float
    recommended: str
    why: str

    @property
    def worse(self) -> dict[str, list[str]]:
        """Form → metrics that drop by more than the limit."""
        return {name: found for name, form in self.forms.items() if (found := form.drops_more_than(self.max_drop))}

    def __str__(self) -> str:
        """Returns a table of the forms, one of their metrics, remarks and the recommendation."""
        rows = [_row(name, form) for name, form in self.forms.items()]
        lines = aligned([[*rows[0]], *([row.get(head, "no") for head in rows[0]] for row in rows)])
        metrics = [*next(iter(self.forms.values())).scores]
        scores = [[name, *(str(form.scores.get(one, "no")) for one in metrics)] for name, form in self.forms.items()]
        lines += aligned([["form", *metrics], *scores]) if metrics else []
        lines += [f"! {name}: {why}" for name, why in self.left_out.items()]
        lines += [f"  {name}: {remark}" for name, form in self.forms.items() for remark in form.remarks]
        for name, metric in ((name, metric) for name, dropped in self.worse.items() for metric in dropped):
            score = self.forms[name].scores[metric]
            by = f"{score.drop:.3g} [{score.drop_low:.3g}, {score.drop_high:.3g}]"
            lines.append(f"! {name}: {metric} is worse by {by}, allowed {self.max_drop:g}")
        return "\n".join([*lines, f"Take {self.recommended}: {self.why}"])

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, with None for infinity."""
        return dict(finite({**asdict(self), "worse": self.worse}))


def _row(name: str, form: Measured) -> dict[str, str]:
    """Returns heading → cell."""
    times = {"p50 ms": form.latency.p50, "p95": form.latency.p95, "p99": form.latency.p99}
    return {
        "form": name,
        **{heading: _ms(time) for heading, time in times.items()},
        "speed": str(form.speedup),
        **{f"{size}: samples/s": f"{count:,.0f}" for size, count in form.samples_per_sec.items()},
        "first ms": _ms(form.first_call_ms),
        "on disk": format_bytes(form.disk_bytes),
        "in memory": "" if form.memory_bytes is None else format_bytes(form.memory_bytes),
        "error": f"{form.error:.1e}",
    }


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
