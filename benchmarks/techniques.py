"""What each technique adds to a training step, alone and left out of the whole.

    python benchmarks/techniques.py [--models mlp,lstm] [--seconds 100] [--json docs/results]

For every model of :mod:`tuning`, in one plain loop on the CPU, with every technique that leaves the numbers alone but
for rounding. The plain run, each arm alone, the whole, and the whole without each arm take turns in random order, three
steps at a time, the first of which pays for the switch and is not counted. *Alone* is the plain step's time over the
step's with this arm and nothing else; *left out* the time of the whole without it over that of the whole: both above
one where it gains. Medians of the rounds' ratios, with their 95% intervals.

The whole is what a run has from its first step on: all those arms at once, whether they gain or not. What is off until
it was tried, as fewer threads or a heap that keeps what is freed, is measured on top of it: its *left out* is the time
of the whole over that with it. So is what has to be set up first, compiled blocks: the others are measured without, as
every combination would be compiled anew. Where that would take more than half of a model's seconds it is left out, and
the table says so. CUDA graphs are for GPUs. Techniques that change memory, batches or loaders rather than steps have
benchmarks of their own.

All eight models take under 15 minutes on two slow cores, compilation included.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from _measure import publish
from _small_models import MODELS
from _tuning_loop import AcceleratedLoop, Combination, in_turns

from lightning_accel import Plan
from lightning_accel.claims.measure import median_interval
from lightning_accel.core.host import Host
from lightning_accel.techniques.arms import Arm
from lightning_accel.techniques.registry import Declaration, declarations
from tuning import NAMES, small

COLUMNS = ("model", "technique", "alone", "left out of the whole", "rounds")
ON_TRIAL = ("exact", "rounding")
SETUP_SHARE = 0.5  # of a model's seconds

Ratio = tuple[float, float, float]  # median, low, high


@dataclass(frozen=True)
class Added:
    """What an arm adds.

    Attributes:
        technique: And which of its choices.
        alone: Plain over it alone, or why that was not measured.
        left_out: The whole without it over the whole, or why that was not measured.
        rounds: How many of them.
    """

    technique: str
    alone: Ratio | str
    left_out: Ratio | str
    rounds: int

    def row(self, title: str) -> list[str]:
        return [title, self.technique, in_words(self.alone), in_words(self.left_out), str(self.rounds)]


def plan_with_all() -> Plan:
    """Every technique that has ``"auto"`` and leaves the numbers alone but for rounding, none of them on trial.

    But for CUDA graphs: a plan that compiles cannot have them.
    """
    on = {
        name: "auto"
        for name, declaration in declarations().items()
        if declaration.exactness in ON_TRIAL and name != "graphs" and has_auto(declaration)
    }
    precision = "auto" if Host.detect("cpu").native_bf16 else "32-true"
    return Plan().replace(**{**on, "precision": precision, "trust": "checked"})


def has_auto(declaration: Declaration) -> bool:
    """Whether ``"auto"`` is among what the technique's setting takes."""
    try:
        declaration.read("auto")
    except (TypeError, ValueError):
        return False
    return True


def whole_of(arms: Sequence[Arm]) -> Combination:
    """All that a run has before its live trials."""
    return tuple(sorted((arm.name, arm.choices[0]) for arm in arms if not arm.starts_off))


def combinations(arms: Sequence[Arm]) -> dict[tuple[str, str], tuple[Combination, Combination, Combination]]:
    """For each choice of each arm: it alone; the others of the whole, without it; and these with it."""
    whole = dict(whole_of(arms))
    found = {}
    for arm in arms:
        others = {name: choice for name, choice in whole.items() if name != arm.name}
        for choice in arm.choices:
            with_it = tuple(sorted({**others, arm.name: choice}.items()))
            found[arm.name, choice] = ((arm.name, choice),), tuple(sorted(others.items())), with_it
    return found


def measured(name: str, seconds: float) -> list[Added]:
    """What each choice of each arm adds to a model's step, and what all of them do together."""
    end = time.perf_counter() + seconds
    loop = AcceleratedLoop(small(name), plan_with_all())
    arms = [arm for arm in loop.arms() if arm.setup is None]
    asked = combinations(arms)
    whole = whole_of(arms)
    compiled = [set_up(loop, arm, whole, SETUP_SHARE * seconds) for arm in loop.arms() if arm.setup is not None]
    runs: list[Combination] = [(), whole]
    for those in (*asked.values(), *((one.alone, one.on_top) for one in compiled)):
        runs += [each for each in those if isinstance(each, tuple)]
    spent = in_turns(loop, list(dict.fromkeys(runs)), end - time.perf_counter())
    rounds = len(spent[()])
    added = [
        Added(
            arm if choice == "on" else f"{arm}={choice}",
            ratio(spent, (), alone),
            ratio(spent, without, with_it) if without else "",
            rounds,
        )
        for (arm, choice), (alone, without, with_it) in asked.items()
    ]
    if len(whole) > 1:
        added.append(Added("all of them", ratio(spent, (), whole), "", rounds))
    for one in compiled:
        alone, on_top = (
            run if isinstance(run, str) else ratio(spent, without, run)
            for run, without in ((one.alone, ()), (one.on_top, whole))
        )
        added.append(Added(one.technique, alone, on_top, rounds))
    loop.close()
    return added


@dataclass(frozen=True)
class SetUp:
    """An arm that had to be set up: the runs that have it, or why they are not measured.

    Attributes:
        technique: Its name.
        alone: The run with it and nothing else.
        on_top: The whole, and it.
    """

    technique: str
    alone: Combination | str
    on_top: Combination | str


def set_up(loop: AcceleratedLoop, arm: Arm, whole: Combination, may_take_s: float) -> SetUp:
    """Sets an arm up on top of the whole, where that costs no more than the seconds that it may take."""
    assert arm.setup is not None
    if (expected_s := arm.setup.expected_s()) > may_take_s:
        reason = f"left out for its cost: it would take about {expected_s:.0f} s"
        return SetUp(arm.name, reason, "")
    it = (arm.name, arm.choices[0])
    on_top = tuple(sorted((*whole, it)))
    loop.put(on_top, may_take_s)
    seconds = loop.setup_s[arm.name]
    if seconds is None:
        refused = set(loop.handle.report.refused(arm.name).values())
        reason = f"left out: {'; '.join(sorted(refused)) or 'nothing came of it'}"
        return SetUp(arm.name, reason, "")
    if not whole:
        return SetUp(arm.name, on_top, "")
    if 2 * seconds > may_take_s:  # what is compiled without the others' edits is compiled anew
        return SetUp(arm.name, f"left out for its cost: another {seconds:.0f} s", on_top)
    return SetUp(arm.name, (it,), on_top)


def ratio(spent: Mapping[Combination, Sequence[float]], first: Combination, second: Combination) -> Ratio:
    """How many times as long the first takes as the second."""
    return median_interval([a / b for a, b in zip(spent[first], spent[second], strict=True)])


def in_words(measured: Ratio | str) -> str:
    return measured if isinstance(measured, str) else "{:.3f}x [{:.3f}, {:.3f}]".format(*measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=NAMES, metavar=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=100, help="a model; five rounds at least")
    options, _ = parser.parse_known_args()
    rows: list[list[str]] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_ACCEL_CACHE"] = folder
        for name in options.models:
            for each in measured(name, options.seconds):
                rows.append(each.row(MODELS[name].title))
                print(" | ".join(rows[-1]), flush=True)
            torch.compiler.reset()
            print(f"after {time.perf_counter() - start:.0f} s", flush=True)
    given = f" --seconds {options.seconds:g}"
    given += "" if options.models == NAMES else f" --models {','.join(options.models)}"
    publish("techniques", f"python benchmarks/techniques.py{given}", COLUMNS, rows, by_machine=True)


if __name__ == "__main__":
    main()
