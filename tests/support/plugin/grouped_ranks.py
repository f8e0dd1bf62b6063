"""A training of two CPU processes with `padding`'s grouping by length; what each rank saw goes to ``<rank>.json``.

Run by a test in a process of its own: python grouped_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.plugin.texts import Reader, fit, loader
from support.strategies.forks import in_ranks


def run(folder: Path, rank: int) -> None:
    module = Reader()
    report = fit(module, loader(), devices=2, strategy="ddp").report
    said = {"seen": module.seen, "status": report.of("padding").status}
    (folder / f"{rank}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    in_ranks(functools.partial(run, Path(sys.argv[1])), 2, patience_s=120)
