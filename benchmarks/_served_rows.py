"""What was measured of a model's forms, as rows of a table; with nothing imported that a bare machine lacks."""

from __future__ import annotations

import re

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.deploy import Comparison
from lightning_accel.deploy.measured_forms import Measured

COLUMNS = (
    "model",
    "form",
    "p50, p95, p99, ms",
    "speed",
    "on disk",
    "first call, ms",
    "accuracy",
    "points lost",
    "error",
)


def row(model: str, name: str, form: Measured, eager: Measured) -> list[str]:
    timing = form.latency
    (score,) = form.scores.values() or (None,)
    lost = "" if score is None else _points(score.drop, score.drop_low, score.drop_high)
    return [
        model,
        name,
        ", ".join(f"{one:.3g}" for one in (timing.p50, timing.p95, timing.p99)),
        str(form.speedup) if name != "eager" else "",
        f"{format_bytes(form.disk_bytes)} ({form.disk_bytes / eager.disk_bytes:.0%})",
        f"{form.first_call_ms:.0f}",
        "" if score is None else f"{score.value:.1%} [{score.low:.1%}, {score.high:.1%}]",
        lost if name != "eager" else "",
        f"{form.error:.1e}",
    ]


def _points(drop: float, low: float, high: float) -> str:
    return f"{100 * drop:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def rows_of(model: str, found: Comparison) -> list[list[str]]:
    """Of a comparison, what was left out included, and what is recommended."""
    eager = found.forms["eager"]
    rows = [row(model, name, form, eager) for name, form in found.forms.items()]
    gaps = [""] * (len(COLUMNS) - 3)
    rows += [[model, name, without_folders(why), *gaps] for name, why in found.left_out.items()]
    for one in rows:
        one[1] = f"**{one[1]}**" if one[1] == found.recommended else one[1]
    return rows


def without_folders(why: str) -> str:
    """A reason with the names of files, and not where they lie on this machine."""
    return re.sub(r"(?:/[^\s/:]+)+/", "", why)
