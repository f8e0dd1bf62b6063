"""What was measured of a model's forms, and the table that is printed of it."""

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
    """One form.

    Attributes:
        latency: At batch 1.
        speedup: How many times as fast as the original that is.
        samples_per_sec: Batch size → throughput; without those that the form does not take.
        first_call_ms: Loading, and calling it for the first time.
        disk_bytes: Of its file, or of the saved weights.
        memory_bytes: Of the weights, or by how much a process grows that loads the file; None: not known.
        error: How far its outputs are off on the data, as a share of the norm of the original's.
        scores: Metric → value, interval and drop.
        remarks: What is to be known of it: layers left in float, dimensions that are fixed.
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
        """The metrics that are worse than the original's by more."""
        return [name for name, score in self.scores.items() if not score.drop <= limit]  # NaN is worse


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` has found.

    Attributes:
        forms: Name → what was measured; the first is ``"eager"``, the original.
        left_out: Name → why a form is not among them.
        max_drop: What a metric may be worse by.
        recommended: The form to take.
        why: In words.
    """

    forms: Mapping[str, Measured]
    left_out: Mapping[str, str]
    max_drop: float
    recommended: str
    why: str

    @property
    def worse(self) -> dict[str, list[str]]:
        """Form → the metrics that it drops by more than the limit."""
        return {name: found for name, form in self.forms.items() if (found := form.drops_more_than(self.max_drop))}

    def __str__(self) -> str:
        """A table of the forms, one of their metrics, what is to be known, and which form to take."""
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
        """As plain values, for JSON; what is infinite is None."""
        return dict(finite({**asdict(self), "worse": self.worse}))


def _row(name: str, form: Measured) -> dict[str, str]:
    """Heading → cell."""
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
