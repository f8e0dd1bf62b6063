"""Runs Lightning's own tests with AccelPlugin in every Trainer, in three ways: ``make test-lightning``.

Without logging, with all that is edited in force from the first step on (else runs this short begin and end plain), and
with logging.

python run.py CHECKOUT [PYTEST ARGUMENTS], of a clone of Lightning's repository that has the tag; nothing is written
there. With PACKAGE=pytorch_lightning in the environment they are tests of that package. With logging, the tests that
docs/lightning_tests.md names are to fail, for the reason that it gives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TAG = "2.6.5"
PASS_PLAIN = 2607
PACKAGE = os.environ.get("PACKAGE", "lightning.pytorch")
HERE = Path(__file__).parent
NAMED = HERE.parents[1] / "docs" / "lightning_tests.md"
PLUGIN = {"precision": "32-true"}  # with another one they would have other numbers than they ask for
CLONE = f"git clone --branch {TAG} --depth 1 https://github.com/Lightning-AI/pytorch-lightning"


def main(checkout: str, *arguments: str) -> int:
    has_failed = False
    with tempfile.TemporaryDirectory() as folder:
        unpack(checkout, Path(folder))
        named = {line.strip() for line in NAMED.read_text().splitlines() if "::" in line}
        for title, settings, expected in [
            ("without logging", {**PLUGIN, "report": False}, set()),
            ("with every edit from the first step on", {**PLUGIN, "report": False, "trust": "checked"}, set()),
            ("with logging", PLUGIN, named),
        ]:
            print(f"== {title}", flush=True)
            outcomes = outcomes_of(Path(folder), settings, arguments)
            wrong = complaints(outcomes, expected, is_whole=not arguments)
            passed = list(outcomes.values()).count("passed")
            print("\n".join([f"{title}: {passed:,} passed, {'FAILED' if wrong else 'as they should'}", *wrong]))
            has_failed |= bool(wrong)
    return int(has_failed)


def unpack(checkout: str, folder: Path) -> None:
    """Takes the tests out of a clone."""
    wanted = ["tests/tests_pytorch", "pyproject.toml"]
    packed = subprocess.run(["git", "-C", checkout, "archive", TAG, *wanted], capture_output=True)
    if packed.returncode:
        sys.exit(f"no tests of Lightning {TAG} in {checkout!r} ({packed.stderr.decode().strip()}): {CLONE}")
    subprocess.run(["tar", "x", "-C", folder], input=packed.stdout, check=True)
    if PACKAGE != "lightning.pytorch":
        for file in folder.rglob("*.py"):
            if file.name == "test_model_helpers.py":  # which is about both
                continue
            text = file.read_text()
            for name, other in {"lightning.pytorch": PACKAGE, "lightning.fabric": "lightning_fabric"}.items():
                text = text.replace(name, other)
            file.write_text(text)


def outcomes_of(folder: Path, settings: dict[str, object], arguments: tuple[str, ...]) -> dict[str, str]:
    """Test → what became of it."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "outcomes.json"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            **{
                "SUITE_PACKAGE": PACKAGE,
                "SUITE_OUT": str(out),
                "SUITE_SETTINGS": json.dumps(settings),
                "PYTHONPATH": str(HERE),
            },
            **{"HOME": home, "TMPDIR": home, "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"},
            **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        }
        options = "-p injected -p no:cacheprovider -o addopts= --strict-markers --disable-pytest-warnings --color=no -q"
        limits = [
            "--tb=line",
            "--show-capture=no",
            "--timeout=60",
            "--timeout-method=signal",
            f"--basetemp={home}/pytest",
        ]
        command = [sys.executable, "-m", "pytest", *options.split(), *limits, *(arguments or ["tests_pytorch"])]
        subprocess.run(command, cwd=folder / "tests", env=environment)
        return json.loads(out.read_text()) if out.exists() else {}


def complaints(outcomes: dict[str, str], expected: set[str], *, is_whole: bool) -> list[str]:
    """What is otherwise than it should be, a line each.

    Args:
        outcomes: Test → what became of it.
        expected: The tests that are to fail.
        is_whole: Whether all tests were run.
    """
    failed = {name for name, outcome in outcomes.items() if outcome == "failed"}
    passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
    wrong = [] if outcomes else ["  no test was run"]
    wrong += [f"  fails: {name}" for name in sorted(failed - expected)]
    wrong += [f"  passes, and is named in {NAMED.name}: {name}" for name in sorted(passed & expected)]
    if is_whole and len(passed | failed) != PASS_PLAIN:
        wrong.append(f"  {len(passed | failed):,} tests were run, not the {PASS_PLAIN:,} that pass plain")
    return wrong


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1]:
        sys.exit(f"make test-lightning LIGHTNING=pytorch-lightning, a clone of it: {CLONE}")
    sys.exit(main(*sys.argv[1:]))
