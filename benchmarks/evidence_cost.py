"""What measuring a run costs it, and whether what was measured adds up.

    python benchmarks/evidence_cost.py [--rounds 24] [--models mlp,lstm] [--json docs/results]

Cost: the same training of small steps plain, plain once more, with the record, the parts of its steps, two steps taken
apart and loggers told, and, where it is installed, under TraceML. Each is a process of its own and trains an epoch of
some steps when it is its turn; in each round all have one. What is told is by how much the mean step of a turn is
longer than that of plain's turn of the same round. What measuring adds does not hang on how long a step is, and two
processes of one program differ by some percent: of small steps that is least.

Sums, on the models of :mod:`tuning`: the parts of every step by the time from end to end of the same steps, which
another clock takes; and the memory of the step that was taken apart by what the allocator says of the same step of a
second run.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import _traceml
import torch
from _evidence_side import EVERYTHING
from _measure import publish
from _small_models import MODELS
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_accel.callbacks import SpeedMemoryLogger, _phase_sampler, _step_watch
from lightning_accel.claims.measure import median_interval
from lightning_accel.core.tree import tensors_in
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.memory.meter import meter_for
from tuning import NAMES

STEPS, WARM_UP, BATCH_SIZE = 100, 2, 8  # of a turn; turns, in which steps are taken apart; of small steps
OF_MS = 50.0  # the step of which the cost is told as a share
PLAIN, AGAIN, TRACEML = "plain", "plain once more", "traceml"
TITLES = {
    AGAIN: "plain once more",
    EVERYTHING: "record, parts, two steps taken apart, loggers told",
    TRACEML: "under TraceML",
}
SCRIPT = Path(__file__).parent / "_evidence_side.py"
# Steps of a model; the two of them that are taken apart, the latter under a meter.
SUM_STEPS, WATCHED, TAKEN_APART = 40, 3, 21

Turn = tuple[float, float]
"""The mean step's seconds, and its processor seconds."""


# -- cost --------------------------------------------------------------------------------------------------------------


def turns_of(sides: Sequence[str], rounds: int, folder: Path) -> dict[str, tuple[list[Turn], float]]:
    """Of each side: its turns, and the seconds that its fit took to end after the last one."""
    address = str(folder / "socket")
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(address))
        pipes: dict[str, Connection] = {}
        for name in sides:
            arguments = [address, name, str(folder), str(WARM_UP + rounds), str(STEPS), str(BATCH_SIZE)]
            plain = [sys.executable, str(SCRIPT), *arguments]
            command = plain if name != TRACEML else _traceml.command(SCRIPT, arguments, folder / TRACEML, "run")
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            pipe = stack.enter_context(listener.accept())
            pipes[pipe.recv()] = pipe
        turns: dict[str, list[Turn]] = {name: [] for name in sides}
        for number in range(WARM_UP + rounds):
            for name in sides if number % 2 == 0 else reversed(sides):
                pipes[name].send(None)
                turns[name].append(tuple(pipes[name].recv()))
        return {name: (turns[name], pipes[name].recv()) for name in sides}


def cost_row(name: str, turns: dict[str, tuple[list[Turn], float]]) -> list[str]:
    (plain, plain_end), (ours, our_end) = turns[PLAIN], turns[name]
    cells = []
    for place in (0, 1):
        more_us = [1e6 * (b[place] - a[place]) for a, b in zip(plain[WARM_UP:], ours[WARM_UP:], strict=True)]
        middle, low, high = median_interval(more_us)
        cells += [f"{middle:+.0f}", f"{low:+.0f} to {high:+.0f}"]
        if place == 0:
            cells += [f"{middle / (1e3 * OF_MS):+.2%} ({low / (1e3 * OF_MS):+.2%} to {high / (1e3 * OF_MS):+.2%})"]
    once = STEPS * sum(b[0] - a[0] for a, b in zip(plain[:WARM_UP], ours[:WARM_UP], strict=True))
    step_ms = 1e3 * statistics.median(turn[0] for turn in plain[WARM_UP:])
    return [TITLES[name], f"{step_ms:.1f}", *cells, f"{once:+.2f}", f"{our_end - plain_end:+.2f}"]


def costs(rounds: int) -> None:
    sides = [PLAIN, AGAIN, EVERYTHING, *([TRACEML] if _traceml.installed() else [])]
    with tempfile.TemporaryDirectory() as folder:
        turns = turns_of(sides, rounds, Path(folder))
    rows = [cost_row(name, turns) for name in sides[1:]]
    if TRACEML not in sides:
        rows.append([TITLES[TRACEML], "not installed", *[""] * 7])
    columns = (
        *("", "plain step, ms", "more time a step, µs", "95% of the median", f"of a step of {OF_MS:.0f} ms"),
        *("more processor time, µs", "95% of the median"),
        *(f"more in the first {WARM_UP * STEPS} steps, s", "more at the end, s"),
    )
    details = {"rounds": rounds, "steps_a_turn": STEPS, "traceml": _traceml.installed() or None}
    publish("evidence_cost", "python benchmarks/evidence_cost.py", columns, rows, details, by_machine=True)


# -- sums --------------------------------------------------------------------------------------------------------------


class Endless:
    """Batches over and over, in one epoch."""

    def __init__(self, data: Any) -> None:
        if hasattr(data, "setup"):
            data.prepare_data()
            data.setup("fit")
            data = data.train_dataloader()
        self._batches = data

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._batches


class WallClock(Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.ends_s.append(time.perf_counter())


class Metered(Callback):
    """The most that was allocated at once in the step that is taken apart in another run."""

    def __init__(self) -> None:
        self._meter = meter_for(torch.device("cpu"))
        self.peak_bytes = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == TAKEN_APART:
            gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
            states = [list(optimizer.state.values()) for optimizer in trainer.optimizers]
            module = [*pl_module.parameters(), *pl_module.buffers()]
            self._meter.start(tensors_in((module, gradients, states, batch)))

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] + 1 == TAKEN_APART:
            self.peak_bytes = max(interval.peak_bytes for interval in self._meter.stop())


def trained(name: str, folder: Path, steps: int, *callbacks: Callback) -> None:
    seed_everything(0, verbose=False)
    module, data = MODELS[name].task()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        max_steps=steps,
        logger=CSVLogger(folder),
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module, Endless(data))


def sums_row(name: str) -> list[str]:
    wall, metered = WallClock(), Metered()
    with tempfile.TemporaryDirectory() as folder:
        trained(name, Path(folder) / "recorded", SUM_STEPS, SpeedMemoryLogger(), wall)
        record = read_record(Path(folder))
        trained(name, Path(folder) / "metered", TAKEN_APART, metered)
    parts_ms, wall_ms = sum(record.parts_ms().values()), _wall_ms(record, wall.ends_s)
    assert record.memory is not None
    told = sum(record.memory.parts.values())
    return [
        MODELS[name].title,
        f"{wall_ms:.2f}",
        f"{parts_ms / wall_ms - 1:+.2%}",
        f"{metered.peak_bytes / 2**20:.1f}",
        f"{told / metered.peak_bytes - 1:+.2%}",
    ]


def _wall_ms(record: Record, ends_s: Sequence[float]) -> float:
    """The mean step, without the first one and those that were taken apart: their parts are not looked at."""
    looked_at = sum(some.looked_at for some in record.steps)
    assert looked_at == len(ends_s) - 3, (looked_at, len(ends_s))
    apart = sum(ends_s[step - 1] - ends_s[step - 2] for step in (WATCHED, TAKEN_APART))
    return 1e3 * (ends_s[-1] - ends_s[0] - apart) / looked_at


def sums(models: Sequence[str]) -> None:
    _phase_sampler.EVERY = 1  # that every step is looked at
    _step_watch._TAKEN_APART_AGAIN = TAKEN_APART - 1
    rows = []
    for name in models:
        rows.append(sums_row(name))
        print("  ".join(rows[-1]), flush=True)
    columns = ("", "step, ms", "sum of its parts", "peak of the allocator, MiB", "sum of the categories at the peak")
    publish("evidence_sums", "python benchmarks/evidence_cost.py", columns, rows, {"steps": SUM_STEPS}, by_machine=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24, help="of the cost; 0: only the sums")
    parser.add_argument("--models", type=_names, default=NAMES, metavar=",".join(NAMES), help="empty: only the cost")
    options, _ = parser.parse_known_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if options.rounds:
        print(f"TraceML {_traceml.installed()}" if _traceml.installed() else _traceml.MISSING)
        costs(options.rounds)
    if options.models:
        sums(options.models)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    main()
