"""Three arms that do nothing at all, in many short runs: how often does a search find a winner among them?

    python benchmarks/false_wins.py [--runs 200] [--json docs/results]

Live trials, and a greedy search as pytorch-autotune makes it (a chunk of steps without and one with each arm, kept
where the median is 3% faster), in the same plain loops, of steps of a millisecond: the shorter the step, the larger the
noise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from _measure import publish
from _small_models import lstm, mlp
from _tuning_loop import AcceleratedLoop, greedy, run_until_settled, task_of

from lightning_accel import Plan
from lightning_accel.techniques import BuildContext, Technique, Traits, register
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.registry import declarations, forget

COLUMNS = ("", "runs with a winner", "of", "steps a run", "seconds a run")
STEPS = 250  # that live trials are told of; they need fewer
TASKS = (partial(mlp, batch_size=16, width=64), partial(lstm, batch_size=4, seq_len=8, width=32))


class Nothing(Technique):
    """An arm that changes nothing at all."""

    traits = Traits(acts_without_sites=True)

    @classmethod
    def from_settings(cls, settings: Any, context: BuildContext) -> Nothing:
        return cls()

    def __init__(self) -> None:
        self.run.live = Live(variants=("on",))


@dataclass
class Search:
    """What one way to search has come to, over all runs so far."""

    name: str
    won: int = 0
    steps: int = 0
    seconds: float = 0.0

    def row(self, runs: int) -> list[str]:
        return [self.name, str(self.won), f"{runs} runs", f"{self.steps / runs:.0f}", f"{self.seconds / runs:.2f}"]


def false_wins(runs: int) -> tuple[Search, Search]:
    """Both searches in ``runs`` plain runs each."""
    live, chunks = Search("live trials"), Search("greedy search")
    names = [f"nothing_{number}" for number in range(3)]
    alone = Plan().replace(**dict.fromkeys(declarations(), "off"))  # an optimizer's faster step would be a true winner
    for name in names:
        register(name, options=Literal["auto", "off"], default="auto")(type(name, (Nothing,), {}))
    try:
        for make in itertools.islice(itertools.cycle(TASKS), runs):
            for search in (live, chunks):
                plan = alone if search is live else alone.replace(trust="checked")
                loop = AcceleratedLoop(task_of(*make()), plan, STEPS)
                start = time.perf_counter()
                if search is live:
                    found = run_until_settled(loop, STEPS)
                    choices, steps = found.choices, found.steps
                else:
                    choices, steps = greedy(loop, loop.arms())
                search.seconds += time.perf_counter() - start
                search.won += bool(choices)
                search.steps += steps
                loop.close()
    finally:
        for name in names:
            forget(name)
    return live, chunks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_known_args()[0].runs
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_ACCEL_CACHE"] = folder
        rows = [search.row(runs) for search in false_wins(runs)]
    publish("false_wins", f"python benchmarks/false_wins.py --runs {runs}", COLUMNS, rows, by_machine=True)


if __name__ == "__main__":
    main()
