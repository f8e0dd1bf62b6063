"""What each technique adds to a training step, alone and left out of the whole.

    python benchmarks/techniques.py [--models mlp,lstm] [--seconds 120] [--json docs/results]

For every model of :mod:`tuning`, in one plain loop, with every technique that leaves the numbers alone but for
rounding. The plain run, each arm alone, the whole, and the whole without each arm take turns in random order, three
steps at a time, the first of which pays for the switch and is not counted. *Alone* is the plain step's time over the
step's with this arm and nothing else; *left out* the time of the whole without it over that of the whole: both above
one where it gains. Medians of the rounds' ratios, with their 95% intervals.

The whole is all arms at once, whether they gain or not: live trials would keep those that do. Techniques that change
memory, batches or loaders rather than steps have benchmarks of their own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _measure import publish
from _small_models import MODELS
from _tuning_loop import AcceleratedLoop, Combination, in_turns

from lightning_accel import Plan
from lightning_accel.claims.measure import median_interval
from lightning_accel.core.host import Host
from lightning_accel.techniques.arms import Arm
from lightning_accel.techniques.registry import declarations
from tuning import NAMES, small

COLUMNS = ("model", "technique", "alone", "left out of the whole", "rounds")
ON_TRIAL = ("exact", "rounding")


@dataclass(frozen=True)
class Added:
    """What an arm adds: ratios of times, each (median, low, high)."""

    alone: tuple[float, float, float]
    left_out: tuple[float, float, float] | None
    rounds: int


def plan_with_all() -> Plan:
    """Every technique that has ``"auto"`` and leaves the numbers alone but for rounding, none of them on trial."""
    on = {
        name: "auto"
        for name, declaration in declarations().items()
        if declaration.exactness in ON_TRIAL and "auto" in getattr(declaration.switch_type, "__args__", ())
    }
    precision = "auto" if Host.detect("cpu").native_bf16 else "32-true"
    return Plan(**{**on, "precision": precision, "tune": "off"})


def combinations(arms: Sequence[Arm]) -> dict[tuple[str, str], tuple[Combination, Combination | None]]:
    """For each choice of each arm: it alone, and the whole without it, where the whole has it."""
    whole = {arm.name: arm.choices[0] for arm in arms}
    found: dict[tuple[str, str], tuple[Combination, Combination | None]] = {}
    for arm in arms:
        without = tuple(sorted((name, choice) for name, choice in whole.items() if name != arm.name))
        for choice in arm.choices:
            is_in_whole = len(arms) > 1 and choice == whole[arm.name]
            found[arm.name, choice] = ((arm.name, choice),), without if is_in_whole else None
    return found


def measured(name: str, seconds: float) -> tuple[dict[tuple[str, str], Added], tuple[float, float, float]]:
    """What each choice of each arm adds to a model's step, and what all of them do together."""
    loop = AcceleratedLoop(small(name), plan_with_all())
    arms = loop.arms()
    asked = combinations(arms)
    whole: Combination = tuple(sorted((arm.name, arm.choices[0]) for arm in arms))
    runs: list[Combination] = [(), whole]
    for alone, without in asked.values():
        runs += [alone] if without is None else [alone, without]
    spent = in_turns(loop, list(dict.fromkeys(runs)), seconds)
    loop.close()
    added = {
        choice: Added(
            alone=ratio(spent, (), alone),
            left_out=None if without is None else ratio(spent, without, whole),
            rounds=len(spent[()]),
        )
        for choice, (alone, without) in asked.items()
    }
    return added, ratio(spent, (), whole)


def ratio(
    spent: Mapping[Combination, Sequence[float]], first: Combination, second: Combination
) -> tuple[float, float, float]:
    """How many times as long the first takes as the second."""
    return median_interval([a / b for a, b in zip(spent[first], spent[second], strict=True)])


def in_words(interval: tuple[float, float, float] | None) -> str:
    return "" if interval is None else "{:.3f}x [{:.3f}, {:.3f}]".format(*interval)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=NAMES, metavar=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=120, help="a model; five rounds at least")
    options, _ = parser.parse_known_args()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_ACCEL_CACHE"] = folder
        for name in options.models:
            added, whole = measured(name, options.seconds)
            title = MODELS[name].title
            for (arm, choice), each in added.items():
                technique = arm if choice == "on" else f"{arm}={choice}"
                rows.append([title, technique, in_words(each.alone), in_words(each.left_out), str(each.rounds)])
                print(" | ".join(rows[-1]), flush=True)
            rows.append([title, "all of them", in_words(whole), "", ""])
            print(" | ".join(rows[-1]), flush=True)
    given = f" --seconds {options.seconds:g}"
    given += "" if options.models == NAMES else f" --models {','.join(options.models)}"
    publish("techniques", f"python benchmarks/techniques.py{given}", COLUMNS, rows, by_machine=True)


if __name__ == "__main__":
    main()
