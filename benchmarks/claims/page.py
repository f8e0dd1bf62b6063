"""A record of claims as a page: the table in Markdown, with its chart beside it."""

from __future__ import annotations

from lightning_accel.claims.claim import RULE, Figure, Unit
from lightning_accel.claims.record import Record, Row

CHART = "claims.svg"


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
        f"\n**How a verdict comes about.** {RULE}\n",
        f"![What was measured against what was claimed, as multiples of the claimed number]({CHART})\n",
        "In the chart, the grey bar is what was claimed, the coloured one what was measured, better to the right, and"
        " the thin line its interval.",
    ]
    return "\n".join(lines) + "\n"


def table(record: Record) -> str:
    """A line a row, in Markdown."""
    heading = "| # | claim | claimed | measured here, with the 95% interval | verdict | why | command |"
    return "\n".join([heading, "| --- " * heading.count("|", 1) + "|", *(_line(row) for row in record.rows)])


def _line(row: Row) -> str:
    found = [_measured(figure) for figure in row.figures]
    found += [f"{gap.condition}: not here, {gap.reason}" for gap in row.missing]
    cells = [
        str(row.row),
        row.text,
        row.claimed,
        "<br>".join(found) or "-",
        f"**{row.verdict}**",
        row.why,
        f"`{row.command}`",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _measured(figure: Figure) -> str:
    interval = "" if figure.low == figure.high else f" [{interval_text(figure)}]"
    claimed = (
        "" if figure.target is None else f"; claimed {target_text(figure)}: {'met' if figure.is_met else 'not met'}"
    )
    note = f" ({figure.note})" if figure.note else ""
    return f"{figure.condition}: **{number_text(figure.value, figure.unit)}**{interval}{note}{claimed}"


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
        return f"{value:,.0f}x" if value >= 100 else f"{value:.2f}x"
    return f"{100 * value:.1f}%" if unit == "%" else f"{value:.1e}"
