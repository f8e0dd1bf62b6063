"""Live trials against an exhaustive search: is what they settle on the best, how soon, and do they ever win by chance?

    python benchmarks/tuning.py [--models mlp,lstm] [--steps 400] [--aa 200] [--json docs/results]

For every model, in a plain loop: (1) a run with live trials; (2) an exhaustive search, in which all combinations of the
same arms take turns on equal steps in random order; what was settled is looked up in it; (3) a greedy search as
pytorch-autotune makes it, on the same arms: a chunk of steps without and one with each arm, kept where the median is 3%
faster. Last, arms that do nothing at all, in many short runs: how often does each of the two find a winner?
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from _measure import publish
from _small_models import MODELS
from torch import Tensor

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import Handle
from lightning_accel.techniques import Surroundings, Technique, register
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.techniques.registry import forget
from lightning_accel.tuning.trials import WHOLE

COLUMNS = ("", "settled", "of the best", "over plain", "steps to settle", "greedy chunks", "of the best", "steps")
CHUNK, FLOOR = 8, 1.03  # of the greedy search
ROUNDS = 12  # of the exhaustive one

Choice = dict[str, str]


class Loop:
    """A training loop of one of the small models, a step at a time."""

    def __init__(self, name: str, plan: Plan, steps: int) -> None:
        torch.manual_seed(0)
        module, data = MODELS[name].task()
        if hasattr(data, "setup"):
            data.setup("fit")
            data = data.train_dataloader()
        self._module, self._batches = module, self._forever(data)
        optimizer: Any = module.configure_optimizers()
        self._optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        self.handle: Handle = accelerate(module, plan, optimizers=self._optimizer, steps=steps)

    def step(self) -> float:
        """Trains on the next batch; seconds."""
        batch = next(self._batches)
        start = time.perf_counter()
        with self.handle.step():
            loss = self._module.training_step(self.handle.batch(batch), 0)
        loss = loss["loss"] if isinstance(loss, dict) else loss
        assert isinstance(loss, Tensor)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - start

    def arms(self) -> list[Arm]:
        """What can be switched, once the trials of the parts are over."""
        for _ in range(5):
            self.step()
        return self.handle.engine.arms()

    @staticmethod
    def _forever(data: Any) -> Iterator[Any]:
        while True:
            yield from data


def put(arms: list[Arm], handle: Handle, choice: Choice) -> None:
    for arm in arms:
        arm.choose(choice.get(arm.name, OFF))
    handle.engine.rest(arm.name for arm in arms if arm.name not in choice)


@dataclass(frozen=True)
class Exhaustive:
    """The median step of every combination, in seconds."""

    seconds: dict[tuple[tuple[str, str], ...], float]

    def share_of_best(self, choice: Choice) -> float:
        """The throughput of a combination, as a share of the best one's."""
        return min(self.seconds.values()) / self.seconds[tuple(sorted(choice.items()))]


def exhaustive(name: str) -> Exhaustive:
    loop = Loop(name, Plan(tune="off"), 0)
    arms = loop.arms()
    combinations: list[Choice] = [{}]
    for arm in arms:
        combinations += [{**one, arm.name: choice} for one in list(combinations) for choice in arm.choices]
    spent: dict[tuple[tuple[str, str], ...], list[float]] = {tuple(sorted(c.items())): [] for c in combinations}
    coin = random.Random(0)
    for _ in range(ROUNDS):
        for combination in coin.sample(combinations, len(combinations)):
            put(arms, loop.handle, combination)
            loop.step()  # pays for the switch
            spent[tuple(sorted(combination.items()))] += [loop.step(), loop.step()]
    loop.handle.undo()
    return Exhaustive({choice: statistics.median(seconds) for choice, seconds in spent.items()})


@dataclass(frozen=True)
class Found:
    """What a search has come to: the combination, and how many steps it took."""

    choice: Choice
    steps: int
    over_plain: str = ""


def live(name: str, steps: int) -> Found:
    loop = Loop(name, Plan(), steps)
    settled_at = 0
    for at in range(steps):
        loop.step()
        if not settled_at and loop.handle.report.of("tuning").status:
            settled_at = at
    tuning = loop.handle.tuning
    loop.handle.undo()
    if tuning is None:
        return Found({}, 0)
    whole = tuning.results.get(WHOLE)
    return Found(dict(tuning.choices), settled_at, str(tuning.whole.interval) if tuning.whole and whole else "")


def greedy(name: str) -> Found:
    """As pytorch-autotune 2.0 searches: one arm after the other, by medians of chunks, with a floor of 3%."""
    loop = Loop(name, Plan(tune="off"), 0)
    arms, kept, steps = loop.arms(), Choice(), 0
    for arm in arms:
        medians = []
        for choice in (kept, {**kept, arm.name: arm.choices[0]}):
            put(arms, loop.handle, choice)
            medians.append(statistics.median([loop.step() for _ in range(CHUNK)][2:]))
            steps += CHUNK
        if medians[0] > FLOOR * medians[1]:
            kept[arm.name] = arm.choices[0]
    loop.handle.undo()
    return Found(kept, steps)


@dataclass(frozen=True, kw_only=True)
class NothingPlan:
    """A technique that does nothing.

    Attributes:
        mode: ``"auto"`` or ``"off"``.
    """

    mode: Literal["auto", "off"] = "auto"


class Nothing(Technique):
    """Three arms that change nothing at all."""

    acts_without_sites = True

    @classmethod
    def planned(cls, settings: NothingPlan, surroundings: Surroundings) -> Nothing:
        return cls()

    def arms(self) -> Iterator[Arm]:
        for number in range(3):
            yield Arm(f"nothing {number}", ("on",), lambda choice: None)


def false_wins(runs: int, steps: int) -> tuple[int, int]:
    """In how many of ``runs`` plain runs live trials, and the greedy search, find a winner."""
    register("nothing", settings=NothingPlan, default="auto")(Nothing)
    names = itertools.islice(itertools.cycle(("mlp", "lstm")), runs)
    only_nothing = {"flash_attention": "off", "memory_format": "off", "inplace_activations": "off"}
    ours = theirs = 0
    try:
        for name in names:
            loop = Loop(name, Plan(precision="32-true", **only_nothing), steps)  # type: ignore[arg-type]
            for _ in range(steps):
                loop.step()
            ours += bool(loop.handle.tuning and loop.handle.tuning.choices)
            loop.handle.undo()
            theirs += bool(greedy(name).choice)
    finally:
        forget("nothing")
    return ours, theirs


def in_words(choice: Choice) -> str:
    return ", ".join(choice) or "plain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--aa", type=int, default=200, help="runs in which nothing is faster")
    options, _ = parser.parse_known_args()
    rows, details = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_ACCEL_CACHE"] = folder
        for name in options.models.split(","):
            best, ours, theirs = exhaustive(name), live(name, options.steps), greedy(name)
            rows.append(
                [
                    MODELS[name].title,
                    in_words(ours.choice),
                    f"{best.share_of_best(ours.choice):.1%}",
                    ours.over_plain,
                    str(ours.steps),
                    in_words(theirs.choice),
                    f"{best.share_of_best(theirs.choice):.1%}",
                    str(theirs.steps),
                ]
            )
            details.append({"model": name, "seconds": {in_words(dict(c)): s for c, s in best.seconds.items()}})
            print(" | ".join(rows[-1]), flush=True)
        if options.aa:
            ours_won, theirs_won = false_wins(options.aa, 250)
            rows.append(
                ["three arms that do nothing", f"{ours_won} of {options.aa} runs", "", "", "", f"{theirs_won}", "", ""]
            )
    given = f"--models {options.models} --steps {options.steps} --aa {options.aa}"
    publish("tuning", f"python benchmarks/tuning.py {given}", list(COLUMNS), rows, details)


if __name__ == "__main__":
    main()
