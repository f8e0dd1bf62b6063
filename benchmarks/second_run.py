"""Does a second run of the same training start at the settled plan, compile included? Its first steps by settled ones.

    python benchmarks/second_run.py [--cases cnn:off,cnn:on,gpt:on,gpt:auto] [--json docs/results]

The demo's residual CNN and a GPT of its kind (4 x 256 bytes) under a Trainer: a first run, until its live trials have
settled, and a second one, each in a process of its own, with the same cache folders, which are empty before. A case is
a model and the plugin's ``compile``:

- ``off`` and ``on``: the defaults, without and with compiled blocks.
- ``auto``: compilation alone on trial, in a run that is told to be so long that it may try, and ended early.

A step runs from the batch's start to the next one's, so that trials and compilation are in it. The figure is the mean
of the first 50 steps of a run by the settled step of the *first* run, the median of its last 25: a second run that had
fallen back to plain would be slow by that, and is an error where its first run was compiled. Beside it the same by the
run's own last 25. Of each model a run without the plugin shows what first steps take to warm up anyway. What comes
before the first step, imports and setting up, is in none of these, and has its own columns.

Asked for: at most 1.1. Takes under 10 minutes on two slow cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from _measure import publish

EXAMPLES = Path(__file__).parent.parent / "examples"
CASES = "cnn:off,cnn:on,gpt:on,gpt:auto"
FIRST, LAST = 50, 25  # steps
PLAIN = "plain"  # a run without the plugin
LONG = 20_000  # that compile="auto" is told of
COLUMNS = (
    *("", "compile", "run", "first 50 by the first run's settled", "by its own", "compiled steps of the 50"),
    *("settled ms", "in the first 50 s", "imports s", "to the first step s", "steps", "settled"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="model:compile, of cnn, gpt, small and off, on, auto")
    parser.add_argument("--first", type=int, default=250, help="steps of the first run, at most")
    parser.add_argument("--seconds", type=float, default=120, help="of the first run's training, at most")
    parser.add_argument("--second", type=int, default=FIRST + LAST, help="steps of the second run")
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.first, args.second) < FIRST + LAST:
        parser.error(
            f"--first and --second: {FIRST + LAST} steps at least, of which {FIRST} begin a run, {LAST} end it"
        )
    if args.worker:
        print(json.dumps(trained(**json.load(sys.stdin))))
        return
    rows, details = [], {}
    cases = [case.split(":") for case in args.cases.split(",")]
    for model in dict.fromkeys(model for model, _ in cases):
        with tempfile.TemporaryDirectory() as folder:
            found = in_a_process(model, PLAIN, Path(folder), steps=args.second, seconds=None, until_settled=False)
        details[f"{model}, plain"] = found
        rows.append([model, "", PLAIN, *figures(found, statistics.median(found["step_ms"][-LAST:]))])
        print("  ".join(map(str, rows[-1])), flush=True)
    for model, compiles in cases:
        case = f"{model}:{compiles}"
        with tempfile.TemporaryDirectory() as folder:
            limits = {"steps": args.first, "seconds": args.seconds, "until_settled": True}
            first = in_a_process(model, compiles, Path(folder), **limits)
            second = in_a_process(model, compiles, Path(folder), steps=args.second, seconds=None, until_settled=False)
        settled_ms = statistics.median(first["step_ms"][-LAST:])
        for run, found in (("first", first), ("second", second)):
            details[f"{case}, {run}"] = found
            rows.append([model, compiles, run, *figures(found, settled_ms)])
            print("  ".join(map(str, rows[-1])), flush=True)
        complain(case, compiles, first, second)
    command = (
        f"python benchmarks/second_run.py --cases {args.cases} --first {args.first} --seconds {args.seconds:g}"
        f" --second {args.second}"
    )
    publish("second_run", command, COLUMNS, rows, details, by_machine=True)


def figures(found: dict[str, Any], settled_ms: float) -> list[str]:
    """Of a run, by the settled step of the first one."""
    step_ms = found["step_ms"]
    first, own_ms = statistics.fmean(step_ms[:FIRST]), statistics.median(step_ms[-LAST:])
    return [
        f"{first / settled_ms:.2f}",
        f"{first / own_ms:.2f}",
        str(sum(found["compiled"][:FIRST])),
        f"{own_ms:.1f}",
        f"{FIRST * (first - settled_ms) / 1e3:+.1f}",
        f"{found['imports_s']:.1f}",
        f"{found['to_first_s']:.1f}",
        str(len(step_ms)),
        found["settled"],
    ]


def complain(case: str, compiles: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    """A second run that was to be compiled and was not has measured something else.

    Raises:
        RuntimeError: It is so: with ``"on"``, or where the first run of ``"auto"`` has settled on compiled blocks.
    """
    asked = compiles == "on" or (compiles == "auto" and "compile" in first["choices"])
    for run, found in (("first", first), ("second", second)):
        if asked and not all(found["compiled"][-LAST:]):
            raise RuntimeError(
                f"{case}: compile was asked for and is not in force at the end of the {run} run.\n{found['report']}"
            )
    if asked and sum(second["compiled"][:FIRST]) < FIRST / 2:
        raise RuntimeError(f"{case}: most of the first {FIRST} steps were not compiled.\n{second['report']}")


def in_a_process(model: str, compiles: str, folder: Path, **limits: Any) -> dict[str, Any]:
    """A run in a fresh process, which finds what others with the same folder have left there."""
    variables = {
        **os.environ,
        "LIGHTNING_ACCEL_CACHE": str(folder / "remembered"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "kernels"),
    }
    asked = json.dumps({"model": model, "compiles": compiles, "started": time.time(), **limits})
    # Not on the command line: a run with another one is not taken for the same training.
    command = [sys.executable, __file__, "--worker"]
    done = subprocess.run(command, input=asked, env=variables, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"the run of {model} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def trained(
    model: str, compiles: str, started: float, steps: int, seconds: float | None, until_settled: bool
) -> dict[str, Any]:
    """The child's side: trains, and says what each step took.

    Args:
        model: ``"cnn"``, ``"gpt"``, or ``"small"``, a tiny GPT to try this with.
        compiles: As the case has it, or :data:`PLAIN`.
        started: When the process was, by the clock of the day.
        steps: To train for.
        seconds: After so many it ends, too.
        until_settled: Whether it also ends once live trials have settled, and some steps more were timed.
    """
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(EXAMPLES))
    from lightning.pytorch import Callback, Trainer, seed_everything

    import bytes_gpt
    import digits
    from lightning_accel import AccelPlugin
    from lightning_accel.core.compiled import is_compiled
    from lightning_accel.experiment.store import Entry
    from lightning_accel.settings import Plan
    from lightning_accel.techniques.registry import declarations
    from lightning_accel.tuning.verdict_cache import TUNINGS

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def settled() -> Entry | None:
        return next((entry for entry in TUNINGS.entries() if isinstance(entry, Entry)), None)

    class Watch(Callback):
        """When each step began, and whether blocks ran compiled in it; ends the run."""

        def __init__(self) -> None:
            self.at: list[float] = []
            self.compiled: list[bool] = []
            self.settled_at: int | None = None

        def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
            self.at.append(time.perf_counter())
            if self.settled_at is None and settled() is not None:
                self.settled_at = len(self.at)

        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            # What the trials have put in force for this step; the next one's is chosen when it begins.
            self.compiled.append(any(is_compiled(part) for part in module.modules()))
            taken = len(self.at)
            is_over = taken > steps or (seconds is not None and self.at[-1] - self.at[0] > seconds)
            is_timed = self.settled_at is not None and taken > self.settled_at + LAST
            trainer.should_stop = taken > FIRST + LAST and (is_over or (until_settled and is_timed))

    seed_everything(0, verbose=False)
    if model == "cnn":
        module, data = digits.DigitsNet(), digits.Digits(size=40)
    else:
        size = {"dim": 64, "depth": 2, "num_heads": 2, "seq_len": 64} if model == "small" else {"seq_len": 256}
        module, data = bytes_gpt.BytesGPT(**size), bytes_gpt.StdlibText(batch_size=4, seq_len=size["seq_len"])
    settings: dict[str, Any] = {"compile": compiles}
    if compiles == "auto":
        settings = {name: one.off for name, one in declarations().items()} | settings
    watch, plugin = (
        Watch(),
        None if compiles == PLAIN else AccelPlugin.from_plan(Plan().replace(**settings, report=False)),
    )
    trainer = Trainer(
        plugins=[plugin] if plugin else [],
        callbacks=[watch],
        max_steps=LONG if compiles == "auto" else steps + 1,
        max_epochs=-1,
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=1,
    )
    imports_s, begun = time.time() - started, time.perf_counter()
    trainer.fit(module, datamodule=data)
    entry, statuses = settled(), ""
    if plugin:
        statuses = f"{plugin.report.of('tuning').status}; compile: {plugin.report.of('compile').status}"
    step_ms = [1e3 * (after - before) for before, after in zip(watch.at, watch.at[1:], strict=False)]
    return {
        "step_ms": step_ms,
        "compiled": watch.compiled[: len(step_ms)],
        "imports_s": imports_s,
        "to_first_s": watch.at[0] - begun,
        "choices": {} if entry is None else entry.value.choices,
        "settled": statuses if entry is not None or not plugin else f"not settled; {statuses}",
        "report": str(plugin.report) if plugin else "",
    }


if __name__ == "__main__":
    main()
