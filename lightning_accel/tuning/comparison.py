"""One comparison of two ways to run a training step: whose turn it is, the times of the turns, and the result."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_accel.experiment.pair_schedule import Schedule
from lightning_accel.experiment.pair_test import PairTest, RatioInterval

Choices = Mapping[str, str]
"""Arm → its choice. Arms that are not named are off."""

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

MEMORY_RISE = 0.02
"""If peak memory grows by this share or more, the candidate has to win time for it."""

LEAST_RISE_BYTES = 16 << 20
"""Bytes. A smaller difference in memory may occur between two equal steps."""

_DELAYED = 3  # so many times what most turns take more is what others have delayed, where they delay the original too:
_SHOWN_BY = 20  # so many of its turns show that
_LOOKS = 3  # at the peak, of each side

WORTH_MEMORY = math.log(1.1)
"""The time that an arm has to win for more memory, as the log of a ratio."""


@dataclass(frozen=True)
class Turn:
    """One turn: a training step, or all steps between two steps of the optimizer.

    Attributes:
        choices: How it runs.
        side: 0 for the original, 1 for the candidate.
        pair: Which pair it is one half of; None: it only pays for a switch, and is not counted.
    """

    choices: Choices
    side: int = 0
    pair: int | None = None


@dataclass(frozen=True)
class Result:
    """How a comparison ended, in plain values, for checkpoints and JSON.

    Attributes:
        name: What was compared.
        verdict: In a word or two.
        interval: How many times as fast the candidate is as the original, and how sure that is.
        turns: How many turns were counted.
        original: What was chosen for one side.
        candidate: And for the other.
        peak_bytes: The most memory that a turn of either has held; empty where that was not seen.
    """

    name: str
    verdict: Verdict
    interval: RatioInterval
    turns: int
    original: dict[str, str] = field(default_factory=dict)
    candidate: dict[str, str] = field(default_factory=dict)
    peak_bytes: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Result:
        """Reads what :func:`dataclasses.asdict` has written, directly or through JSON.

        Raises:
            KeyError, TypeError: It did not.
        """
        plain = {"interval": RatioInterval(**state["interval"]), "peak_bytes": tuple(state["peak_bytes"])}
        return cls(**{**state, **plain})

    @property
    def is_won(self) -> bool:
        return self.verdict == "faster"


class ArmComparison:
    """Compares an original with a candidate, in pairs of turns.

    Args:
        name: Of the arm, or of the whole plan.
        original: How a step runs that everybody falls back to.
        candidate: How it runs otherwise.
        settle: Turns after a switch that are not counted.
        schedule: Decides in which order the sides of each pair run.
        test: What judges its pairs; one that was begun earlier, of the same two sides, goes on.
        max_pairs: After so many nothing can be told, unless the candidate is about to win.
        most_pairs: After so many in no case.
        allowance: What the candidate may cost, in turns of a plain run.
        original_gain: How many times as fast as a plain run the original is: only what is slower than plain costs.
        has_setup: Whether the candidate's first turn sets something up, after which another one fills the caches.
    """

    def __init__(
        self,
        name: str,
        original: Choices,
        candidate: Choices,
        *,
        settle: int,
        schedule: Schedule,
        test: PairTest,
        max_pairs: int,
        most_pairs: int,
        allowance: float,
        original_gain: float = 1.0,
        has_setup: bool = False,
    ) -> None:
        self.name = name
        self.original, self.candidate = original, candidate
        self._sides = original, candidate
        self._settle = settle
        self._max_pairs, self._most_pairs = max_pairs, most_pairs
        self._allowance, self._original_gain = allowance, original_gain
        self._has_setup = has_setup
        self._test = test
        self._first_pair = len(self._test)
        self._length = 1 + settle  # turns of a side in a row: the dearer the switch, the more
        self._halves: dict[int, tuple[list[float | None], list[float | None]]] = {}
        self._uncounted: list[float] = []  # of the candidate
        self._excess: list[float] = []  # of its turns over a plain one, in these
        self._original_s: list[float] = []  # of the original's
        self._charged = 0.0
        self._turns = self._all_turns(schedule)
        self._peaks: dict[int, int] = {}
        self._looks = [0, 0]  # at them, of each side
        self._failure: Verdict | None = None

    def next_turn(self) -> Turn:
        """Whose turn it is."""
        return next(self._turns)

    def _all_turns(self, schedule: Schedule) -> Iterator[Turn]:
        side = 0
        for side in (0, 1):  # for the first time: caches fill, kernels are chosen, memory is found
            for _ in range(1 + self._settle + side * self._has_setup):
                yield Turn(self._sides[side], side)
        for pair in itertools.count(self._first_pair):
            for here in schedule.order((0, 1)):
                if here != side:
                    for _ in range(self._settle):
                        yield Turn(self._sides[here], here)
                side = here
                for _ in range(self._length):
                    yield Turn(self._sides[here], here, pair)

    def took(self, turn: Turn, seconds: float | None) -> bool:
        """Takes the time of a turn; None if something else came in between. Returns whether a pair is complete."""
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
        self._test.add(original, statistics.fmean(candidates))
        plain = original * self._original_gain
        self._excess += [each / plain - 1 for each in candidates]
        self._excess += [max(0.0, each / plain - 1) for each in self._uncounted]
        self._uncounted = []
        return True

    def peaked(self, turn: Turn, peak_bytes: int) -> None:
        """Takes the peak memory of a turn. The latest one counts: it makes nothing for the first time."""
        self._peaks[turn.side] = peak_bytes
        self._looks[turn.side] += 1

    def needs_peak(self, turn: Turn) -> bool:
        """Whether to measure the memory of a turn: of some that are not timed, since it takes time."""
        return turn.pair is None and self._looks[turn.side] < _LOOKS

    def failed(self, verdict: Verdict) -> None:
        """Ends the comparison: the candidate cannot run."""
        self._failure = verdict

    @property
    def cost(self) -> float:
        """The cost of the candidate, in turns of a plain run.

        Where others delay some turns, hooks of the user's say, the original has turns that are as long: in a while.
        """
        if not self._excess:
            return 0.0
        longest = max(self._original_s) / statistics.median(self._original_s) - 1
        is_ours = longest if len(self._original_s) >= _SHOWN_BY else math.inf
        usual = max(1.0, _DELAYED * statistics.median(self._excess))
        return sum(excess if excess > is_ours else min(excess, usual) for excess in self._excess)

    def charge(self) -> float:
        """The growth of that cost since the last charge; negative if the candidate is faster than plain."""
        more = self.cost - self._charged
        self._charged += more
        return more

    @property
    def gain_s(self) -> float:
        """The mean seconds that a turn of the candidate saves against the original."""
        return self._test.gain_s

    @property
    def raises_memory(self) -> bool:
        if len(self._peaks) < 2:
            return False
        return self._peaks[1] - self._peaks[0] > max(MEMORY_RISE * self._peaks[0], LEAST_RISE_BYTES)

    def result(self) -> Result | None:
        """The result; None while the comparison goes on."""
        verdict = self._verdict()
        turns = 2 * self._length * len(self._test)
        if verdict is None:
            return None
        peaks = (self._peaks[0], self._peaks[1]) if len(self._peaks) == 2 else ()
        return Result(
            self.name, verdict, self._test.interval(), turns, dict(self.original), dict(self.candidate), peaks
        )

    def _verdict(self) -> Verdict | None:
        if self._failure is not None:
            return self._failure
        self._test.worth = WORTH_MEMORY if self.raises_memory else 0.0
        outcome = self._test.outcome()
        if outcome == "not faster" and self.raises_memory:
            return "needs more memory"
        if outcome:
            return outcome
        # Without the dearest turn: one with a hiccup in it may take longer than all the others.
        cost = self.cost - max(0.0, *self._excess, 0.0)
        if len(self._test) > self._first_pair and cost > self._allowance * (1 + self._test.is_mostly_faster):
            return "too dear to try on"
        most = self._most_pairs if self._test.is_promising else self._max_pairs
        return "cannot tell" if len(self._test) >= most else None
