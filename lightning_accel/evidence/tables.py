"""A page's values as cells of tables: what is shown, and by what it is sorted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.evidence.cells import Table, bounds, bytes_cell, number_cell, share_cell, table, without_empty
from lightning_accel.evidence.headline import gain_of
from lightning_accel.evidence.memory_use import MemoryUse
from lightning_accel.evidence.module_tree import Node
from lightning_accel.evidence.peaks import Peaks
from lightning_accel.evidence.report_model import Page
from lightning_accel.evidence.run_history import EPOCH_HEADS
from lightning_accel.evidence.served import Served
from lightning_accel.evidence.technique_tables import contributions_table, trials_table

_SHARES = ("data_wait_frac", "mfu")
_MOST_LEAVES = 40
_ALL = "all of it"


def parts_table(page: Page) -> Table:
    """What a step's time goes to."""
    total = page.step_ms or 1.0
    rows = [[part, number_cell(ms), share_cell(ms / total)] for part, ms in page.parts_ms.items()]
    found = table("Parts of a step", {"part": False, "ms": True, "share": True}, rows)
    return replace(found, whole=[(_ALL, None), number_cell(page.step_ms), share_cell(1.0)])


def memory_table(memory: MemoryUse) -> Table:
    """What the peak consisted of."""
    named = {**memory.parts, **({memory.beside: memory.beside_bytes} if memory.beside else {})}
    total = sum(named.values()) or 1
    rows = [[name, bytes_cell(size), share_cell(size / total)] for name, size in named.items()]
    found = table("Memory at the peak", {"category": False, "size": True, "share": True}, rows)
    return replace(found, whole=[(_ALL, None), bytes_cell(total), share_cell(1.0)])


def held_table(memory: MemoryUse) -> Table:
    """Which modules' forward passes made what was alive at the peak."""
    total = sum(memory.parts.values()) or 1
    rows = [[one.module or "(model)", bytes_cell(one.bytes), share_cell(one.bytes / total)] for one in memory.modules]
    return table("Activations by module", {"module": False, "size": True, "share": True}, rows)


def roof_table(model: Node, peaks: Peaks) -> Table:
    """How near each module without parts comes to what the machine can do."""
    heads = {"module": False, "FLOPs a byte": True, "GFLOP/s": True, "GB/s": True, "of the roof": True, "ms": True}
    leaves = sorted(model.leaves(), key=lambda pair: -pair[1].ms)[:_MOST_LEAVES]
    rows = [
        [
            path,
            number_cell(one.flops / one.moved_bytes if one.flops and one.moved_bytes else None),
            number_cell(one.flops / one.ms / 1e6 if one.flops and one.ms > 0 else None),
            number_cell(one.moved_bytes / one.ms / 1e6 if one.ms > 0 else None),
            share_cell(one.of_the_roof(peaks)),
            number_cell(one.ms),
        ]
        for path, one in leaves
    ]
    return table("Modules under the roof", heads, rows)


def outcomes_table(page: Page) -> Table:
    heads = {"found": False, "predicted": True, "measured": True, "beside": False}
    rows = [
        [one.finding, (f"{one.predicted:.2f}x", one.predicted), (one.measured, one.ratio), one.earlier]
        for one in page.outcomes
    ]
    return table("Predictions", heads, rows)


def layouts_table(page: Page) -> Table:
    """Copies that only change strides."""
    heads = {"where": False, "made by": False, "times": True, "size": True, "ms": True}
    rows = [
        [
            one.line or f"backward pass of {one.module or 'the model'}",
            one.made_by,
            number_cell(one.count),
            bytes_cell(one.moved_bytes),
            number_cell(one.ms),
        ]
        for one in page.layouts
    ]
    return table("Layout copies", heads, rows)


def epochs_table(page: Page) -> Table:
    """Epochs, with those columns that some of them have a value for."""
    rows = [
        [share_cell(one.get(name)) if name in _SHARES else number_cell(one.get(name)) for name in EPOCH_HEADS]
        for one in page.epochs
    ]
    return without_empty(table("Epochs", dict.fromkeys(EPOCH_HEADS.values(), True), rows))


def curves_table(page: Page) -> Table:
    """What the curves show, in a few numbers each."""
    heads = {"curve": False, "first": True, "least": True, "most": True, "last": True}
    rows = []
    for name, points in page.curves.items():
        values = [value for _, value in points]
        rows.append([name, *map(number_cell, (values[0], min(values), max(values), values[-1]))])
    return table("Over the run", heads, rows)


def served_table(served: Served) -> Table:
    """The forms in which the model was measured for serving."""
    metrics = list(served.forms[0].scores) if served.forms else []
    heads = {"form": False, **dict.fromkeys(("p50, ms", "p95, ms", "p99, ms", "speed"), True), "95% interval": False}
    heads |= dict.fromkeys(("on disk", "error", *(head for name in metrics for head in (name, f"{name} lost"))), True)
    rows = [
        [
            f"{one.name} (worse)" if one.is_worse else one.name,
            *map(number_cell, (one.p50_ms, one.p95_ms, one.p99_ms)),
            (f"{one.speedup:.2f}x", one.speedup),
            bounds(one.low, one.high),
            bytes_cell(one.disk_bytes),
            number_cell(one.error),
            *(number_cell(value) for name in metrics for value in (one.scores.get(name), one.drops.get(name))),
        ]
        for one in served.forms
    ]
    return table("Served forms", heads, rows)


def plain_table(caption: str, values: Mapping[str, str | float]) -> Table:
    rows = [[name, value if isinstance(value, str) else number_cell(value)] for name, value in values.items()]
    return table(caption, {"": False, "value": False}, rows)


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
    "contributions_table": contributions_table,
    "outcomes_table": outcomes_table,
    "layouts_table": layouts_table,
    "epochs_table": epochs_table,
    "curves_table": curves_table,
    "served_table": served_table,
    "plain_table": lambda values, caption: plain_table(caption, values),
}
