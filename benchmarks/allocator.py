"""What allocating memory costs a training step on a CPU, and what other allocators save of it.

    python benchmarks/allocator.py [--rounds 12] [--models demo_gpt,mlp] [--json docs/results]

One process for each allocator, all of them alive at a time, which take turns of one to three seconds in an order that
changes from round to round; while it is not its turn a process sleeps. A turn's figures are medians of its steps; the
speed is the median over the rounds of plain's step by the candidate's. *In the run* is what ``allocator="auto"`` does:
the heap of glibc is told to keep what is free once the loop is warm. Others are chosen by variables before Python
starts, as ``lightning-accel run`` sets them. jemalloc and tcmalloc are measured where they are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

from _measure import publish

from lightning_accel.core.allocators import heaps
from lightning_accel.core.heap import Heap, page_faults

NAMES = ("demo_gpt", "small_gpt", "mlp")
WARM_UP = 2  # rounds
PLAIN, IN_THE_RUN = "plain", "glibc, told in the run"
COLUMNS = ("", "allocator", "step, ms", "speed", "least to most", "system, ms", "page faults a step", "peak, MiB")


@dataclass(frozen=True)
class Turn:
    """What the steps of a turn measured.

    Attributes:
        step_ms: The median of a step.
        system_ms: Of a step, what the system took of the processor's time.
        faults: Page faults of a step, on the average.
        peak_mib: The most that the process held in memory in the turn.
    """

    step_ms: float
    system_ms: float
    faults: float
    peak_mib: float


def child(name: str, keeps: bool) -> None:
    """Trains a turn for each line of the standard input, and writes what it measured as JSON."""
    import torch
    from _small_models import MODELS
    from _tuning_loop import PlainLoop, task_of

    from lightning_accel.core.peak_memory import PeakMemory

    torch.manual_seed(0)
    small = MODELS[name]
    loop = PlainLoop(task_of(*small.task()))
    for _ in range(5):
        loop.step()
    if keeps:
        Heap().keep_free_memory()
    peak = PeakMemory(torch.device("cpu"))
    for _ in sys.stdin:
        peak.restart()
        faults, system = page_faults(), resource.getrusage(resource.RUSAGE_SELF).ru_stime
        seconds = [loop.step() for _ in range(small.steps)]
        turn = Turn(
            step_ms=1e3 * statistics.median(seconds),
            system_ms=1e3 * (resource.getrusage(resource.RUSAGE_SELF).ru_stime - system) / small.steps,
            faults=(page_faults() - faults) / small.steps,
            peak_mib=peak.peak_bytes() / 2**20,
        )
        print(json.dumps(asdict(turn)), flush=True)


class Process:
    """A training under one allocator, from this side."""

    def __init__(self, name: str, environment: dict[str, str], keeps: bool) -> None:
        command = [sys.executable, __file__, "--child", name, *(["--keep"] if keeps else [])]
        self._popen = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take_turn(self) -> Turn:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write("\n")
        self._popen.stdin.flush()
        while not (line := self._popen.stdout.readline()).startswith("{"):
            if not line:
                raise RuntimeError(f"its process ended with status {self._popen.wait()}")
        return Turn(**json.loads(line))

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()


def turns_of(name: str, rounds: int) -> dict[str, list[Turn]]:
    """By allocator, of every round that counts."""
    environments = {PLAIN: {}, IN_THE_RUN: {}} | {heap.name: dict(heap.environment) for heap in heaps()}
    with ExitStack() as stack:
        processes = {
            title: stack.enter_context(closing(Process(name, environment, keeps=title == IN_THE_RUN)))
            for title, environment in environments.items()
        }
        found: dict[str, list[Turn]] = {title: [] for title in processes}
        order = list(processes)
        for number in range(WARM_UP + rounds):
            for title in order if number % 2 == 0 else reversed(order):
                found[title].append(processes[title].take_turn())
            order = order[1:] + order[:1]
        return {title: turns[WARM_UP:] for title, turns in found.items()}


def rows_of(name: str, found: dict[str, list[Turn]]) -> list[list[Any]]:
    rows = []
    for title, turns in found.items():
        speeds = [plain.step_ms / turn.step_ms for plain, turn in zip(found[PLAIN], turns, strict=True)]

        def median(field: str, turns: list[Turn] = turns) -> float:
            return statistics.median(getattr(turn, field) for turn in turns)

        rows.append(
            [
                *(name, title, f"{median('step_ms'):.1f}"),
                *(f"{statistics.median(speeds):.2f}x", f"{min(speeds):.2f} to {max(speeds):.2f}"),
                *(f"{median('system_ms'):.1f}", f"{median('faults'):.0f}", f"{median('peak_mib'):.0f}"),
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--json", help="a folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.keep)
        return
    rows: list[list[Any]] = []
    details = {}
    start = time.monotonic()
    for name in arguments.models.split(","):
        found = turns_of(name, arguments.rounds)
        details[name] = {title: [asdict(turn) for turn in turns] for title, turns in found.items()}
        rows += rows_of(name, found)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    publish("allocator", "python benchmarks/allocator.py", COLUMNS, rows, details, by_machine=True)


if __name__ == "__main__":
    main()
