"""What the benchmarks of docs/results share: a table and a JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_accel.claims.machine import machine


def publish(
    name: str, command: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], details: Any = None
) -> None:
    """Prints a table and, with ``--json FOLDER``, writes ``FOLDER/name.json``."""
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
        folder.mkdir(parents=True, exist_ok=True)
        record = {"machine": about, "command": command, "columns": columns, "rows": rows, "details": details}
        (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
