"""``lightning-accel bench train.py --against main``: compares trainings of the working tree and another revision."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_accel.cli.bench_runs import RevisionSide, RunError, take_turns
from lightning_accel.cli.compare_command import (
    COMPARED,
    NOT_COMPARABLE,
    WORSE,
    judged,
    remarks_on,
    rows_of,
    share,
    show,
)
from lightning_accel.cli.exit_codes import INTERRUPTED, TERMINATED, Terminated, sigterm_raises
from lightning_accel.cli.revisions import Repository, RevisionError
from lightning_accel.cli.run_command import complaint_about

if TYPE_CHECKING:
    from lightning_accel.evidence.run_groups import RunGroups

_LIMITS = (("slowest", min), ("fastest", max))


def run(given: Sequence[str]) -> int:
    """Runs both revisions and prints the comparison. Returns the exit status."""
    parser = _parser()
    arguments, program = _parsed(parser, given)
    if complaint := complaint_about(program):
        parser.error(complaint)
    from lightning_accel.evidence.compare import NotComparableError
    from lightning_accel.evidence.record_reader import RecordError
    from lightning_accel.evidence.run_groups import FEWEST_RUNS, bench  # late: --help answers without NumPy

    if arguments.gate is not None and arguments.runs < FEWEST_RUNS:
        parser.error(f"--gate needs an interval, which takes --runs {FEWEST_RUNS} or more; given: {arguments.runs}.")
    try:
        with sigterm_raises(), tempfile.TemporaryDirectory(prefix="lightning-accel-bench-") as temporary:
            a, b = _both(arguments, program, Path(temporary))
            found = bench(a.records, b.records)
            worse = judged(found, arguments.gate)
    except (KeyboardInterrupt, Terminated) as stopped:
        return TERMINATED if isinstance(stopped, Terminated) else INTERRUPTED
    except (RevisionError, RunError, RecordError, NotComparableError, OSError) as error:
        print(f"lightning-accel bench: {error}", file=sys.stderr)
        return NOT_COMPARABLE
    remarks = remarks_on(found, worse, arguments.gate)
    if arguments.json:
        print(json.dumps({"a": a.name, "b": b.name, **found.to_dict(), "worse": worse}, indent=2))
    elif arguments.markdown:
        print(_markdown(a, b, found, remarks))
    else:
        for side in (a, b):
            print(f"{side.letter}: {side.name}")
        print(_about(found))
        show(_rows(found))
        for remark in remarks:
            print(f"! {remark}")
    return WORSE if worse else COMPARED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-accel bench",
        usage="%(prog)s [options] (train.py | -m package.module) [argument ...] [-- argument ...]",
        description="Runs a training of this working tree (B) and of another revision (A) several times in turns, and"
        " sets them beside each other: speed, memory, loss at equal steps. Its Trainer needs AccelPlugin() or"
        " SpeedMemoryLogger(). The options stand anywhere; all else is the program's, and all that stands behind --.",
        epilog="The status is 0; with --gate 1 where B is worse; 2 where they cannot be compared.",
        allow_abbrev=False,
    )
    parser.add_argument("--against", required=True, metavar="REVISION", help="what is A: a branch, a tag, a commit")
    parser.add_argument("--runs", type=_count, default=5, metavar="N", help="of each that count; by default 5")
    parser.add_argument(
        "--gate",
        type=share,
        metavar="3%",
        help="status 1 where B is slower than A by more, or needs more memory by more, with the whole interval",
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="of the working tree, which git does not know and A needs, too: data, say; may stand several times",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="as JSON, and nothing else")
    output.add_argument("--markdown", action="store_true", help="as Markdown, for a pull request")
    return parser


def _parsed(parser: argparse.ArgumentParser, given: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the program with its arguments."""
    divider = given.index("--") if "--" in given else len(given)
    arguments, program = parser.parse_known_args(given[:divider])
    return arguments, [*program, *given[divider + 1 :]]


def _both(arguments: argparse.Namespace, program: Sequence[str], temporary: Path) -> tuple[RevisionSide, RevisionSide]:
    """Runs both revisions. The checkout of the other revision is removed before this returns.

    Raises:
        RevisionError: The revision does not exist, or does not have the program.
        RunError: A run failed.
        RecordError: The record of a run cannot be read.
    """
    here = Path.cwd().resolve()
    repository = Repository.around(here)
    commit, head = repository.commit(arguments.against), repository.commit("HEAD")
    changes = ", the same code" if commit == head else ""
    if repository.has_changes():
        changes = ", with changes that are not committed"
    checkout = temporary.resolve() / "checkout"
    there = checkout / here.relative_to(repository.root)
    if checkout.is_relative_to(repository.root):
        raise RevisionError(f"{temporary} is within the repository: have TMPDIR name a folder elsewhere.")
    command = [*program]
    if command[0] != "-m":
        # A relative path inside the repository exists in both checkouts. A path outside is the same for both.
        path = Path(command[0]).resolve()
        command[0] = os.path.relpath(path, here) if path.is_relative_to(repository.root) else str(path)
    with repository.checked_out(commit, checkout, arguments.link):
        if not there.is_dir() or (command[0] != "-m" and not (there / command[0]).exists()):
            raise RevisionError(f"{arguments.against} ({commit[:9]}) has no {command[0]!r} in this folder.")
        a = RevisionSide(
            letter="A",
            name=f"{arguments.against} ({commit[:9]})",
            command=[sys.executable, *command],
            folder=there,
            environment={**os.environ, "PYTHONPATH": repository.python_path(checkout)},
            elsewhere=repository.root,
        )
        b = RevisionSide(
            letter="B",
            name=f"working tree ({head[:9]}{changes})",
            command=a.command,
            folder=here,
            environment=os.environ,
        )
        take_turns(a, b, arguments.runs, temporary / "runs")
    return a, b


def _about(found: RunGroups) -> str:
    count = f"{found.runs} {'run' if found.runs == 1 else 'runs'} of each"
    return f"{count}, intervals of {found.confidence:.1%}" if found.confidence else count


def _rows(found: RunGroups) -> list[tuple[str, str, str, str]]:
    first, *others = rows_of(found)
    a, b = found.each_per_second
    limits = [(f"  {name} run", f"{limit(a):,.4g}", f"{limit(b):,.4g}", "") for name, limit in _LIMITS]
    return [first, *limits, *others]


def _markdown(a: RevisionSide, b: RevisionSide, found: RunGroups, remarks: Sequence[str]) -> str:
    rows = [("", f"A: {a.name}", f"B: {b.name}", "B by A"), ("---", "---", "---", "---"), *_rows(found)]
    table = ["| " + " | ".join(cell.strip().replace("|", "\\|") for cell in row) + " |" for row in rows]
    summary = f"**B trains at {found.speed} the speed of A** ({_about(found)})"
    return "\n".join([summary, "", *table, "", *(f"- {remark}" for remark in remarks)])


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs: write one from 1 to 100.")
    return int(text)
