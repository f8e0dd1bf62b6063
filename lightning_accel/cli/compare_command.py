"""``lightning-accel compare RUN_A RUN_B``: two runs beside each other, and a gate for CI."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_accel.evidence.compare import Comparison
    from lightning_accel.evidence.record import Record

COMPARED, WORSE, NOT_COMPARABLE = 0, 1, 2
"""Exit statuses."""


def add_parser(subcommands: Any) -> None:
    """Adds ``compare`` to the subcommands of an ``argparse`` parser."""
    parser: argparse.ArgumentParser = subcommands.add_parser(
        "compare",
        help="two runs beside each other: speed, memory, loss, settings",
        description="Sets run B beside run A, by what they have left in the folders of their loggers. The status is 0;"
        " with --gate 1 where B is worse; 2 where they cannot be compared.",
    )
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="the folder of a run, or a record in it")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="the same")
    parser.add_argument(
        "--gate",
        type=_share,
        metavar="3%",
        help="status 1 where B is slower than A by more, with its whole 95%% interval, or needs more memory by more;"
        " 2 also where the machines differ, one did not finish, or memory is not known",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Prints the comparison; returns the exit status."""
    from lightning_accel.evidence.compare import NotComparableError, compare  # late: --help answers without torch
    from lightning_accel.evidence.record import RecordError, read_record

    try:
        a, b = read_record(arguments.run_a), read_record(arguments.run_b)
        found = compare(a, b)
        if arguments.gate is not None:
            check_gate(a, b, found)
    except (RecordError, NotComparableError, OSError) as error:
        print(f"lightning-accel compare: {error}", file=sys.stderr)
        return NOT_COMPARABLE
    gate = arguments.gate
    worse = [] if gate is None else [what for what, is_so in _judged(found, gate) if is_so]
    if arguments.json:
        print(json.dumps({"a": str(a.path), "b": str(b.path), **found.to_dict(), "worse": worse}, indent=2))
    else:
        _show(a, b, found)
        for what in worse:
            print(f"! {what}: B is worse than A by more than {100 * gate:g}%")
    return WORSE if worse else COMPARED


def check_gate(a: Record, b: Record, found: Comparison) -> None:
    """Whether a gate can tell anything of these runs.

    Raises:
        NotComparableError: It cannot.
    """
    from lightning_accel.evidence.compare import NotComparableError

    needs = ""
    if a.header.machine != b.header.machine:
        needs = f"one machine: {a.header.machine} in {a.path}, {b.header.machine} in {b.path}"
    elif unfinished := [record for record in (a, b) if record.status != "finished"]:
        needs = f"runs that have finished: {unfinished[0].path} {unfinished[0].status or 'has no end'}"
    elif found.speed.low == 0:
        needs = f"more steps: {'; '.join(found.remarks)}"
    elif found.memory_mib is None or any("does not know its samples" in remark for remark in found.remarks):
        needs = f"runs that were measured alike: {'; '.join(found.remarks)}"
    if needs:
        raise NotComparableError(f"A gate needs {needs}.")


def _judged(found: Comparison, gate: float) -> list[tuple[str, bool]]:
    return [("speed", found.is_slower(gate)), ("memory", found.is_larger(gate))]


def _show(a: Record, b: Record, found: Comparison) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "A", "B", "B by A", box=None)

    def row(*cells: str) -> None:
        table.add_row(*map(escape, cells))

    first, second = found.per_second
    row(f"{found.unit}/s", f"{first:,.4g}", f"{second:,.4g}", str(found.speed))
    for part, (first, second) in found.parts_ms.items():
        row(f"  {part}, ms a step", f"{first:,.4g}", f"{second:,.4g}", f"{second - first:+,.3g} ms")
    if found.memory_mib is not None:
        first, second = found.memory_mib
        row("peak memory, MiB", f"{first:,.0f}", f"{second:,.0f}", f"{second / first:.2f}x")
    if found.losses is not None:
        first, second = found.losses
        change = f"{(second - first) / abs(first):+.2%}" if first else ""
        row(f"loss, to step {found.loss_step:,}", f"{first:.5g}", f"{second:.5g}", change)
    for name, pair in found.differences.items():
        row(name, *pair, "")
    console = Console(width=max(100, Console().width))
    for letter, record in (("A", a), ("B", b)):
        started = record.header.started.replace("T", " ").removesuffix("+00:00")
        print(f"{letter}: {record.path}, {record.num_steps:,} steps, {started} UTC")
    console.print(table)
    for remark in found.remarks:
        print(f"! {remark}")


def _share(text: str) -> float:
    """``3%`` or ``0.03``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write one between 0% and 100%, as 3% or 0.03.")
    return value
