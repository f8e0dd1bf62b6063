"""Runs what needs a GPU, with this interpreter as it is: no network, no environment, nothing installed.

    make gpu-smoke PYTHON=python3                     # the demo's models, each technique once: three minutes
    make gpu-tests PYTHON=python3 PART=memory         # tests marked gpu of a folder, or of all
    make gpu-bench PYTHON=python3 ONLY=gpu_ladder     # one benchmark, or all

The package is laid out as it would be installed, callbacks and benchmarks/claims inside it, in a temporary folder, and
everything runs from there. What each part leaves (a JUnit file, JSON, tables) is in the folder of ``--out``, and in one
archive there. A process that takes longer than ``LIMIT_S`` seconds (480) is ended.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
MARKED = re.compile(r"\bmark\.gpu\b")
CAPTURING = ("test_graphs.py", "test_cuda_capture.py", "test_compile_graphs.py")
"""Tests whose failure may leave a process unfit for others: they come last, in one of their own."""

BENCHMARKS = (
    *("gpu", "gpu_attention", "gpu_linear_cross_entropy", "gpu_memory", "gpu_offloading", "gpu_packing"),
    *("gpu_preprocessing", "gpu_pipeline", "gpu_strategies", "gpu_tuning", "gpu_ladder", "gpu_autotune"),
    *("gpu_deploying", "gpu_claims"),
)
"""In the order in which they are worth having; ``gpu_smoke`` is a part of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Run what needs a GPU.")
    parser.add_argument("what", choices=("smoke", "tests", "bench"))
    parser.add_argument("--part", default="", help="of the tests: a folder of tests/, or 'graphs'")
    parser.add_argument("--only", default="", help="benchmarks, with commas between them; rows of the smoke test")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "docs" / "results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    before = set(out.iterdir())
    with laid_out() as environment:
        if args.what == "tests":
            status = run_tests(args.part, out, environment)
        else:
            names, more = (["gpu_smoke"], ["--only", args.only]) if args.what == "smoke" else (wanted(args.only), [])
            scripts = [[str(ROOT / "benchmarks" / f"{name}.py"), "--out", str(out), *more] for name in names]
            status = max(run(script, environment) for script in scripts)
    name = "-".join(part for part in (args.what, args.part or args.only.replace(",", "-")) if part)
    with tarfile.open(out / f"gpu-{name}.tar.gz", "w:gz") as archive:
        for path in sorted(set(out.iterdir()) - before):
            if not path.name.endswith(".tar.gz"):
                archive.add(path, path.name)
    sys.exit(status)


def wanted(only: str) -> list[str]:
    """The benchmarks that were asked for: all without a name."""
    names = only.split(",") if only else list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        sys.exit(f"ONLY={','.join(unknown)}: there are {', '.join(BENCHMARKS)}")
    return names


def run_tests(part: str, out: Path, environment: dict[str, str]) -> int:
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
    workers = ["-n", os.environ.get("WORKERS", "4"), "--dist", "loadfile"] if has("xdist") else []
    status = 0
    for name, chosen, more in (("tests", others, workers), ("graphs", capturing, [])):
        if chosen:
            junit = out / f"gpu-{name}{f'-{part}' if name == 'tests' and part else ''}.xml"
            # One would leave files in the checkout; the other warns, which is an error, that it times nothing here.
            plugins = [part for name in ("cacheprovider", "benchmark") for part in ("-p", f"no:{name}")]
            arguments = ["-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *plugins, "-q", "--tb=short"]
            arguments += ["-m", "gpu", f"--junitxml={junit}", *more]
            arguments += ["--timeout=120"] if has("pytest_timeout") else []
            status = max(status, run([*arguments, *map(str, chosen)], environment))
    return status


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run(arguments: list[str], environment: dict[str, str]) -> int:
    """The status of a Python process; after eight minutes it is told to end, and to say what it has so far."""
    process = subprocess.Popen([sys.executable, *arguments], env=environment, cwd=environment["TREE"])
    try:
        return process.wait(float(environment.get("LIMIT_S", "480")))
    except subprocess.TimeoutExpired:
        print(f"on_gpu: {' '.join(arguments[:2])} is ended after {environment.get('LIMIT_S', '480')} s", flush=True)
        process.send_signal(signal.SIGINT)
        return max(1, process.wait())
    except KeyboardInterrupt:  # which it has been told, too
        process.wait()
        raise


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
