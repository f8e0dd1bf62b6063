"""One comparison of two ways to run a training step: the order of turns, their times, and the result."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_accel.experiment.pair_schedule import Schedule
from lightning_accel.experiment.pair_test import PairTest, RatioInterval, price_of_memory

Choices = Mapping[str, str]
"""Arm → its choice. Arms that are missing are off."""

Verdict = Literal[
    "faster",
    "not faster",
    "cannot tell",
    "needs more memory",
    "out of memory",
    "raised an error",
    "too dear to try on",
    "refused in its trial",
]

_DELAYED = 3  # an excess above this many medians counts as a delay by other code, if the original has such delays:
_SHOWN_BY = 20  # turns of the original that can show its delays
_LOOKS = 3  # measurements of peak memory for each side


@dataclass(frozen=True)
class Turn:
    """One turn: a training step, or all steps between two steps of the optimizer."""

    choices: Choices  # the choices with which it runs
    side: int = 0  # 0 for the original, 1 for the candidate
    pair: int | None = None  # the number of its pair; None if the turn only absorbs a switch and does not count


@dataclass(frozen=True)
class Result:
    """The result of a comparison, in plain values, for checkpoints and JSON."""

    name: str  # the name of the comparison
    verdict: Verdict
    interval: RatioInterval  # the candidate's speed as a multiple of the original's
    turns: int  # the number of turns that counted
    original: dict[str, str] = field(default_factory=dict)  # the choices of one side
    candidate: dict[str, str] = field(default_factory=dict)  # the choices of the other side
    peak_bytes: tuple[int, ...] = ()  # the peak memory of a turn of each side; empty if not measured

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Result:
        """Makes a result from the output of :func:`dataclasses.asdict`, directly or through JSON.

        Raises:
            KeyError, TypeError: The state has another form.
        """
        plain = {"interval": RatioInterval(**state["interval"]), "peak_bytes": tuple(state["peak_bytes"])}
        return cls(**{**state, **plain})

    @property
    def is_won(self) -> bool:
        return self.verdict == "faster"


@dataclass(eq=False, kw_only=True)
class ArmComparison:
    """Compares an original with a candidate, in pairs of turns."""

    name: str
    original: Choices
    candidate: Choices
    test: PairTest  # may be one of the same two sides that was begun earlier
    settle: int  # turns after a switch that are not counted
    schedule: Schedule
    max_pairs: int  # pairs after which the result is open, unless the candidate is about to win
    most_pairs: int  # pairs after which the result is open in any case
    allowance: float  # the largest cost of the candidate, in turns of a plain run
    original_gain: float = 1.0  # the original's speed over plain: only turns slower than plain cost
    has_setup: bool = False  # whether the candidate's first turn has a setup; another one then fills the caches

    def __post_init__(self) -> None:
        self._first_pair = len(self.test)
        self._length = 1 + self.settle  # counted turns of a side in a row: more if a switch is expensive
        self._halves: dict[int, tuple[list[float | None], list[float | None]]] = {}
        self._uncounted: list[float] = []  # seconds of the candidate's turns that do not count
        self._excess: list[float] = []  # extra time of its turns over a plain turn, in plain turns
        self._original_s: list[float] = []  # seconds of the original's turns
        self._charged = 0.0
        self.turns = self._all_turns()
        self._peaks: dict[int, int] = {}
        self._looks = [0, 0]  # measurements of peak memory for each side
        self.failure: Verdict | None = None  # why the candidate cannot run, which ends the comparison

    def _all_turns(self) -> Iterator[Turn]:
        sides, side = (self.original, self.candidate), 0
        for side in (0, 1):  # first turns: caches fill, kernels are chosen, memory is allocated
            for _ in range(1 + self.settle + side * self.has_setup):
                yield Turn(sides[side], side)
        for pair in itertools.count(self._first_pair):
            for here in self.schedule.order((0, 1)):
                if here != side:
                    for _ in range(self.settle):
                        yield Turn(sides[here], here)
                side = here
                for _ in range(self._length):
                    yield Turn(sides[here], here, pair)

    def took(self, turn: Turn, seconds: float | None) -> bool:
        """Adds the time of a turn. ``seconds`` is None if it was interrupted. Returns whether a pair is complete."""
        if turn.pair is None:
            if turn.side == 1 and seconds is not None:
                self._uncounted.append(seconds)
            return False
        halves = self._halves.setdefault(turn.pair, ([], []))
        halves[turn.side].append(seconds)
        if any(len(half) < self._length for half in halves):
            return False
        del self._halves[turn.pair]
        candidates = [each for each in halves[1] if each is not None]
        originals = [each for each in halves[0] if each is not None]
        if not (candidates and originals):
            return False
        original = statistics.fmean(originals)
        self._original_s += originals
        self.test.add(original, statistics.fmean(candidates))
        plain = original * self.original_gain
        self._excess += [each / plain - 1 for each in candidates]
        self._excess += [max(0.0, each / plain - 1) for each in self._uncounted]
        self._uncounted = []
        return True

    def peaked(self, turn: Turn, peak_bytes: int) -> None:
        """Sets a side's peak memory from a turn. The latest turn counts, since it initialises nothing."""
        self._peaks[turn.side] = peak_bytes
        self._looks[turn.side] += 1

    def needs_peak(self, turn: Turn) -> bool:
        """Returns whether to measure the memory of a turn: in a few turns that do not count, since it takes time."""
        return turn.pair is None and self._looks[turn.side] < _LOOKS

    @property
    def cost(self) -> float:
        """Returns the cost of the candidate, in turns of a plain run.

        If other code, such as the user's hooks, delays some turns, some of the original's turns become as long.
        """
        if not self._excess:
            return 0.0
        longest = max(self._original_s) / statistics.median(self._original_s) - 1
        is_ours = longest if len(self._original_s) >= _SHOWN_BY else math.inf
        usual = max(1.0, _DELAYED * statistics.median(self._excess))
        return sum(excess if excess > is_ours else min(excess, usual) for excess in self._excess)

    def charge(self) -> float:
        """Returns the growth of the cost since the last charge; negative if the candidate is faster than plain."""
        more = self.cost - self._charged
        self._charged += more
        return more

    def result(self) -> Result | None:
        """Returns the result; None while the comparison goes on."""
        peaks = (self._peaks[0], self._peaks[1]) if len(self._peaks) == 2 else ()
        verdict = self.failure or self._verdict(price_of_memory(*peaks) if peaks else 0.0)
        if verdict is None:
            return None
        turns = 2 * self._length * len(self.test)
        return Result(self.name, verdict, self.test.interval(), turns, dict(self.original), dict(self.candidate), peaks)

    def _verdict(self, worth: float) -> Verdict | None:
        self.test.worth = worth
        outcome = self.test.outcome()
        if outcome == "not faster" and worth:
            return "needs more memory"
        if outcome:
            return outcome
        # Without the longest turn: a single hiccup may take longer than all other turns.
        cost = self.cost - max(0.0, *self._excess, 0.0)
        if len(self.test) > self._first_pair and cost > self.allowance * (1 + self.test.is_mostly_faster):
            return "too dear to try on"
        most = self.most_pairs if self.test.is_promising else self.max_pairs
        return "cannot tell" if len(self.test) >= most else None
