"""The rounds of :mod:`rivals`: in each, every side of every model once, in processes that take turns."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from _rivals_cases import CASES
from _rivals_sides import COMPILES_S, SIDES
from _rivals_turns import Turns

from lightning_accel.core.host import Host

MARKS = (100, 1_000, 10_000)
USUAL_STEPS = 1_000
LAST_LOSSES = 20
MOST_BATCHES = {"cpu": 256, "cuda": 64}
STARTS_S = 9.0  # a process, with its imports
TURN = 20  # steps: short beside what slows a machine down, long beside what fills the processor's caches again


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured.

    Attributes:
        pythons: The interpreter of a side; others have this process's.
        limit_s: After so many seconds of training a run is cut off.
    """

    models: Sequence[str]
    sides: Sequence[str]
    steps: int
    rounds: int
    device: str = "cpu"
    pythons: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 300.0

    @property
    def marks(self) -> list[int]:
        """After so many steps the time is told: the powers of ten that there are, and the end."""
        return sorted({mark for mark in MARKS if mark < self.steps} | {self.steps})

    def estimate_s(self) -> float:
        """About how long all of it takes."""
        models_s = sum(CASES[name].sizes[self.device].step_ms for name in self.models) / 1e3 * self.steps
        sides = [side for round_ in range(self.rounds) for side in self.sides_of(round_)]
        runs = [side for side in sides for _ in range(SIDES[side].runs)]
        return models_s * len(runs) + len(self.models) * sum(SIDES[side].setup_s + STARTS_S for side in runs)

    def sides_of(self, round_: int) -> list[str]:
        """The sides of a round. What compiles for a minute is measured in the first one only."""
        return [side for side in self.sides if round_ == 0 or SIDES[side].setup_s < COMPILES_S]


def add_choices(parser: argparse.ArgumentParser, sides: Sequence[str]) -> None:
    """Adds ``--models``, ``--sides``, ``--steps``, ``--rounds``; names that do not exist end the program.

    Args:
        parser: Of the program.
        sides: That are measured where none is named.
    """

    def of(known: Mapping[str, Any]) -> Callable[[str], list[str]]:
        def names(text: str) -> list[str]:
            if unknown := {*text.split(",")} - {*known}:
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: there are {', '.join(known)}")
            return text.split(",")

        return names

    parser.add_argument("--models", type=of(CASES), default=list(CASES), metavar=",".join(CASES))
    parser.add_argument("--sides", type=of(SIDES), default=list(sides), metavar=",".join(SIDES))
    parser.add_argument("--steps", type=int, default=USUAL_STEPS)
    parser.add_argument("--rounds", type=int, default=1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one process has measured.

    Attributes:
        steps: That it came to; fewer than asked for if its time was over.
        after_s: Seconds after as many steps as are told, all that came before them in it but for imports.
        step_ms: Of the last quarter.
        peak_mib: Of the process, or of what torch held on the GPU.
        first_loss: Of the first step.
        last_loss: The mean of the last steps.
        imports_s: Of torch and the tool's packages.
        torch: Its version.
        report: What the tool says of itself.
    """

    steps: int
    after_s: dict[str, float]
    step_ms: float
    peak_mib: float
    first_loss: float
    last_loss: float
    imports_s: float
    torch: str
    report: str = ""


Found = dict[str, dict[str, list[Run]]]  # by model and side, a run for each round that had one


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that there is so far, and what could not be measured: why, by side, or by model and side."""

    options: Options
    found: Found = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def details(self) -> dict[str, Any]:
        runs = {
            name: {side: [asdict(run) for run in each] for side, each in of.items()} for name, of in self.found.items()
        }
        return {"steps": self.options.steps, "rounds": self.options.rounds, "missing": self.missing, "runs": runs}


def measure(options: Options) -> Iterator[Measured]:
    """What is measured, after every run anew."""
    so_far = Measured(options=options)
    has_bf16 = bool(Host.detect(options.device).native_bf16)
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(options.rounds):
            for name in random.sample(list(options.models), len(options.models)):
                if CASES[name].needs and CASES[name].needs in so_far.missing:
                    continue
                data = Path(folder) / f"{name}.pt"
                if not data.exists() and not _made(name, options, data, so_far):
                    continue
                asked = {"case": name, "data": str(data), "has_bf16": has_bf16, "device": options.device}
                asked |= {"steps": options.steps, "marks": _waits(options), "limit_s": options.limit_s}
                asked |= {"turn": TURN if options.device == "cpu" else 0}  # a GPU keeps its speed, and has less memory
                sides = [side for side in options.sides_of(round_) if not {side, f"{name}, {side}"} & {*so_far.missing}]
                for side, answer in _in_turns([Turns(side, asked, options.pythons.get(side)) for side in sides]):
                    _add(so_far, name, side, answer)
                    print(f"{name}, {side}: {_in_words(so_far, name, side)}", flush=True)
                    yield so_far


def _in_turns(sides: Sequence[Turns]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each side has measured, or why there is nothing; as soon as it has ended."""
    with ExitStack() as processes:
        waiting = [processes.enter_context(side) for side in sides]
        while waiting:
            for side in random.sample(waiting, len(waiting)):
                if (answer := side.turn()) is not None:
                    waiting.remove(side)
                    yield side.side, answer


def _made(name: str, options: Options, data: Path, so_far: Measured) -> bool:
    """Writes the first weights and the batches, which all sides read, if the model's package is there."""
    try:
        net, batches = CASES[name].built(options.device, min(options.steps, MOST_BATCHES[options.device]))
    except ImportError as error:
        so_far.missing[CASES[name].title] = str(error)
        return False
    torch.save((net.state_dict(), batches), data)
    return True


def _add(so_far: Measured, name: str, side: str, answer: dict[str, Any]) -> None:
    if "absent" in answer:
        so_far.missing[side] = answer["absent"]
    elif "failed" in answer:
        so_far.missing[f"{name}, {side}"] = answer["failed"]
    else:
        so_far.found.setdefault(name, {}).setdefault(side, []).append(summed_up(answer, so_far.options))


def _in_words(so_far: Measured, name: str, side: str) -> str:
    why = so_far.missing.get(side) or so_far.missing.get(f"{name}, {side}")
    if why:
        return f"not measured: {why}"
    run = so_far.found[name][side][-1]
    after = ", ".join(f"{seconds:.1f} s after {mark}" for mark, seconds in run.after_s.items()) or "cut off"
    return f"{run.step_ms:.1f} ms a step, {after}, loss {run.last_loss:.4f}"


def summed_up(answer: Mapping[str, Any], options: Options) -> Run:
    at_s, losses = answer["at_s"], answer["losses"]
    quarter = at_s[-(len(at_s) // 4 + 1) :]
    between = [after - before for before, after in itertools.pairwise(quarter)] or [at_s[-1]]
    # On a GPU steps are begun before others have ended: their mean is right between two waits.
    typical = statistics.fmean if options.device == "cuda" else statistics.median
    return Run(
        steps=len(at_s),
        after_s={str(mark): at_s[mark - 1] for mark in options.marks if mark <= len(at_s)},
        step_ms=1e3 * typical(between),
        peak_mib=answer["peak_mib"],
        first_loss=losses[0],
        last_loss=statistics.fmean(losses[-LAST_LOSSES:]),
        imports_s=answer["imports_s"],
        torch=answer["torch"],
        report=answer.get("report", ""),
    )


def _waits(options: Options) -> list[int]:
    return sorted({*options.marks, options.steps - options.steps // 4})
