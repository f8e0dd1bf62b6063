"""What the GPU benchmarks share: their arguments, the machine's facts, a table, and the files they leave."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what every GPU benchmark takes: where results go, and whether to run tiny on a CPU."""
    parser = argparse.ArgumentParser(description=description)
    default_out = os.environ.get("OUT") or "docs/results"
    parser.add_argument("--out", type=Path, default=Path(default_out), help="folder for the JSON and the table")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU where there is no GPU; writes too")
    return parser


def is_possible(args: argparse.Namespace) -> bool:
    """Whether there is anything to measure on, said where there is not."""
    if torch.cuda.is_available() or args.dry_run:
        return True
    print("no CUDA device: nothing measured")
    return False


def machine() -> dict[str, Any]:
    """The device and the versions that the numbers belong to."""
    import lightning

    has_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_gpu else "CPU (dry run)",
        "capability": list(torch.cuda.get_device_capability()) if has_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "lightning": lightning.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, readable as it stands; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write(name: str, folder: Path, record: dict[str, Any], heading: str, text: str) -> None:
    """Writes ``gpu-<name>-<device>-torch-<version>.json`` and ``.md``.

    Args:
        name: Of the benchmark; empty for the models.
        folder: Where to; made if need be.
        record: What goes into the JSON file beside the machine's facts.
        heading: Said over the table, before the machine and its versions.
        text: The table.
    """
    facts = machine()
    slug = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    stem = "-".join(part for part in ("gpu", name, slug, "torch", facts["torch"].partition("+")[0]) if part)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps({**facts, **record}, indent=2) + "\n", encoding="utf-8")
    where = f"{facts['device']}, torch {facts['torch']}, lightning {facts['lightning']}, {facts['date']}"
    said = f"{heading} {where}." if heading else where
    (folder / f"{stem}.md").write_text(f"{said}\n\n{text}\n", encoding="utf-8")
    print(f"\nwritten: {folder / stem}.json and .md")
