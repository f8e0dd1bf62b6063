"""The settled steps of :mod:`rivals`' sides, in turns: a shared machine's speed changes from minute to minute.

    python benchmarks/rivals_settled.py [--models gpt,cnn] [--sides plain,accel] [--steps 700] [--rounds 30]
        [--json docs/results]

Every side of a model trains ``--steps`` steps in a process of its own, then waits. From then on the sides take turns of
13 steps, in random order in each round, so that all meet the machine as it is at that time. The clocks of a process,
the plugin's own among them, stand still while another has the turn. Of a turn the median of its last ten steps counts.
Speeds are medians over rounds of the first side's time divided by the side's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from _measure import publish
from _rivals_cases import CASES
from _rivals_rounds import CACHES, MOST_BATCHES, add_choices
from _rivals_sides import EXPERT, OURS, PLAIN, SIDES

from lightning_accel.core.host import Host

SETTLED = 700  # steps; by then AccelPlugin() has made its trials in all six models
LENGTH, ROUNDS, LIMIT_S = 13, 30, 3600.0
BY_DEFAULT = [PLAIN, EXPERT, "hand", OURS]


class Side:
    """One side's process."""

    def __init__(self, name: str, case: str, data: Path, folder: Path, steps: int, rounds: int) -> None:
        request, answer = folder / f"{name}.json", folder / f"{name}.answer.json"
        asked = {"side": name, "case": case, "data": str(data), "has_bf16": bool(Host.detect("cpu").native_bf16)}
        asked |= {"limit_s": LIMIT_S, "steps": steps + LENGTH * rounds, "marks": [], "device": "cpu"}
        request.write_text(json.dumps({**asked, "turns": {"after": steps, "length": LENGTH}}), encoding="utf-8")
        caches = {variable: str(folder / name / variable.lower()) for variable in CACHES}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_rivals_side.py")), str(request), str(answer)],
            env={**os.environ, **caches},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._until_it_waits()

    def turn(self) -> float:
        """Has it train for a turn, and returns the seconds of a step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._until_it_waits()

    def end(self) -> None:
        with self._process:  # closes its pipes
            self._process.kill()

    def _until_it_waits(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # tools print, too
            word, *seconds = line.split() or [""]
            if word == "turn":
                return statistics.median(map(float, seconds or ["nan"]))  # none before the first turn of a short run
        raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}.")


def measure(case: str, names: list[str], steps: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of a step of each side, for each round."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.pt"
        net, batches = CASES[case].built("cpu", MOST_BATCHES["cpu"])
        torch.save((net.state_dict(), batches), data)
        sides: dict[str, Side] = {}
        try:
            for name in names:
                sides[name] = Side(name, case, data, Path(folder), steps, rounds)
            found: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(rounds):
                for name in random.sample(names, len(names)):
                    found[name].append(sides[name].turn())
            return found
        finally:
            for side in sides.values():
                side.end()


def speed(found: dict[str, list[float]], side: str, other: str) -> tuple[str, str]:
    """Returns how many times as fast as another a side was: the median over rounds, and their middle half."""
    ratios = [theirs / own for own, theirs in zip(found[side], found[other], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.2f}x", f"{low:.2f} to {high:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_choices(parser, BY_DEFAULT)
    parser.set_defaults(steps=SETTLED, rounds=ROUNDS)
    chosen, _ = parser.parse_known_args()
    command = f"python benchmarks/rivals_settled.py --steps {chosen.steps} --rounds {chosen.rounds}"
    command += "" if chosen.models == list(CASES) else f" --models {','.join(chosen.models)}"
    command += "" if chosen.sides == BY_DEFAULT else f" --sides {','.join(chosen.sides)}"
    columns = [
        "",
        "side",
        "settled step, ms",
        f"speed over {SIDES[chosen.sides[0]].title}",
        "middle half of the rounds",
    ]
    others = [side for side in chosen.sides if side != OURS]
    verdict_columns = ["", *(f"`AccelPlugin()` over {SIDES[side].title}" for side in others)]
    rows, verdicts, everything = [], [], {}
    for case in chosen.models:
        found = everything[case] = measure(case, chosen.sides, chosen.steps, chosen.rounds)
        for side in chosen.sides:
            step_ms = f"{1e3 * statistics.median(found[side]):.1f}"
            rows.append([CASES[case].title, SIDES[side].title, step_ms, *speed(found, side, chosen.sides[0])])
            print(*rows[-1], sep="  ", flush=True)
        if OURS in chosen.sides:
            verdicts.append([CASES[case].title, *(" (".join(speed(found, OURS, side)) + ")" for side in others)])
    details = {"verdicts": {"columns": verdict_columns, "rows": verdicts}, "not measured": [], "step_s": everything}
    publish("rivals_settled", command, columns, rows, details, by_machine=True)


if __name__ == "__main__":
    main()
