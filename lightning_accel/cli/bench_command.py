"""``lightning-accel bench train.py --against main``: compares trainings of the working tree and another revision."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lightning_accel.cli.bench_runs import RevisionSide, take_turns
from lightning_accel.cli.command import add_options, ended, print_json
from lightning_accel.cli.compare_command import judged, remarks_on, rows_of, share, show
from lightning_accel.cli.revisions import Repository, RevisionError
from lightning_accel.cli.run_command import complaint_about

if TYPE_CHECKING:
    from lightning_accel.evidence.run_groups import RunGroups

_LIMITS = (("slowest", min), ("fastest", max))


def run(given: Sequence[str]) -> int:
    """Reads the options of :func:`bench`, which stand among those of the program, and runs it."""
    parser = argparse.ArgumentParser(
        prog="lightning-accel bench",
        usage="%(prog)s [options] (train.py | -m package.module) [argument ...] [-- argument ...]",
        epilog="The status is 0; with --gate 1 where B is worse; 2 where they cannot be compared.",
        allow_abbrev=False,
    )
    add_options(parser, bench)
    divider = given.index("--") if "--" in given else len(given)
    options, program = parser.parse_known_args(given[:divider])
    program += given[divider + 1 :]
    if options.json and options.markdown:
        parser.error("argument --markdown: not allowed with argument --json")
    if complaint := complaint_about(program):
        parser.error(complaint)
    from lightning_accel.evidence.run_groups import FEWEST_RUNS  # late: --help answers without NumPy

    if options.gate is not None and options.runs < FEWEST_RUNS:
        parser.error(f"--gate needs an interval, which takes --runs {FEWEST_RUNS} or more; given: {options.runs}.")
    return ended("bench", lambda: bench(*program, **vars(options)), says_stopped=False)


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs: write one from 1 to 100.")
    return int(text)


def bench(
    *program: str,
    against: Annotated[str, {"metavar": "REVISION"}],
    runs: Annotated[int, {"type": _count, "metavar": "N"}] = 5,
    gate: Annotated[float | None, {"type": share, "metavar": "3%"}] = None,
    link: Annotated[list[Path], {"metavar": "PATH"}] = [],  # noqa: B006
    json: bool = False,
    markdown: bool = False,
) -> int:
    """Runs a training of this working tree (B) and of another revision (A) several times in turns, and sets them beside
    each other: speed, memory, loss at equal steps. Its Trainer needs AccelPlugin() or SpeedMemoryLogger(). The options
    stand anywhere; all else is the program's, and all that stands behind --.

    Args:
        program: a file, or -m and a module, and its arguments
        against: what is A: a branch, a tag, a commit
        runs: of each that count; by default 5
        gate: status 1 where B is slower than A by more, or needs more memory by more, with the whole interval
        link: of the working tree, which git does not know and A needs, too: data, say; may stand several times
        json: as JSON, and nothing else
        markdown: as Markdown, for a pull request
    """
    from lightning_accel.evidence.run_groups import bench as compared

    with tempfile.TemporaryDirectory(prefix="lightning-accel-bench-") as temporary:
        a, b = _both(against, link, runs, program, Path(temporary))
        found = compared(a.records, b.records)
        worse = judged(found, gate)
    remarks = remarks_on(found, worse, gate)
    if json:
        print_json({"a": a.name, "b": b.name, **found.to_dict(), "worse": worse})
    elif markdown:
        print(_markdown(a, b, found, remarks))
    else:
        for side in (a, b):
            print(f"{side.letter}: {side.name}")
        print(_about(found))
        show(_rows(found))
        for remark in remarks:
            print(f"! {remark}")
    return 1 if worse else 0


def _both(
    against: str, links: Sequence[Path], runs: int, program: Sequence[str], temporary: Path
) -> tuple[RevisionSide, RevisionSide]:
    """Runs both revisions. The checkout of the other revision is removed before this returns.

    Raises:
        RevisionError: The revision does not exist, or does not have the program.
        RunError: A run failed.
        RecordError: The record of a run cannot be read.
    """
    here = Path.cwd().resolve()
    repository = Repository.around(here)
    commit, head = repository.commit(against), repository.commit("HEAD")
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
    with repository.checked_out(commit, checkout, links):
        if not there.is_dir() or (command[0] != "-m" and not (there / command[0]).exists()):
            raise RevisionError(f"{against} ({commit[:9]}) has no {command[0]!r} in this folder.")
        a = RevisionSide(
            letter="A",
            name=f"{against} ({commit[:9]})",
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
        take_turns(a, b, runs, temporary / "runs")
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
