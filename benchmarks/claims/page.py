"""A record of claims as a page: the table in Markdown, with its chart beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_accel.claims.claim import RULE, Figure, Unit
from lightning_accel.claims.record import Record, Row

CHART = "claims.svg"
_FEW = 6  # figures, of which the summary has those without a claimed number too
MET = {True: "yes", False: "no", None: ""}


def page(record: Record) -> str:
    """``claims.md``."""
    about = record.machine
    measured = sum(1 for row in record.rows if row.figures)
    seconds = sum(row.seconds for row in record.rows)
    lines = [
        "# The claims, measured\n",
        "What widely read articles promise of PyTorch's speed, and what of it is so on one machine. `lightning-accel"
        " claims` measures it again on yours and writes this page; the command in each row measures that row alone.\n",
        f"Measured on **{about['device']}**, {about['cores']} cores, {about['threads']} threads, torch"
        f" {about['torch']}, Python {about['python']}, on {record.date}: {measured} of {len(record.rows)} rows in"
        f" {seconds:.0f} seconds.\n",
        table(record),
        *_disturbed(record),
        f"\n**How a verdict comes about.** {RULE}\n",
        f"![What was measured against what was claimed, as multiples of the claimed number]({CHART})\n",
        "In the chart, the grey bar is what was claimed, the coloured one what was measured, better to the right, and"
        " the thin line its interval.\n",
        "## All figures\n",
        figures_table(record),
    ]
    return "\n".join(lines) + "\n"


def _disturbed(record: Record) -> list[str]:
    rows = [str(row.row) for row in record.rows if row.is_disturbed]
    return [f"\nOther processes were busy meanwhile, of rows {', '.join(rows)}: measure these again."] if rows else []


def table(record: Record) -> str:
    """A line a row, in Markdown."""
    heading = ("#", "claim", "claimed", "measured here, with the 95% interval", "verdict", "why", "command")
    return _markdown(heading, [_summary(row) for row in record.rows])


def figures_table(record: Record) -> str:
    """A line a figure, in Markdown."""
    heading = ("#", "condition", "claimed", "measured", "95% interval", "met", "")
    lines = [
        (
            str(row.row),
            figure.condition,
            target_text(figure),
            number_text(figure.value, figure.unit),
            interval_text(figure),
            MET[figure.is_met],
            figure.note,
        )
        for row in record.rows
        for figure in row.figures
    ]
    gaps = [
        (str(row.row), gap.condition, "", "not here", "", "", gap.reason) for row in record.rows for gap in row.missing
    ]
    return _markdown(heading, sorted([*lines, *gaps], key=lambda cells: int(cells[0])))


def _summary(row: Row) -> Sequence[str]:
    is_short = len(row.figures) <= _FEW
    shown = [_measured(figure) for figure in row.figures if is_short or figure.target is not None]
    return (
        str(row.row),
        row.text,
        row.claimed,
        "<br>".join(shown) or "-",
        f"**{row.verdict}**",
        row.why,
        f"`{row.command}`",
    )


def _measured(figure: Figure) -> str:
    interval = "" if figure.low == figure.high else f" [{interval_text(figure)}]"
    return f"{figure.condition}: **{number_text(figure.value, figure.unit)}**{interval}"


def _markdown(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    )


def interval_text(figure: Figure) -> str:
    """From where to where its interval goes; that it was counted, where it has none."""
    if figure.low == figure.high:
        return "counted"
    return f"{number_text(figure.low, figure.unit)} to {number_text(figure.high, figure.unit)}"


def target_text(figure: Figure) -> str:
    """What is claimed of it: ``at least 5.00x``; empty for nothing."""
    target = figure.target
    return "" if target is None else f"{target.kind} {number_text(target.number, figure.unit)}"


def number_text(value: float, unit: Unit) -> str:
    """A number in its unit."""
    if unit == "x":
        return f"{value:,.0f}x" if value >= 100 else f"{value:.2f}x" if value >= 0.1 else f"{value:.2g}x"
    if unit == "%":
        return f"{100 * value:.1f}%"
    return f"{value:.1e}" if value else "0"
