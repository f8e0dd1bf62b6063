"""What the benchmarks of docs/results share: a table and a JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_accel.claims.machine import machine, slug


def publish(
    name: str,
    command: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    details: Any = None,
    *,
    by_machine: bool = False,
) -> None:
    """Prints a table and, with ``--json FOLDER``, writes it there.

    Args:
        name: Of the file ``FOLDER/name.json``.
        command: That measures it again.
        columns: Headings.
        rows: Of the table.
        details: Whatever else is worth keeping.
        by_machine: Whether every machine has a file of its own, ``FOLDER/name/<machine>.json``.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", type=Path)
    folder = parser.parse_known_args()[0].json
    about = machine()
    print(f"\n{name} on {about['device']}, {about['cores']} cores, torch {about['torch']}  ({command})")
    texts = [[str(cell) for cell in row] for row in [columns, *rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if folder is not None:
        path = folder / name / f"{slug(about)}.json" if by_machine else folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": about, "command": command, "columns": columns, "rows": rows, "details": details}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
