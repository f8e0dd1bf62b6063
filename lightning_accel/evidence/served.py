"""The forms in which a run's model was measured for serving: what ``lightning-accel deploy`` adds to its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ServedForm:
    """One form of the model."""

    name: str  # `"eager"`, the original; others as `compare` names them
    p50_ms: float  # what a call takes at batch 1: the median
    p95_ms: float  # the 95th percentile
    p99_ms: float  # the 99th percentile
    speedup: float  # how many times as fast as the original that is
    low: float  # the least that this may be, with 95% confidence
    high: float | None  # the most; None: no bound is known
    disk_bytes: int  # of its file, or of the saved weights
    # how far its outputs are off, as a share of the norm of the original's; None: they are no numbers
    error: float | None
    scores: dict[str, float | None]  # metric → its value; empty: none was given
    drops: dict[str, float | None]  # metric → by how much that is worse than the original's
    is_worse: bool  # whether a metric drops by more than the limit


@dataclass(frozen=True, kw_only=True)
class Served:
    """A comparison of forms."""

    checkpoint: str  # of which
    forms: list[ServedForm]  # the original first
    left_out: dict[str, str]  # form → why it is not among them
    max_drop: float  # what a metric may be worse by
    recommended: str  # the form to take
    why: str  # in words

    @classmethod
    def from_dict(cls, checkpoint: str, found: Mapping[str, Any]) -> Served:
        """Of a comparison as ``Comparison.to_dict`` gives it."""
        return cls(
            checkpoint=checkpoint,
            forms=[_form(name, one, name in found["worse"]) for name, one in found["forms"].items()],
            **{name: found[name] for name in ("left_out", "max_drop", "recommended", "why")},
        )

    def frontier(self) -> list[ServedForm]:
        """Those that no other form beats or equals in both latency and what is lost; the fastest first."""
        found: list[ServedForm] = []
        for one in sorted(self.forms, key=lambda form: (form.p50_ms, self.lost(form))):
            if not found or self.lost(one) < self.lost(found[-1]):
                found.append(one)
        return found

    @property
    def metric(self) -> str:
        """The one by which forms are set against their latency; empty: their error is."""
        return next(iter(self.forms[0].scores), "") if self.forms else ""

    def lost(self, form: ServedForm) -> float:
        """By how much a form is worse than the original, in the metric or by its error; infinite: it is no number."""
        found = form.drops.get(self.metric) if self.metric else form.error
        return float("inf") if found is None else found


def _form(name: str, one: Mapping[str, Any], is_worse: bool) -> ServedForm:
    speedup, scores = one["speedup"], one["scores"]
    return ServedForm(
        name=name,
        **{f"{percentile}_ms": one["latency"][percentile] for percentile in ("p50", "p95", "p99")},
        speedup=speedup["ratio"],
        low=speedup["low"],
        high=speedup["high"],
        disk_bytes=one["disk_bytes"],
        error=one["error"],
        scores={metric: score["value"] for metric, score in scores.items()},
        drops={metric: score["drop"] for metric, score in scores.items()},
        is_worse=is_worse,
    )
