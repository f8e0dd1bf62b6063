"""Cells and tables: what is shown, and by what it is sorted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_accel.core.byte_size import format_bytes

Cell = tuple[str, float | None]
NOTHING: Cell = ("", None)


@dataclass(frozen=True)
class Table:
    """Rows under heads."""

    caption: str  # what it is of, for those who do not see what stands above it
    heads: list[str]  # of the columns; those of numbers end in none
    numeric: list[bool]  # whether a column has numbers, each of them
    rows: list[list[Cell]]  # of cells: what is shown, and its number (None: it has none, and is sorted as text)
    whole: list[Cell] = field(default_factory=list)  # the row below them, which stays there; empty: there is none


def table(caption: str, heads: Mapping[str, bool], rows: Iterable[list[Any]]) -> Table:
    """Of cells that are text, or pairs of text and number."""
    cells = [[cell if isinstance(cell, tuple) else (str(cell), None) for cell in row] for row in rows]
    return Table(caption, list(heads), list(heads.values()), cells)


def without_empty(table: Table) -> Table:
    """Without the columns that have no value."""
    kept = [place for place in range(len(table.heads)) if any(row[place][0] for row in table.rows)]
    return Table(
        table.caption,
        [table.heads[place] for place in kept],
        [table.numeric[place] for place in kept],
        [[row[place] for place in kept] for row in table.rows],
    )


def number_cell(value: float | None) -> Cell:
    if value is None:
        return NOTHING
    return (f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:,.4g}"), value


def share_cell(value: float | None) -> Cell:
    return NOTHING if value is None else (f"{value:.1%}", value)


def bytes_cell(size: float) -> Cell:
    return format_bytes(round(size)), size


def bounds(low: float, high: float | None) -> str:
    """An interval, as it is read; None: it has no upper bound."""
    return f"[{low:.2f}, {'∞' if high is None else f'{high:.2f}'}]"
