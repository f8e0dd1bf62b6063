"""Runs the suite on other releases of Python, torch, Lightning and transformers: ``make test-versions``.

    python versions.py WORKERS [--only newest,torch-2.12] [--keep] [--write] [PYTEST ARGUMENTS]

Each of ``RELEASES`` is an environment of its own, in ``.venv-versions``: the package with its ``dev`` extra as pip
resolves it today, without ``constraints.txt``, and beside it what the row asks for. An interpreter is looked for as
``python3.12`` on the path and under pyenv; a row without one is left out, with a word. An environment is removed when
its tests have ended (one is 2 to 7 GB), unless it is to be kept. What was found is a table; --write puts it into
docs/versions.md, where rows that were not run keep what they had.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
FOLDER = ROOT / ".venv-versions"
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
SHOWN = ("torch", "lightning", "transformers")
HEADINGS = ("row", "Python", *SHOWN, "passed", "failed", "skipped", "on")
LOWEST = ("cli", "tensorboard", "transformers")  # extras whose lower bounds are tested with those of the package itself


@dataclass(frozen=True)
class Release:
    """One row: an interpreter, and what its environment has beside what pip chooses."""

    name: str
    python: str
    wanted: tuple[str, ...] = ()


def lower_bounds() -> tuple[str, ...]:
    """The oldest release of everything that the package asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"]]
    for extra in LOWEST:
        listed += project["optional-dependencies"][extra]
    requirements = map(Requirement, listed)
    return tuple(
        f"{each.name}=={bound.version}" for each in requirements for bound in each.specifier if bound.operator == ">="
    )


RELEASES = (
    Release("newest", RUNNING),
    Release("newest-3.14", "3.14"),
    Release("torch-2.14", "3.12", ("torch==2.14.*", "lightning==2.6.0")),
    Release("torch-2.13", "3.13", ("torch==2.13.*",)),
    Release("torch-2.12", "3.12", ("torch==2.12.*",)),
    Release("transformers-4.57", RUNNING, ("torch==2.13.*", "transformers==4.57.*")),
    Release("oldest", "3.10", lower_bounds()),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the suite on other releases of what it is built on.")
    parser.add_argument("workers", help="of pytest-xdist")
    parser.add_argument("--only", default="", help=f"of {', '.join(release.name for release in RELEASES)}")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    parser.add_argument("--write", action="store_true", help=f"the table into {PAGE.relative_to(ROOT)}, too")
    args, of_pytest = parser.parse_known_args()
    names = args.only.split(",") if args.only else [release.name for release in RELEASES]
    if unknown := set(names) - {release.name for release in RELEASES}:
        parser.error(f"--only: no row {', '.join(sorted(unknown))}: they are {', '.join(r.name for r in RELEASES)}")
    rows, has_failed = [], False
    for release in RELEASES:
        if release.name not in names:
            continue
        interpreter = found(release.python)
        if interpreter is None:
            print(f"== {release.name}: left out, as there is no python{release.python} on the path or under pyenv")
            continue
        try:
            row, passes = outcome(release, interpreter, args.workers, of_pytest, args.keep)
        except subprocess.CalledProcessError as error:
            print(f"== {release.name}: no environment could be made: {error}")
            has_failed = True
            continue
        rows.append(row)
        has_failed |= not passes
    print("\n" + "\n".join(map(line, [HEADINGS, *rows])))
    if args.write:
        write(rows)
    return int(has_failed)


def found(version: str) -> str | None:
    """The path of an interpreter."""
    if version == RUNNING:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    kept = sorted(str(path) for path in pyenv.glob(f"{version}.*/bin/python"))
    return kept[-1] if kept else shutil.which(f"python{version}")  # pyenv has a shim of it on the path, too


def outcome(
    release: Release, interpreter: str, workers: str, of_pytest: Sequence[str], keeps: bool
) -> tuple[Sequence[str], bool]:
    """A row of the table, and whether all its tests passed."""
    print(f"== {release.name}: Python {release.python}, {', '.join(release.wanted) or 'what pip chooses'}", flush=True)
    folder = FOLDER / release.name
    python = folder / "bin" / "python"
    subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *release.wanted, "--editable", f"{ROOT}[dev]"], check=True)
    ask = f"import json, importlib.metadata as m; print(json.dumps([m.version(name) for name in {SHOWN!r}]))"
    has = json.loads(subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout)
    with tempfile.TemporaryDirectory() as results:
        counts = Path(results) / "counts.xml"
        tests = [python, "-m", "pytest", "-q", "-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]
        tests += ["-m", "not gpu and not slow and not browser"]
        passes = subprocess.run([*tests, f"--junitxml={counts}", *of_pytest], cwd=ROOT).returncode == 0
        suite = ElementTree.parse(counts).getroot()[0].attrib
    failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
    if not keeps:
        shutil.rmtree(folder)
    passed = int(suite["tests"]) - failed - skipped
    return (release.name, release.python, *has, f"{passed:,}", f"{failed:,}", f"{skipped:,}", str(date.today())), passes


def line(cells: Sequence[str]) -> str:
    """One of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def write(rows: Sequence[Sequence[str]]) -> None:
    """Puts rows into the page's table, in the place of those of the same name."""

    def table(match: re.Match[str]) -> str:
        written = {row.split()[1]: row for row in match[2].splitlines() if row.startswith("| ")}
        written |= {row[0]: line(row) for row in rows}
        ordered = [written[release.name] for release in RELEASES if release.name in written]
        return "\n".join([match[1], line(HEADINGS), line(["---"] * len(HEADINGS)), *ordered, match[3]])

    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(r"(<!-- versions:begin[^\n]*-->)(.*?)(<!-- versions:end -->)", table, text, flags=re.DOTALL),
        encoding="utf-8",
    )


if __name__ == "__main__":
    raise SystemExit(main())
