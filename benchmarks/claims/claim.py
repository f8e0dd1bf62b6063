"""What a claim is, what a figure is, and the rule by which figures become a verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["holds", "holds when", "no longer holds"]
Unit = Literal["x", "%", "error"]

RULE = (
    "A figure is the median of what interleaved rounds gave, with a 95% bootstrap interval; what is counted (bytes,"
    " errors) has none. *At least* a number is met where the interval reaches it and the median comes within a tenth of"
    " it, *at most* likewise from above, *about* where the interval comes within a tenth; where no number was claimed,"
    " *more than* takes an interval that lies above as a whole. A claim **holds** where all of"
    " its figures meet it, **no longer holds** where none does, and in between **holds when** the conditions that are"
    " named are given, or those after *not* are not. Figures without a claimed number are there to compare with."
)

_NEAR = 1.1


class NotHereError(Exception):
    """A row, or one of its conditions, needs what this machine does not have; says what."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What was promised.

    Attributes:
        row: Its number in the table of claims.
        text: The claim.
        claimed: The numbers, as the articles give them.
        why: Outcome → the one reason for it, which has to be true on any machine that comes to this outcome.
    """

    row: int
    text: str
    claimed: str
    why: Mapping[Outcome, str]


def claim_in(text: str | None, *, row: int) -> Claim:
    """The claim that a row's docstring states.

    Args:
        text: What was promised, and lines ``Claimed: ...``, ``Holds: ...``, ``Holds when: ...`` and ``No longer holds:
            ...``, going on in lines that are indented; others are for readers alone.
        row: As of a claim.

    Raises:
        ValueError: Python has left docstrings out.
    """
    if text is None:
        raise ValueError("claims stand in docstrings, which python -OO and PYTHONOPTIMIZE=2 leave out. Run without.")
    about, _, more = text.partition(".\n")
    found = {name: " ".join(said.split()) for name, said in re.findall(r"^(\w[\w ]*): (.*(?:\n {4}.*)*)", more, re.M)}
    why: dict[Outcome, str] = {outcome: found[outcome.capitalize()] for outcome in get_args(Outcome)}
    return Claim(row=row, text=about, claimed=found["Claimed"], why=why)


@dataclass(frozen=True)
class Target:
    """What a figure has to reach for the claim to hold.

    Attributes:
        kind: How the figure's interval is compared with the number; see :data:`RULE`.
        number: In the figure's unit.
    """

    kind: Literal["at least", "at most", "about", "more than"]
    number: float

    def is_met(self, median: float, low: float, high: float) -> bool:
        """Whether a figure with this median, whose interval goes from ``low`` to ``high``, meets the claim."""
        least, most = self.number / _NEAR, self.number * _NEAR
        if self.kind == "at least":
            return high >= self.number and median >= least
        if self.kind == "at most":
            return low <= self.number and median <= most
        if self.kind == "more than":
            return low > self.number
        return low <= most and high >= least


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number, measured under one condition.

    Attributes:
        condition: In words that may follow "holds when": ``"L = 1024"``, ``"the whole training step is timed"``.
        value: The median, or what was counted.
        low: Where its 95% interval begins; ``value`` where it was counted.
        high: Where it ends.
        unit: ``"x"``: a ratio; ``"%"``: a share, 0 to 1; ``"error"``: a relative error.
        target: What the claim says of it; None: it is there to compare with.
        note: What else is to be known, in a few words: the times behind a ratio.
    """

    condition: str
    value: float
    low: float
    high: float
    unit: Unit = "x"
    target: Target | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether it meets the claim; None where nothing is claimed of it."""
        return None if self.target is None else self.target.is_met(self.value, self.low, self.high)


@dataclass(frozen=True)
class Missing:
    """A condition that could not be measured here.

    Attributes:
        condition: As of a figure.
        reason: What is missing, with the mend.
    """

    condition: str
    reason: str


def counted(condition: str, value: float, unit: Unit, target: Target | None = None, note: str = "") -> Figure:
    """A figure that does not vary: bytes, an error."""
    return Figure(condition=condition, value=value, low=value, high=value, unit=unit, target=target, note=note)


def verdict_of(figures: Sequence[Figure]) -> tuple[Outcome | None, str]:
    """The verdict by :data:`RULE`.

    Returns:
        The outcome, None where no figure has a target; and the verdict in words, with the conditions where need be.
    """
    judged = [figure for figure in figures if figure.target is not None]
    met = [figure.condition for figure in judged if figure.is_met]
    missed = [figure.condition for figure in judged if not figure.is_met]
    if not judged:
        return None, "not measured here"
    if not missed:
        return "holds", "holds"
    if not met:
        return "no longer holds", "no longer holds"
    conditions = "; ".join(met) if len(met) <= len(missed) else f"not: {'; '.join(missed)}"
    return "holds when", f"holds when {conditions}"
