"""``lightning-accel compare RUN_A RUN_B``: compares two runs, with a gate for CI."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lightning_accel.cli.command import print_json

if TYPE_CHECKING:
    from lightning_accel.evidence.compare import RunComparison


def share(text: str) -> float:
    """Parses ``3%`` or ``0.03``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write one between 0% and 100%, as 3% or 0.03.")
    return value


def compare(
    run_a: Path,
    run_b: Path,
    *,
    gate: Annotated[float | None, {"type": share, "metavar": "3%"}] = None,
    json: bool = False,
) -> int:
    """Sets run B beside run A, by what they have left in the folders of their loggers.

    The status is 0; with --gate 1 where B is worse; 2 where they cannot be compared.

    Args:
        run_a: the folder of a run, or a record in it
        run_b: the same
        gate: status 1 where B is slower than A by more, with its whole 95% interval, or needs more memory by more; 2
            also where the machines differ, one did not finish, or memory is not known
        json: as JSON, and nothing else
    """
    from lightning_accel.evidence.compare import compare_runs  # late: --help answers without torch
    from lightning_accel.evidence.record_reader import read_record

    a, b = read_record(run_a), read_record(run_b)
    found = compare_runs(a, b)
    worse = judged(found, gate)
    if json:
        print_json({"a": str(a.path), "b": str(b.path), **found.to_dict(), "worse": worse})
    else:
        for letter, record in (("A", a), ("B", b)):
            started = record.header.started.replace("T", " ").removesuffix("+00:00")
            print(f"{letter}: {record.path}, {record.num_steps:,} steps, {started} UTC")
        show(rows_of(found))
        for remark in remarks_on(found, worse, gate):
            print(f"! {remark}")
    return 1 if worse else 0


def judged(found: RunComparison, gate: float | None) -> list[str]:
    """Returns in what B fails the gate; nothing without a gate.

    Raises:
        NotComparableError: The gate cannot decide.
    """
    from lightning_accel.evidence.compare import NotComparableError

    if gate is None:
        return []
    needs = ""
    if machines := found.differences.get("machine"):
        needs = f"one machine: A ran on {machines[0]}, B on {machines[1]}"
    elif found.unfinished:
        needs = f"runs that have finished: {'; '.join(found.unfinished)}"
    elif found.speed.low == 0:
        needs = f"more steps: {'; '.join(found.remarks)}"
    elif found.memory_mib is None or not found.is_alike:
        needs = f"runs that were measured alike: {'; '.join(found.remarks)}"
    if needs:
        raise NotComparableError(f"A gate needs {needs}.")
    return [what for what, is_so in (("speed", found.is_slower(gate)), ("memory", found.is_larger(gate))) if is_so]


def rows_of(found: RunComparison) -> list[tuple[str, str, str, str]]:
    """Returns rows of: what is compared, A's value, B's value, B relative to A."""
    from lightning_accel.evidence.amounts import rate

    first, second = found.per_second
    rows = [(f"{found.unit}/s", rate(first), rate(second), str(found.speed))]
    for part, (first, second) in found.parts_ms.items():
        rows.append((f"  {part}, ms a step", f"{first:,.4g}", f"{second:,.4g}", f"{second - first:+,.3g} ms"))
    if found.memory_mib is not None:
        first, second = found.memory_mib
        rows.append(("peak memory, MiB", f"{first:,.0f}", f"{second:,.0f}", found.memory_change))
    if found.losses is not None:
        first, second = found.losses
        rows.append((f"loss, to step {found.loss_step:,}", f"{first:.5g}", f"{second:.5g}", found.loss_change))
    return rows + [(name, *pair, "") for name, pair in found.differences.items()]


def show(rows: Iterable[tuple[str, str, str, str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "A", "B", "B by A", box=None)
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=max(100, Console().width)).print(table)


def remarks_on(found: RunComparison, worse: Iterable[str], gate: float | None) -> list[str]:
    """Returns remarks on the comparison, and what fails the gate."""
    return [*found.remarks, *(f"{what}: B is worse than A by more than {100 * (gate or 0):g}%" for what in worse)]
