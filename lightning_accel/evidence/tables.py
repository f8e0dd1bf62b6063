"""The tables of a page: what each is of, and its columns as (heading, field, format). All forms render the same."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from lightning_accel.evidence.amounts import figure, share, size
from lightning_accel.evidence.report_model import Page
from lightning_accel.evidence.run_history import EPOCH_COLUMNS
from lightning_accel.evidence.technique_summary import Tried
from lightning_accel.experiment.pair_test import RatioInterval

Cell = tuple[str, float | None]
"""What is shown, and the number by which it is sorted; None: it is sorted as text."""

Field = str | int | Callable[[Any], Any]
"""Of a row: its attribute, or its key where it is a mapping; its place where it is a tuple; or what reads it."""

Column = tuple[str, Field, Callable[[Any], Cell]]

_MOST_LEAVES = 40


@dataclass(frozen=True)
class Table:
    """Rows under heads."""

    caption: str  # what it is of, for those who do not see what stands above it
    heads: list[str]
    numeric: list[bool]  # whether a column has numbers
    rows: list[list[Cell]]
    whole: list[Cell]  # the row below them, which stays there; empty: there is none


def table(caption: str, columns: Sequence[Column], items: Iterable[Any], whole: Any = None) -> Table:
    """A row for each item, without the columns in which none has anything."""
    items = list(items)
    rows = [[form(_value(item, field)) for _, field, form in columns] for item in [*items, *([whole] if whole else [])]]
    kept = [place for place in range(len(columns)) if any(row[place][0] for row in rows)]
    rows = [[row[place] for place in kept] for row in rows]
    heads, numeric = [columns[place][0] for place in kept], [columns[place][2] is not text for place in kept]
    return Table(caption, heads, numeric, rows[: len(items)], rows[-1] if whole else [])


def _value(item: Any, field: Field) -> Any:
    if callable(field):
        return field(item)
    if isinstance(field, int):
        return item[field]
    return item.get(field) if isinstance(item, Mapping) else getattr(item, field)


# -- formats: a value as a cell; None is an empty one ----------------------------------------------------------------


def text(value: Any) -> Cell:
    return ("" if value is None else str(value)), None


def _cell(form: Callable[[float], str]) -> Callable[[float | None], Cell]:
    return lambda value: ("", None) if value is None else (form(value), value)


number, milliseconds = _cell(figure), _cell(lambda ms: "<0.01" if 0 < ms < 0.01 else figure(ms, 3))
sized, shared, times = _cell(size), _cell(share), _cell(lambda ratio: f"{ratio:.2f}x")


def interval(bounds: tuple[float, float, float | None] | None) -> Cell:
    """Of a ratio, its lower and its upper bound; None: that is not known."""
    if bounds is None:
        return "", None
    ratio, low, high = bounds
    return str(RatioInterval(ratio, low, math.inf if high is None else high)), ratio


def _memory(pair: tuple[int | None, int | None] | None) -> Cell:
    """How many times as much, and how much more or less."""
    without, with_it = pair or (None, None)
    if not without or with_it is None:
        return "", None
    more = with_it - without
    return f"{with_it / without:.2f}x ({'+' if more >= 0 else '−'}{size(abs(more))})", with_it / without


def _spreads(one: Tried) -> Cell:
    off = one.error_spreads
    if one.measured is not None and one.measured.is_same:
        return "the same to the bit", 0.0
    if off is None or math.isnan(off):
        return "", None
    if math.isinf(off):
        return "not a number", sys.float_info.max
    return (f"{off:.2g} times" if off < 100 else f"{off:,.0f} times"), off


# -- the tables --------------------------------------------------------------------------------------------------------


def of(page: Page) -> dict[str, Table]:
    """All that a page has, by name; those that there is nothing for have no rows."""
    memory, model, peaks, served = page.memory, page.modules, page.peaks, page.served
    held = {one.module or "(model)": one.bytes for one in memory.modules}
    whole_ms = 0.0 if model is None else model.ms
    modules = [] if model is None else [replace(one, name=f"{'· ' * depth}{one.name}") for depth, one in model.walk()]
    leaves = [] if model is None else [replace(one, name=path) for path, one in model.leaves()]
    metrics = list(served.forms[0].scores) if served is not None and served.forms else []
    return {
        "parts": _shares("Parts of a step", ("part", "ms"), milliseconds, page.parts_ms, "total"),
        "memory": _shares("Memory at the peak", ("what", "size"), sized, memory.parts, "all tensors"),
        "held": _shares("Activations by module", ("module", "size"), sized, held, of=sum(memory.parts.values())),
        "modules": table(
            "Modules",
            [
                ("module", "name", text),
                ("class", "kind", text),
                ("share", lambda node: node.ms / (whole_ms or 1.0), shared),
                ("forward, ms op by op", "forward_ms", milliseconds),
                ("backward, ms op by op", "backward_ms", milliseconds),
                ("GFLOP/s", "gflops_per_sec", number),
                ("GB/s", "gb_per_sec", number),
                ("memory at the peak", "held_bytes", sized),
            ],
            modules,
        ),
        "limits": table(
            "Modules beside the limits of the machine",
            [
                ("module", "name", text),
                ("FLOPs a byte", "flops_per_byte", number),
                ("GFLOP/s", "gflops_per_sec", number),
                ("GB/s", "gb_per_sec", number),
                ("share of the limit", lambda node: node.of_the_roof(peaks), shared),
                ("ms, op by op", "ms", milliseconds),
            ],
            () if peaks is None else sorted(leaves, key=lambda node: -node.ms)[:_MOST_LEAVES],
        ),
        "trials": table(
            "Live trials",
            [
                ("option", "name", text),
                ("verdict", "verdict", text),
                ("speed, 95% interval", _BOUNDS, interval),
                ("steps", "steps", number),
                ("peak memory", _PEAKS, _memory),
                ("set up, s", "setup_s", number),
            ],
            page.trials,
        ),
        "techniques": table("Techniques", _TECHNIQUE, _asked_for(page.techniques)),
        "outcomes": table(
            "Predictions",
            [
                ("found", "finding", text),
                ("predicted", "predicted", times),
                ("measured", attrgetter("measured", "ratio"), tuple),
                ("earlier run", "earlier", text),
            ],
            page.outcomes,
        ),
        "layouts": table(
            "Layout copies",
            [
                ("where", lambda one: one.line or f"backward pass of {one.module or 'the model'}", text),
                ("made by", "made_by", text),
                ("times", "count", number),
                ("size", "moved_bytes", sized),
                ("ms, op by op", "ms", milliseconds),
            ],
            page.layouts,
        ),
        "epochs": table(
            "Epochs",
            [(head, name, shared if is_share else number) for name, (head, is_share) in EPOCH_COLUMNS.items()],
            page.epochs,
        ),
        "curves": table(
            "Over the run",
            [("curve", "curve", text), *((head, head, number) for head in ("first", "least", "most", "last"))],
            (_course(name, [value for _, value in points]) for name, points in page.curves.items()),
        ),
        "cards": table("Cards", _NAMED, page.cards.items()),
        "served": table(
            "Served forms",
            [
                ("form", lambda one: f"{one.name} (worse)" if one.is_worse else one.name, text),
                *((f"{name}, ms", f"{name}_ms", milliseconds) for name in ("p50", "p95", "p99")),
                ("speed, 95% interval", attrgetter("speedup", "low", "high"), interval),
                ("on disk", "disk_bytes", sized),
                ("error", "error", number),
                *(
                    (head, lambda one, of=of, name=name: getattr(one, of).get(name), number)
                    for name in metrics
                    for head, of in ((name, "scores"), (f"{name} lost", "drops"))
                ),
            ],
            () if served is None else served.forms,
        ),
        "machine": table("Machine", _PLAIN, page.machine.items()),
        "plan": table("Settings", _PLAIN, page.plan.items()),
    }


def _shares(
    caption: str,
    heads: tuple[str, str],
    form: Callable[[Any], Cell],
    values: Mapping[str, float],
    whole: str = "",
    of: float = 0.0,
) -> Table:
    """Parts of a whole, with their shares."""
    total = of or sum(values.values()) or 1.0
    columns: list[Column] = [(heads[0], 0, text), (heads[1], 1, form), ("share", lambda one: one[1] / total, shared)]
    return table(caption, columns, values.items(), (whole, total) if whole else None)


def _course(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {"curve": name, "first": values[0], "least": min(values), "most": max(values), "last": values[-1]}


def _asked_for(techniques: Iterable[Tried]) -> list[Tried]:
    """Those that were; together where nothing was measured of them and there is one reason."""
    found: dict[Any, Tried] = {}
    for one in techniques:
        if one.came_of_it is not None and not one.is_off:
            has_figures = one.trial is not None or one.measured is not None
            key = one.name if has_figures else (one.came_of_it, one.why)
            found[key] = replace(one, name=f"{found[key].name}, {one.name}") if key in found else one
    return list(found.values())


def _judged_on(one: Tried) -> str:
    if one.trial is not None:
        return f"{one.trial.steps:,} steps"
    part = one.measured
    return "first batch" if part is not None and (part.error is not None or part.original_ms is not None) else ""


def _of_part(over: str, under: str) -> Callable[[Tried], float | None]:
    """The ratio of two figures of the part that a technique replaces."""

    def ratio(one: Tried) -> float | None:
        above, below = getattr(one.measured, over, None), getattr(one.measured, under, None)
        return None if above is None or not below else above / below

    return ratio


_BOUNDS, _PEAKS = attrgetter("ratio", "low", "high"), attrgetter("peak_bytes_without", "peak_bytes_with")
_TECHNIQUE: list[Column] = [
    ("technique", "name", text),
    ("result", "came_of_it", text),
    ("why", "why", text),
    ("speed of whole steps", lambda one: None if one.trial is None else _BOUNDS(one.trial), interval),
    ("judged on", _judged_on, text),
    ("peak memory", lambda one: None if one.trial is None else _PEAKS(one.trial), _memory),
    ("error beside rounding", lambda one: one, _spreads),
    ("speed of what it replaces", _of_part("original_ms", "candidate_ms"), times),
    ("memory of what it replaces", _of_part("candidate_bytes", "original_bytes"), times),
]
_NAMED: list[Column] = [("what", 0, text), ("value", 1, number)]
_PLAIN: list[Column] = [("what", 0, text), ("value", 1, text)]
