"""What the plugin does to fits of libraries that are built on Lightning: 30 models of six of them, plain and with it.

    python benchmarks/downstream.py [--rounds 3] [--models nhits,scvi] [--settings 32-true] [--package PATH]
        [--json docs/results]

Their fits are short: 5 to 400 steps of 1 to 50 ms. neuralforecast, darts, pytorch-forecasting, chemprop, scvi-tools and
torch_geometric are installed from PyPI into an environment of their own, ``.venv-downstream`` (3 GB), beside the
checkout that is measured; data are drawn, and nothing else is downloaded.

A round of a model has three fits of each side, plain and each setting of the plugin, each of a new model: a *fresh* one
in a process of its own with an empty cache folder, a *second* one of the same program there, and one in a *new
process*, which finds what the first one's has left in the cache. The sides' processes take turns of 50 ms, in an order
that chance decides: machines are slow for seconds, and two processes are seldom equally fast for as long as a fit
takes. Each figure is the median over the rounds of plain's by the other's, in seconds of the clock while it has the
turn, and in processor seconds of all threads. A fit is the library's own call, with its Trainer and its data's
preparation, on one thread: threads that wait for each other would be awake in another's turn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from _downstream_models import FITS, MODELS, OWN_PRECISION, PLAIN, SETTINGS
from _measure import publish

ROOT = Path(__file__).parent.parent
ENVIRONMENT = ROOT / ".venv-downstream"
PYTHON = ENVIRONMENT / "bin" / "python"
LIBRARIES = (
    *("neuralforecast==3.3.0", "darts==0.48.1", "pytorch-forecasting==1.8.0", "chemprop==2.3.1", "scvi-tools==1.4.2"),
    *("torch-geometric==2.8.1", "setuptools"),  # the last to build the package with
)
CLOCKS = {"speed": "wall_s", "CPU": "cpu_s"}
COLUMNS = ("", "plugin", "steps", "plain step, ms", *(f"{clock}, {fit}" for clock in CLOCKS for fit in FITS))

Round = dict[str, dict[str, dict[str, float]]]  # side, fit, what was measured


def installed(package: Path) -> None:
    """Makes the environment, if there is none, and has ``package`` measured by it."""
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["--constraint", ROOT / "constraints.txt"]
    stamp = ENVIRONMENT / ".installed"
    if not stamp.exists():
        print(f"installing {', '.join(LIBRARIES)} into {ENVIRONMENT.name}, which takes minutes", flush=True)
        venv.create(ENVIRONMENT, clear=True, symlinks=True, with_pip=True)
        subprocess.run([*install, *LIBRARIES], check=True)
        stamp.touch()
    subprocess.run([*install, "--no-build-isolation", "--editable", package], check=True)


def rounds_of(title: str, rounds: int, settings: Sequence[str], limit_s: float) -> list[Round]:
    """What a model's rounds have measured, in a process of its own.

    Raises:
        RuntimeError: It failed, with the last line that it printed, or was not done by the limit.
    """
    command = [PYTHON, Path(__file__).with_name("_downstream_side.py"), title, str(rounds), ",".join(settings)]
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8") as printed,
        # A session of its own, so that its forks end with it.
        subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            answer, _ = process.communicate(timeout=limit_s)
        except BaseException as stopped:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(stopped, subprocess.TimeoutExpired):
                raise RuntimeError(f"not done after {limit_s:g} s") from stopped
            raise
        if process.returncode:
            printed.seek(0)
            raise RuntimeError(reason(printed.read()))
    measured: list[Round] = json.loads(answer.splitlines()[-1])
    return measured


def reason(printed: str) -> str:
    """The error of the fork's that came first: the worker's own is only that there was no answer."""
    lines = [line for line in printed.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return lines[0] if lines else "it died"


def row(title: str, side: str, rounds: Sequence[Round]) -> list[str]:
    """Of one model with one of the plugin's settings."""

    def ratio(fit: str, clock: str) -> str:
        of_rounds = [found[PLAIN][fit][clock] / found[side][fit][clock] for found in rounds]
        return f"{statistics.median(of_rounds):.2f}x"

    plain = [found[PLAIN]["second"] for found in rounds]
    steps = plain[0]["steps"]
    step_ms = 1e3 * statistics.median(fit["wall_s"] for fit in plain) / steps
    ratios = [ratio(fit, clock) for clock in CLOCKS.values() for fit in FITS]
    return [title, side, f"{steps:.0f}", f"{step_ms:.1f}", *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--models", type=lambda text: text.lower().split(","), default=[""], help="parts of their titles"
    )
    parser.add_argument("--settings", type=lambda text: text.split(","), default=SETTINGS, help=", ".join(SETTINGS))
    parser.add_argument(
        "--package", type=Path, default=ROOT, help="the checkout to measure; by default the script's own"
    )
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="of a model with all its rounds")
    parser.add_argument("--dry-run", action="store_true", help="list the models, and do nothing")
    options, _ = parser.parse_known_args()
    titles = [title for title in MODELS if any(part in title.lower() for part in options.models)]
    if options.dry_run:
        print("\n".join(titles))
        return
    installed(options.package)
    rows, details = [], {}
    for title in titles:
        own_precision = title.split()[0] in OWN_PRECISION
        settings = ["32-true"] if own_precision else options.settings
        try:
            details[title] = rounds_of(title, options.rounds, settings, options.limit)
            found = [row(title, side, details[title]) for side in settings]
        except RuntimeError as error:
            found = [[title, f"failed: {error}", *[""] * (len(COLUMNS) - 2)]]
        for cells in found:
            print("  ".join(cells), flush=True)
        rows += found
    command = f"python benchmarks/downstream.py --rounds {options.rounds}"
    publish("downstream", command, COLUMNS, rows, details, by_machine=True)


if __name__ == "__main__":
    main()
