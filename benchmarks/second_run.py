"""Does a second run of the same training start at the settled plan? Its first steps by its settled ones.

    python benchmarks/second_run.py [--models cnn,gpt] [--first 1000] [--second 250] [--json docs/results]

The demo's residual CNN and its GPT under a Trainer, without a compiler and with ``compile="auto"``: a first run, and
then a second, each in a process of its own, with the same cache folder, which is empty before. A step runs from the
batch's start to the next one's, so that trials, compilation and imports are in it. The figure is the mean of the first
50 steps by the median of the last 50, once nothing is tried any more.

Asked for: at most 1.1.
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
FIRST = 50
COLUMNS = (
    *("", "compile", "run", "first 50 by settled", "first step ms", "mean of 50 ms", "settled ms"),
    *("to the first step s", "settled"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="cnn,gpt")
    parser.add_argument("--compile", default="off,auto")
    parser.add_argument("--first", type=int, default=1000, help="steps of the first run")
    parser.add_argument("--second", type=int, default=250, help="steps of the second run")
    parser.add_argument("--json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        model, compiles = args.worker.split(",")
        print(json.dumps(trained(model, compiles, args.first)))
        return
    rows, details = [], {}
    for model in args.models.split(","):
        for compiles in args.compile.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for run, steps in (("first", args.first), ("second", args.second)):
                    found = in_a_process(model, compiles, steps, Path(folder))
                    details[f"{model}, compile={compiles}, {run}"] = found
                    rows.append([model, compiles, run, *figures(found["step_ms"]), *more(found)])
                    print("  ".join(map(str, rows[-1])), flush=True)
    command = f"python benchmarks/second_run.py --models {args.models} --first {args.first} --second {args.second}"
    publish("second_run", command, COLUMNS, rows, details)


def figures(step_ms: list[float]) -> list[str]:
    settled = statistics.median(step_ms[-FIRST:])
    first = statistics.fmean(step_ms[:FIRST])
    return [f"{first / settled:.2f}", f"{step_ms[0]:.0f}", f"{first:.1f}", f"{settled:.1f}"]


def more(found: dict[str, Any]) -> list[str]:
    return [f"{found['to_first_s']:.1f}", found["settled"]]


def in_a_process(model: str, compiles: str, steps: int, folder: Path) -> dict[str, Any]:
    """A run in a fresh process, which finds what others with the same folder have left there."""
    variables = {
        **os.environ,
        "LIGHTNING_ACCEL_CACHE": str(folder / "remembered"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "kernels"),
    }
    command = [sys.executable, __file__, "--worker", f"{model},{compiles}", "--first", str(steps)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"the run of {model} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def trained(model: str, compiles: str, steps: int) -> dict[str, Any]:
    """The child's side: trains, and says what each step took."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(EXAMPLES))
    from lightning.pytorch import Callback, Trainer, seed_everything

    import bytes_gpt
    import digits
    from lightning_accel import AccelPlugin

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Starts(Callback):
        def __init__(self) -> None:
            self.at: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.at.append(time.perf_counter())

    seed_everything(0, verbose=False)
    module, data = (
        (bytes_gpt.BytesGPT(), bytes_gpt.StdlibText(batch_size=4))
        if model == "gpt"
        else (digits.DigitsNet(), digits.Digits(size=40))
    )
    starts, plugin = Starts(), AccelPlugin(compile=compiles, log=False)  # type: ignore[arg-type]
    trainer = Trainer(
        plugins=[plugin],
        callbacks=[starts],
        max_steps=steps + 1,
        max_epochs=-1,
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=1,
    )
    begun = time.perf_counter()
    trainer.fit(module, datamodule=data)
    report = plugin.report
    return {
        "step_ms": [1e3 * (after - before) for before, after in zip(starts.at, starts.at[1:], strict=False)],
        "to_first_s": starts.at[0] - begun,
        "settled": f"{report.of('tuning').status}; compile: {report.of('compile').status}",
        "report": str(report),
    }


if __name__ == "__main__":
    main()
