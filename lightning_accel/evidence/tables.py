"""A page's values as cells of tables: what is shown, and by what it is sorted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.evidence.headline import gain_of
from lightning_accel.evidence.memory_use import MemoryUse
from lightning_accel.evidence.module_tree import Node
from lightning_accel.evidence.page import Page, Trial
from lightning_accel.evidence.peaks import Peaks
from lightning_accel.evidence.served import Served, ServedForm

Cell = tuple[str, float | None]


@dataclass(frozen=True)
class Table:
    """Rows under heads.

    Attributes:
        caption: What it is of, for those who do not see what stands above it.
        heads: Of the columns; those of numbers end in none.
        numeric: Whether a column has numbers, each of them.
        rows: Of cells: what is shown, and its number (None: it has none, and is sorted as text).
        whole: The row below them, which stays there; empty: there is none.
    """

    caption: str
    heads: list[str]
    numeric: list[bool]
    rows: list[list[Cell]]
    whole: list[Cell] = field(default_factory=list)


_EPOCH_HEADS = {
    "epoch": "epoch",
    "samples_per_sec": "samples/s",
    "steps_per_sec": "steps/s",
    "step_ms_p50": "p50, ms",
    "step_ms_p95": "p95, ms",
    "data_wait_frac": "waiting",
    "peak_memory_mib": "peak, MiB",
    "host_rss_mib": "host, MiB",
    "tflops": "TFLOP/s",
    "mfu": "MFU",
    "loss_scale": "loss scale",
    "skipped_steps": "skipped",
    "energy_j_per_sample": "J/sample",
    "stragglers_slowest_rank": "slowest rank",
    "stragglers_step_ms_p95": "its p95, ms",
    "stragglers_step_ms_p95_mean": "of all, ms",
    "stragglers_latest_rank": "latest at backward",
    "stragglers_data_wait_ms": "its data wait, ms",
}
_SHARES = ("data_wait_frac", "mfu")
_MOST_LEAVES = 40
_ALL = "all of it"


def parts_table(page: Page) -> Table:
    """What a step's time goes to."""
    total = page.step_ms or 1.0
    rows = [[part, _number(ms), _share(ms / total)] for part, ms in page.parts_ms.items()]
    found = _table("Parts of a step", {"part": False, "ms": True, "share": True}, rows)
    return replace(found, whole=[(_ALL, None), _number(page.step_ms), _share(1.0)])


def memory_table(memory: MemoryUse) -> Table:
    """What the peak consisted of."""
    named = {**memory.parts, **({memory.beside: memory.beside_bytes} if memory.beside else {})}
    total = sum(named.values()) or 1
    rows = [[name, _bytes(size), _share(size / total)] for name, size in named.items()]
    found = _table("Memory at the peak", {"category": False, "size": True, "share": True}, rows)
    return replace(found, whole=[(_ALL, None), _bytes(total), _share(1.0)])


def held_table(memory: MemoryUse) -> Table:
    """Which modules' forward passes made what was alive at the peak."""
    total = sum(memory.parts.values()) or 1
    rows = [[one.module or "(model)", _bytes(one.bytes), _share(one.bytes / total)] for one in memory.modules]
    return _table("Activations by module", {"module": False, "size": True, "share": True}, rows)


def roof_table(model: Node, peaks: Peaks) -> Table:
    """How near each module without parts comes to what the machine can do."""
    heads = {"module": False, "FLOPs a byte": True, "GFLOP/s": True, "GB/s": True, "of the roof": True, "ms": True}
    leaves = sorted(model.leaves(), key=lambda pair: -pair[1].ms)[:_MOST_LEAVES]
    rows = [
        [
            path,
            _number(one.flops / one.moved_bytes if one.flops and one.moved_bytes else None),
            _number(one.flops / one.ms / 1e6 if one.flops and one.ms > 0 else None),
            _number(one.moved_bytes / one.ms / 1e6 if one.ms > 0 else None),
            _share(one.of_the_roof(peaks)),
            _number(one.ms),
        ]
        for path, one in leaves
    ]
    return _table("Modules under the roof", heads, rows)


def trials_table(trials: Iterable[Trial]) -> Table:
    """What live trials have come to."""
    heads = {"arm": False, "verdict": False, "ratio": True, "95% interval": False, "steps": True, "set up, s": True}
    rows = [
        [
            one.name,
            one.verdict,
            (f"{one.ratio:.3f}x", one.ratio),
            _bounds(one),
            _number(one.steps),
            _number(one.setup_s),
        ]
        for one in trials
    ]
    return _without_empty(_table("Live trials", heads, rows))


def outcomes_table(page: Page) -> Table:
    """What predictions have come to."""
    heads = {"found": False, "predicted": True, "measured": True, "beside": False}
    rows = [
        [one.finding, (f"{one.predicted:.2f}x", one.predicted), (one.measured, one.ratio), one.earlier]
        for one in page.outcomes
    ]
    return _table("Predictions", heads, rows)


def layouts_table(page: Page) -> Table:
    """Copies that only change strides."""
    heads = {"where": False, "made by": False, "times": True, "size": True, "ms": True}
    rows = [
        [
            one.line or f"backward pass of {one.module or 'the model'}",
            one.made_by,
            _number(one.count),
            _bytes(one.moved_bytes),
            _number(one.ms),
        ]
        for one in page.layouts
    ]
    return _table("Layout copies", heads, rows)


def epochs_table(page: Page) -> Table:
    """Epochs, with those columns that some of them have a value for."""
    rows = [
        [_share(one.get(name)) if name in _SHARES else _number(one.get(name)) for name in _EPOCH_HEADS]
        for one in page.epochs
    ]
    return _without_empty(_table("Epochs", dict.fromkeys(_EPOCH_HEADS.values(), True), rows))


def curves_table(page: Page) -> Table:
    """What the curves show, in a few numbers each."""
    heads = {"curve": False, "first": True, "least": True, "most": True, "last": True}
    rows = []
    for name, points in page.curves.items():
        values = [value for _, value in points]
        rows.append([name, *map(_number, (values[0], min(values), max(values), values[-1]))])
    return _table("Over the run", heads, rows)


def served_table(served: Served) -> Table:
    """The forms in which the model was measured for serving."""
    metrics = list(served.forms[0].scores) if served.forms else []
    heads = {"form": False, **dict.fromkeys(("p50, ms", "p95, ms", "p99, ms", "speed"), True), "95% interval": False}
    heads |= dict.fromkeys(("on disk", "error", *(head for name in metrics for head in (name, f"{name} lost"))), True)
    rows = [
        [
            f"{one.name} (worse)" if one.is_worse else one.name,
            *map(_number, (one.p50_ms, one.p95_ms, one.p99_ms)),
            (f"{one.speedup:.2f}x", one.speedup),
            _bounds(one),
            _bytes(one.disk_bytes),
            _number(one.error),
            *(_number(value) for name in metrics for value in (one.scores.get(name), one.drops.get(name))),
        ]
        for one in served.forms
    ]
    return _table("Served forms", heads, rows)


def plain_table(caption: str, values: Mapping[str, str | float]) -> Table:
    """Names and values."""
    rows = [[name, value if isinstance(value, str) else _number(value)] for name, value in values.items()]
    return _table(caption, {"": False, "value": False}, rows)


def _table(caption: str, heads: Mapping[str, bool], rows: Iterable[list[Any]]) -> Table:
    """Of cells that are text, or pairs of text and number."""
    cells = [[cell if isinstance(cell, tuple) else (str(cell), None) for cell in row] for row in rows]
    return Table(caption, list(heads), list(heads.values()), cells)


def _without_empty(table: Table) -> Table:
    """Without the columns that have no value."""
    kept = [place for place in range(len(table.heads)) if any(row[place][0] for row in table.rows)]
    return Table(
        table.caption,
        [table.heads[place] for place in kept],
        [table.numeric[place] for place in kept],
        [[row[place] for place in kept] for row in table.rows],
    )


def _number(value: float | None) -> Cell:
    if value is None:
        return "", None
    return (f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:,.4g}"), value


def _share(value: float | None) -> Cell:
    return ("", None) if value is None else (f"{value:.1%}", value)


def _bytes(size: float) -> Cell:
    return format_bytes(round(size)), size


def _bounds(trial: Trial | ServedForm) -> str:
    """An interval, as it is read."""
    return f"[{trial.low:.2f}, {'∞' if trial.high is None else f'{trial.high:.2f}'}]"


def _rate(amount: float, ms: float) -> str:
    return f"{amount / ms / 1e6:,.3g}" if ms > 0 and amount else ""


def _markdown(text: str) -> str:
    """Of any letters, on one line, as they are read, and nothing of them as markup."""
    escaped = re.sub(r"([\\`*])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))
    return " ".join(escaped.replace("__", r"\_\_").replace("](", r"]\(").split())


def _code(text: str) -> str:
    """As code within a line; backticks of its own are in longer ones."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{' ' if len(ticks) > 1 else ''}{' '.join(text.split())}{' ' if len(ticks) > 1 else ''}{ticks}"


def _fence(text: str, language: str) -> str:
    """As a block of code; backticks of its own are in longer ones."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"


FILTERS: Mapping[str, Callable[..., Any]] = {
    "bytes": lambda size: format_bytes(round(size)),
    "text": _markdown,
    "cell": lambda text: _markdown(str(text)).replace("|", "\\|"),
    "code": _code,
    "fence": _fence,
    "span": lambda value, whole: f"{100 * value / whole:.1f}%" if whole else "0%",
    "gain": gain_of,
    "rate": _rate,
    "parts_table": parts_table,
    "memory_table": memory_table,
    "held_table": held_table,
    "roof_table": roof_table,
    "trials_table": trials_table,
    "outcomes_table": outcomes_table,
    "layouts_table": layouts_table,
    "epochs_table": epochs_table,
    "curves_table": curves_table,
    "served_table": served_table,
    "plain_table": lambda values, caption: plain_table(caption, values),
}
