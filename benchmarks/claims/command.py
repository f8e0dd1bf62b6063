"""``lightning-accel claims``: the rows measured, a table printed, the page written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from lightning_accel.cli.command import console, print_json


def claims(
    *,
    row: Annotated[list[int] | None, {"metavar": "N"}] = None,
    json: bool = False,
    out: Annotated[Path | None, {"metavar": "FOLDER"}] = None,
) -> int:
    """Measures on this machine what articles promise of PyTorch's speed, a few seconds a claim, and says what holds.

    All rows together take under five minutes on two cores, and write a page, with a column for each machine that was
    ever measured.

    Args:
        row: only this one; may be repeated
        json: print the record as JSON in the table's stead
        out: folder for claims.md, and for claims/ with the figures and the chart of this machine; other machines'
            there stay as they are (default: docs; with --row: nothing is written)

    Returns:
        The exit status, 1 where a benchmark broke off with an error.

    Raises:
        ValueError: A row that there is not.
    """
    from lightning_accel.claims.machine import machine
    from lightning_accel.claims.record import measure_rows, row_numbers

    numbers = row_numbers()
    strange = [number for number in row or () if number not in numbers]
    if strange:
        raise ValueError(f"--row {strange[0]}: there is none. Allowed: {min(numbers)} to {max(numbers)}.")
    folder = out or (None if row else Path("docs"))
    older = None if folder is None else _kept(folder, machine(), is_partial=bool(row))
    record = measure_rows(row or list(numbers), lambda line: print(line, file=sys.stderr, flush=True))
    if json:
        print_json(record.to_dict())
    else:
        show(record)
    if folder is not None:
        write(folder, record if older is None else record.with_rows_of(older))
    return int(any(one.has_failed for one in record.rows))


def _kept(folder: Path, about: dict[str, Any], *, is_partial: bool) -> Any:
    """What is kept of an older record where some rows are measured; before minutes are spent that cannot be written."""
    from lightning_accel.claims.machine import slug
    from lightning_accel.claims.page import FOLDER
    from lightning_accel.claims.record import Record

    try:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: no folder can be made there ({error.strerror}).") from None
    path = folder / FOLDER / f"{slug(about)}.json"
    if not is_partial or not path.exists():
        return None
    older = Record.from_dict(json.loads(path.read_text(encoding="utf-8")))
    if older.machine != about:
        was, now = (
            ", ".join(f"{name} {of[name]}" for name in about if older.machine.get(name) != about[name])
            for of in (older.machine, about)
        )
        raise ValueError(
            f"--row: {path} was measured with {was}, here is {now}: rows of both in one column would not be comparable."
            " Measure all rows, without --row, or give another --out."
        )
    return older


def write(folder: Path, record: Any) -> None:
    """The record and its chart, and the page of every machine whose record is there."""
    from lightning_accel.claims.chart import svg
    from lightning_accel.claims.machine import slug
    from lightning_accel.claims.page import FOLDER, page
    from lightning_accel.claims.record import Record

    path = folder / FOLDER / f"{slug(record.machine)}.json"
    path.write_text(json.dumps(record.to_dict(), indent=2) + "\n", encoding="utf-8")
    path.with_suffix(".svg").write_text(svg(record), encoding="utf-8")
    paths = sorted((folder / FOLDER).glob("*.json"))
    records = [Record.from_dict(json.loads(found.read_text(encoding="utf-8"))) for found in paths]
    (folder / "claims.md").write_text(page(records), encoding="utf-8")
    print(f"written: {path}, its chart beside it, {folder / 'claims.md'} of all machines", file=sys.stderr)


def show(record: Any) -> None:
    """Prints the table."""
    from rich.table import Table

    from lightning_accel.claims.machine import title
    from lightning_accel.claims.page import MET, interval_text, number_text, target_text

    printed = console(160)
    plain: Any = {"highlight": False, "markup": False, "soft_wrap": True}
    printed.print(f"{title(record.machine)}; torch {record.machine['torch']}", **plain)
    table = Table("#", "claim", "condition", "claimed", "measured", "95% interval", "met")
    for row in record.rows:
        lines = []
        for figure in row.figures:
            measured = number_text(figure.value, figure.unit), interval_text(figure), MET[figure.is_met]
            lines.append((figure.condition, target_text(figure), *measured))
        lines += [(gap.condition, "", "not here", gap.reason, "") for gap in row.missing]
        for index, line in enumerate(lines or [("", row.claimed, "not here", "", "")]):
            table.add_row(*((str(row.row), row.text) if index == 0 else ("", "")), *line)
        table.add_section()
    printed.print(table, markup=False)
    for row in record.rows:
        printed.print(f"{row.row}: {row.verdict}. {row.why}", **plain)
