"""The measurements of a trial as plain numbers. Verdicts carry them to reports and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measurements of candidate and original at one site. None means not measured.

    Attributes:
        error: The candidate's relative error.
        spread: The original's own error when it sums in other orders. For another number format, the error that
            rounding to that format explains.
        is_same: Whether both results are bitwise equal.
        original_ms: Milliseconds of the original's forward and backward pass.
        candidate_ms: Milliseconds of the candidate's.
        original_bytes: The memory that the technique is about, such as optimizer states, in bytes.
        candidate_bytes: The same for the candidate.
    """

    error: float | None = None
    spread: float | None = None
    is_same: bool | None = None
    original_ms: float | None = None
    candidate_ms: float | None = None
    original_bytes: int | None = None
    candidate_bytes: int | None = None

    @property
    def error_spreads(self) -> float | None:
        """The candidate's error as a multiple of the spread; None if unknown."""
        if self.is_same:
            return 0.0
        return None if self.error is None or not self.spread else self.error / self.spread

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Measurement:
        """Reads what :meth:`to_dict` returned, also from JSON, where infinity is text. Ignores unknown names.

        Raises:
            TypeError, ValueError: A value is not a number.
        """
        known = {name: state[name] for name in cls.__dataclass_fields__ if state.get(name) is not None}
        figures: dict[str, Any] = {name: one if isinstance(one, int) else float(one) for name, one in known.items()}
        return cls(**figures)


def together(measured: Iterable[Measurement]) -> Measurement:
    """Combines several sites: the error with the most spreads, and the sums over the sites that have both figures."""
    found = list(measured)
    errors = [one for one in found if one.error_spreads is not None]
    worst = max(errors, key=lambda one: one.error_spreads or 0.0, default=Measurement())
    are_same = all(one.is_same for one in errors) if errors else None
    sums: dict[str, Any] = {}
    for names in (("original_ms", "candidate_ms"), ("original_bytes", "candidate_bytes")):
        pairs = [(getattr(one, names[0]), getattr(one, names[1])) for one in found]
        if whole := [pair for pair in pairs if None not in pair]:
            sums |= zip(names, map(sum, zip(*whole, strict=True)), strict=True)
    return Measurement(error=worst.error, spread=worst.spread, is_same=are_same, **sums)


def finite(data: Any, instead: Callable[[float], Any] = lambda value: None) -> Any:
    """Converts plain values for JSON, with ``instead(value)`` for infinity and NaN, which JSON lacks."""
    if isinstance(data, Mapping):
        return {str(key): finite(value, instead) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value, instead) for value in data]
    return instead(data) if isinstance(data, float) and not math.isfinite(data) else data
