"""Live trials against an exhaustive search: is what they settle on the best, how soon, and what do they cost?

    python benchmarks/tuning.py [--models mlp,lstm] [--steps 1000] [--seconds 300] [--json docs/results]

For every model, in plain loops, with bfloat16 as an arm and in float32 where the machine has bfloat16, else in float32:

1. A loop with live trials and one without lightning-accel train in turns, a step each, in an order that a coin decides,
   from the first step to the last: what do users wait for in all, trials included?
2. All combinations of the same arms take turns in random order, and the best one is looked for.
3. A greedy search as pytorch-autotune makes it, on the same arms: a chunk of steps without and one with each arm, kept
   where the median is 3% faster.
4. The best combination takes turns with what (1) and (3) came to, anew: what was best by luck is not so a second time.
5. A second run with live trials, in a loop of its own, alone: does it come to the same?

How often either search finds a winner where there is none: :mod:`false_wins`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from _measure import publish
from _small_models import MODELS
from _tuning_loop import (
    FIRST,
    AcceleratedLoop,
    Beside,
    Combination,
    PlainLoop,
    Task,
    TunedLoop,
    all_combinations,
    beside,
    chosen,
    greedy,
    in_turns,
    in_words,
    run_until_settled,
    task_of,
)

from lightning_accel import Plan
from lightning_accel.claims.measure import median_interval
from lightning_accel.core.host import Host

NAMES = ("cnn", "demo_gpt", "gpt_1024", "vit", "lstm", "mlp", "unet", "bert")
COLUMNS = (
    *("", "steps", "settled", "its share of the best", "steps to settle", "by its own report", "plain by tuned time"),
    *("median of pairs", "a second run", "greedy search", "its share of the best", "its steps"),
)
SEARCH, FINAL = 0.2, 0.1  # of the seconds that the loops in turns may take
WORTH = 1.05  # a ratio of times on which two runs have to agree
WARM_UP = 8

Precision = Literal["auto", "32-true"]


def small(name: str) -> Task:
    torch.manual_seed(0)
    return task_of(*MODELS[name].task())


@dataclass(frozen=True)
class Outcome:
    """What came of one model.

    Attributes:
        steps: Of the loops in turns.
        ours: What live trials settled on, after ``settled_at`` steps.
        reported: Their own line.
        beside: All steps of the loops in turns.
        seconds: The median step of every combination.
        second: What another run settled on.
        theirs: What the greedy search keeps, after ``greedy_steps`` steps.
        shares: (median, low, high) of a combination's throughput as a share of the best one's, in new turns.
    """

    steps: int
    ours: Combination
    settled_at: int
    reported: str
    table: str
    beside: Beside
    seconds: Mapping[Combination, float]
    second: Combination
    theirs: Combination
    greedy_steps: int
    shares: Mapping[Combination, tuple[float, float, float]]


def measured(name: str, precision: Precision, most_steps: int, seconds: float) -> Outcome:
    plain = PlainLoop(small(name))
    step_s = statistics.median([plain.step() for _ in range(WARM_UP)][1:])  # and the process has warmed up
    steps = max(2 * FIRST, min(most_steps, int(seconds / (2 * step_s))))
    plain, tuned = PlainLoop(small(name)), TunedLoop(small(name), Plan(precision=precision, trust="checked"), steps)
    both = beside(plain, tuned, steps)
    tuned.finish()
    del plain
    ours = chosen(tuned.tuning)
    spent = in_turns(tuned, all_combinations(tuned.arms()), SEARCH * seconds)
    medians = {combination: statistics.median(each) for combination, each in spent.items()}
    theirs, greedy_steps = greedy(tuned, tuned.arms())
    shares = shares_of_best(tuned, min(medians, key=medians.__getitem__), (ours, theirs), FINAL * seconds)
    tuned.close()
    return Outcome(
        steps=steps,
        ours=ours,
        settled_at=tuned.settled_at,
        reported=str(tuned.tuning.whole.interval) if tuned.tuning.whole and ours else "",
        table=tuned.tuning.table(),
        beside=both,
        seconds=medians,
        second=another_run(name, precision, steps),
        theirs=theirs,
        greedy_steps=greedy_steps,
        shares=shares,
    )


def shares_of_best(
    loop: AcceleratedLoop, best: Combination, found: Sequence[Combination], seconds: float
) -> dict[Combination, tuple[float, float, float]]:
    """The throughput of what was found as a share of the best one's: medians over new rounds, with their intervals."""
    spent = in_turns(loop, list(dict.fromkeys([best, *found])), seconds)
    return {
        each: median_interval([a / b for a, b in zip(spent[best], taken, strict=True)]) for each, taken in spent.items()
    }


def another_run(name: str, precision: Precision, steps: int) -> Combination:
    """What a loop of its own settles on, alone, as users have it."""
    loop = AcceleratedLoop(small(name), Plan(precision=precision), steps)
    found = run_until_settled(loop, steps)
    loop.close()
    return found.choices


# -- in words --------------------------------------------------------------------------------------------------------


def row(title: str, outcome: Outcome) -> list[str]:
    return [
        title,
        f"{outcome.steps:,}",
        in_words(outcome.ours),
        share_in_words(outcome.shares[outcome.ours]),
        settling(outcome),
        outcome.reported,
        outcome.beside.over_all(),
        f"{outcome.beside.median():.3f}x",
        agreement(outcome.ours, outcome.second, outcome.seconds),
        in_words(outcome.theirs),
        share_in_words(outcome.shares[outcome.theirs]),
        str(outcome.greedy_steps),
    ]


def settling(outcome: Outcome) -> str:
    if len(outcome.seconds) == 1:
        return "no arms"
    return f"{outcome.settled_at:,}" if outcome.settled_at else "not settled"


def share_in_words(share: tuple[float, float, float]) -> str:
    value, low, high = share
    return "the best" if value == low == high == 1.0 else f"{value:.1%} [{low:.1%}, {high:.1%}]"


def agreement(first: Combination, second: Combination, seconds: Mapping[Combination, float]) -> str:
    """Whether two runs agree on every arm that is worth more than 5%, by all the combinations' times."""
    differing = sorted({name for name, _ in set(first) ^ set(second)})
    if not differing:
        return "the same"
    worths = [worth(name, seconds) for name in differing]
    said = ["not an arm of both" if math.isinf(each) else f"{each - 1:.0%}" for each in worths]
    words = ", ".join(f"{name} ({amount})" for name, amount in zip(differing, said, strict=True))
    return f"not on {words}" if max(worths) > WORTH else f"the same but for {words}"


def worth(arm: str, seconds: Mapping[Combination, float]) -> float:
    """How many times as long the best combination takes where this arm alone is chosen otherwise; inf: not known."""
    best = min(seconds, key=seconds.__getitem__)
    others = [
        taken
        for each, taken in seconds.items()
        if each != best and {name for name, _ in set(each) ^ set(best)} == {arm}
    ]
    return max(others, default=math.inf) / seconds[best]


def details(name: str, precision: Precision, outcome: Outcome) -> dict[str, Any]:
    return {
        "model": name,
        "precision": precision,
        "comparisons": outcome.table.splitlines(),
        "plain by tuned time, by tenths of the run": outcome.beside.by_tenths(),
        "median ms": {in_words(each): 1e3 * taken for each, taken in outcome.seconds.items()},
        "share of the best": {in_words(each): share for each, share in outcome.shares.items()},
        "second run": in_words(outcome.second),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=NAMES, metavar=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=1000, help="of the two loops in turns")
    parser.add_argument("--seconds", type=float, default=300, help="that those may take; fewer steps where they would")
    options, _ = parser.parse_known_args()
    precisions: dict[Precision, str] = {"auto": "bfloat16 an arm", "32-true": "float32"}
    if not Host.detect("cpu").native_bf16:
        precisions = {"32-true": "float32, no bfloat16 here"}
    rows, kept = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_ACCEL_CACHE"] = folder
        for name, precision in itertools.product(options.models, precisions):
            outcome = measured(name, precision, options.steps, options.seconds)
            rows.append(row(f"{MODELS[name].title}; {precisions[precision]}", outcome))
            kept.append(details(name, precision, outcome))
            print(" | ".join(rows[-1]), flush=True)
    given = f" --steps {options.steps} --seconds {options.seconds:g}"
    given += "" if options.models == NAMES else f" --models {','.join(options.models)}"
    publish("tuning", f"python benchmarks/tuning.py{given}", COLUMNS, rows, kept, by_machine=True)


if __name__ == "__main__":
    main()
