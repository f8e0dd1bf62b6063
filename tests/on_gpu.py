"""Runs what needs a GPU, with this interpreter as it is: no network, no environment, nothing installed.

    make gpu-smoke PYTHON=python3                     # the demo's models, each technique once: three minutes
    make gpu-tests PYTHON=python3 PART=memory         # tests marked gpu of a folder, or of all
    make gpu-bench PYTHON=python3 ONLY=gpu_ladder     # one benchmark, or all

The package is laid out as it would be installed, callbacks and benchmarks/claims inside it, in a temporary folder, and
everything runs from there. What each part leaves (a JUnit file, JSON, tables) is in the folder of ``--out``, and in one
archive there. A part takes ``LIMIT_S`` seconds (480): what has not ended by then is ended, what has not begun is not
begun, and the last line is the command for both.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
MARKED = re.compile(r"\bmark\.gpu\b")
CAPTURING = ("test_graphs.py", "test_cuda_capture.py", "test_compile_graphs.py")
"""Tests whose failure may leave a process unfit for others: they come last, in one of their own."""

GRACE_S = 15
"""For a process that was told to end."""

BENCHMARKS = (
    *("gpu", "gpu_attention", "gpu_linear_cross_entropy", "gpu_memory", "gpu_offloading", "gpu_packing"),
    *("gpu_preprocessing", "gpu_pipeline", "gpu_strategies", "gpu_tuning", "gpu_ladder", "gpu_autotune"),
    *("gpu_deploying", "gpu_claims", "gpu_rivals"),
)
"""In the order in which they are worth having; ``gpu_smoke`` is a part of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Run what needs a GPU.")
    parser.add_argument("what", choices=("smoke", "tests", "bench"))
    parser.add_argument("--part", default="", help="of the tests: a folder of tests/, or 'graphs'")
    parser.add_argument("--only", default="", help="benchmarks, with commas between them; rows of the smoke test")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "docs" / "results"))
    args = parser.parse_args()
    # A shell has what it starts in the background ignore this. Scripts would do so, too, when they are told to end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    before = set(out.iterdir())
    with laid_out() as environment:
        part = Part(environment)
        if args.what == "tests":
            run_tests(args.part, out, part)
        else:
            names, more = (["gpu_smoke"], ["--only", args.only]) if args.what == "smoke" else (wanted(args.only), [])
            for name in names:
                part.run(name, [str(ROOT / "benchmarks" / f"{name}.py"), "--out", str(out), *more])
    name = "-".join(word for word in (args.what, args.part or args.only.replace(",", "-")) if word)
    with tarfile.open(out / f"gpu-{name}.tar.gz", "w:gz") as archive:
        for path in sorted(set(out.iterdir()) - before):
            if not path.name.endswith(".tar.gz"):
                archive.add(path, path.name)
    if left := part.unfinished:
        again = {"smoke": "", "bench": f" ONLY={','.join(left)}", "tests": " PART=<a folder of tests/>"}[args.what]
        if args.what == "tests" and "graphs" in left:
            again = " PART=graphs" if left == ["graphs"] else f"{again}, the last with PART=graphs"
        print(f"on_gpu: {part.limit_s:g} s were too few for {', '.join(left)}. Run: make gpu-{args.what}{again}")
    sys.exit(part.status)


def wanted(only: str) -> list[str]:
    """The benchmarks that were asked for: all without a name."""
    names = only.split(",") if only else list(BENCHMARKS)
    names = [full if (full := f"gpu_{name}") in BENCHMARKS else name for name in names]
    if unknown := [name for name in names if name not in BENCHMARKS]:
        sys.exit(f"ONLY={','.join(unknown)}: there are {', '.join(BENCHMARKS)}")
    return names


def run_tests(part: str, out: Path, processes: Part) -> None:
    """Those of a part, several at a time where pytest-xdist is there; what captures graphs by itself, at the end."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if MARKED.search(path.read_text(encoding="utf-8"))]
    capturing = [path for path in files if path.name in CAPTURING]
    others = [path for path in files if path not in capturing]
    if part == "graphs":
        others = []
    elif part:
        folder = TESTS / part
        others, capturing = [path for path in others if folder in path.parents], []
        if not others:
            sys.exit(f"PART={part}: no test marked gpu is in {folder}. Give a folder of tests/, 'graphs', or nothing")
    count = os.environ.get("WORKERS") or str(min(12, os.cpu_count() or 1))
    workers = ["-n", count, "--dist", "worksteal"] if has("xdist") else []
    for name, chosen, more in (("tests", others, workers), ("graphs", capturing, [])):
        if chosen:
            junit = out / f"gpu-{name}{f'-{part}' if name == 'tests' and part else ''}.xml"
            # One would leave files in the checkout; the other warns, which is an error, that it times nothing here.
            plugins = [part for name in ("cacheprovider", "benchmark") for part in ("-p", f"no:{name}")]
            arguments = ["-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *plugins, "-q", "--tb=short"]
            arguments += ["-m", "gpu", f"--junitxml={junit}", *more]
            arguments += ["--timeout=120"] if has("pytest_timeout") else []
            processes.run(name, [*arguments, *map(str, chosen)])


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class Part:
    """Python processes, one after the other, in the time that they have together.

    Args:
        environment: Of each of them.

    Attributes:
        limit_s: That time.
        status: The highest of theirs; 1 at the least where one was not run to its end.
        unfinished: Which these are.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.limit_s = float(environment.get("LIMIT_S", "480"))
        self.status = 0
        self.unfinished: list[str] = []
        self._environment = environment
        self._ends = time.monotonic() + self.limit_s

    def run(self, name: str, arguments: list[str]) -> None:
        """One process; when the time is over it is told to end, and to say what it has so far."""
        if (left_s := self._ends - time.monotonic()) <= 0:
            self._leave(name)
            return
        process = subprocess.Popen([sys.executable, *arguments], env=self._environment, cwd=self._environment["TREE"])
        try:
            self.status = max(self.status, process.wait(left_s))
        except subprocess.TimeoutExpired:
            self._leave(name)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        except KeyboardInterrupt:  # which it has been told, too
            process.wait()
            raise

    def _leave(self, name: str) -> None:
        self.unfinished.append(name)
        self.status = max(self.status, 1)


@contextmanager
def laid_out() -> Iterator[dict[str, str]]:
    """The environment of a process that finds the package in a temporary folder, which is its current one, too.

    ``python -m`` puts the current folder first on the path, where the checkout's lightning_accel/ has no callbacks.
    """
    with tempfile.TemporaryDirectory() as tree:
        package = Path(tree) / "lightning_accel"
        for source, target in (("lightning_accel", ""), ("callbacks", "callbacks"), ("benchmarks/claims", "claims")):
            shutil.copytree(ROOT / source, package / target, dirs_exist_ok=True)
        path = os.pathsep.join(filter(None, (tree, os.environ.get("PYTHONPATH"))))
        yield {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "TREE": tree}


if __name__ == "__main__":
    main()
