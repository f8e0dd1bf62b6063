"""Records of claims as a page: the verdicts of every machine side by side, then all figures, claim by claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_accel.claims.claim import RULE, Figure, Missing, Unit
from lightning_accel.claims.machine import slug, title
from lightning_accel.claims.record import Record, Row

FOLDER = "claims"  # beside the page: every machine's record and chart
MET = {True: "yes", False: "no", None: ""}
_MARKS = {True: " ✓", False: " ✗", None: ""}


def page(records: Sequence[Record]) -> str:
    """``claims.md``."""
    lines = [
        "# The claims, measured\n",
        "What widely read articles promise of PyTorch's speed, and what of it is so, a column for each machine that"
        " measured it. `lightning-accel claims` measures it on yours, and adds its column to this page or replaces it;"
        " the others stay.\n",
        machines_table(records),
        "\n## Verdicts\n",
        table(records),
        "\nUnder a verdict stand the figures that it follows from, in the order of the conditions below: ✓ meets what"
        " is claimed, ✗ does not.\n",
        f"**How a verdict comes about.** {RULE}\n",
        "## Claim by claim\n",
        details(records),
        "\n## Charts\n",
        "The grey bar is what was claimed, the coloured one what was measured, better to the right, and the thin line"
        " its interval.\n",
        *(f"![Claimed and measured on {title(of.machine)}]({FOLDER}/{slug(of.machine)}.svg)\n" for of in records),
    ]
    return "\n".join(lines)


def machines_table(records: Sequence[Record]) -> str:
    """A line a machine: what it is, what ran on it, and which rows other processes disturbed."""
    heading = ("machine", "threads", "torch", "Python", "measured on", "rows measured", "seconds", "to be repeated")
    lines = []
    for record in records:
        about = record.machine
        measured = f"{sum(1 for row in record.rows if row.figures)} of {len(record.rows)}"
        seconds = f"{sum(row.seconds for row in record.rows):.0f}"
        disturbed = ", ".join(str(row.row) for row in record.rows if row.is_disturbed)
        remark = f"other processes were busy meanwhile: {disturbed}" if disturbed else ""
        versions = str(about["threads"]), about["torch"], about["python"]
        lines.append((title(about), *versions, record.date, measured, seconds, remark))
    return _markdown(heading, lines)


def table(records: Sequence[Record]) -> str:
    """A line a claim, with the verdict of every machine and the figures that it follows from."""
    lines = [
        (f"[{number}](#claim-{number})", claim.text, claim.claimed, *map(_verdict, rows))
        for number, claim, rows in _side_by_side(records)
    ]
    return _markdown(("#", "claim", "claimed", *(title(record.machine) for record in records)), lines)


def _verdict(row: Row | None) -> str:
    if row is None:
        return ""
    judged = [figure for figure in row.figures if figure.target is not None]
    met = sum(figure.is_met is True for figure in judged)
    counted = f" ({met} of {len(judged)})" if row.outcome == "holds when" else ""
    found = ", ".join(f"{number_text(figure.value, figure.unit)}{_MARKS[figure.is_met]}" for figure in judged)
    return f"**{row.outcome}**{counted}{'<br>' if found else ''}{found}"


def details(records: Sequence[Record]) -> str:
    """A table a claim: a line a condition, a column a machine; then every machine's verdict and its reason."""
    return "\n\n".join(_detail(records, *found) for found in _side_by_side(records))


def _detail(records: Sequence[Record], number: int, claim: Row, rows: Sequence[Row | None]) -> str:
    found = [_by_condition(row) for row in rows]
    conditions = dict.fromkeys(condition for by_condition in found for condition in by_condition)
    lines = [
        (condition, _claimed(condition, found), *(_cell(by_condition.get(condition)) for by_condition in found))
        for condition in conditions
    ]
    titles = [title(record.machine) for record in records]
    parts = [f'### <a id="claim-{number}"></a>{number}. {claim.text}', f"Claimed: {claim.claimed}. `{claim.command}`"]
    parts += [_markdown(("condition", "claimed", *titles), lines)] if lines else []
    said: dict[tuple[str, str], list[str]] = {}
    for where, row in zip(titles, rows, strict=True):
        if row is not None:
            said.setdefault((row.verdict, row.why), []).append(where)
    parts += [f"- {'; '.join(where)}: **{verdict}**: {why}." for (verdict, why), where in said.items()]
    return "\n\n".join(parts)


def _side_by_side(records: Sequence[Record]) -> Iterable[tuple[int, Row, list[Row | None]]]:
    """Every number, the claim in its newest words, and each record's row of it."""
    by_number = [{row.row: row for row in record.rows} for record in records]
    for number in sorted({number for rows in by_number for number in rows}):
        rows = [rows.get(number) for rows in by_number]
        _, newest = max((record.date, index) for index, record in enumerate(records) if rows[index] is not None)
        claim = rows[newest]
        assert claim is not None
        yield number, claim, rows


def _by_condition(row: Row | None) -> Mapping[str, Figure | Missing]:
    found: tuple[Figure | Missing, ...] = () if row is None else (*row.figures, *row.missing)
    return {one.condition: one for one in found}


def _claimed(condition: str, found: Iterable[Mapping[str, Figure | Missing]]) -> str:
    figures = [by_condition.get(condition) for by_condition in found]
    return next((target_text(figure) for figure in figures if isinstance(figure, Figure)), "")


def _cell(found: Figure | Missing | None) -> str:
    if found is None:
        return ""
    if isinstance(found, Missing):
        return f"not here: {found.reason}"
    interval = "" if found.low == found.high else f" [{interval_text(found)}]"
    note = f"<br>{found.note}" if found.note else ""
    return f"**{number_text(found.value, found.unit)}**{interval}{_MARKS[found.is_met]}{note}"


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
