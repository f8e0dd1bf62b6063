"""What the trial of a part has measured, as plain figures: they travel with verdicts to reports and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The candidate beside the original, at one site; None is what was not measured.

    Attributes:
        error: The candidate's relative error.
        spread: What the original itself is off by, summed in other orders; of another number format, what rounding to
            it explains.
        is_same: Whether both gave the same numbers, to the bit.
        original_ms: Of a forward and a backward pass, in milliseconds.
        candidate_ms: The candidate's.
        original_bytes: Of memory that this is about: states of an optimizer, say.
        candidate_bytes: The candidate's.
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
        """How many spreads the candidate is off."""
        if self.is_same:
            return 0.0
        return None if self.error is None or not self.spread else self.error / self.spread

    def to_dict(self) -> dict[str, Any]:
        """What was measured, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Measurement:
        """What :meth:`to_dict` gave, in JSON too, where what is infinite is text; what is not known is passed over.

        Raises:
            TypeError, ValueError: A figure is no number.
        """
        known = {name: state[name] for name in cls.__dataclass_fields__ if state.get(name) is not None}
        figures: dict[str, Any] = {name: one if isinstance(one, int) else float(one) for name, one in known.items()}
        return cls(**figures)


def together(measured: Iterable[Measurement]) -> Measurement:
    """Of several sites: the error that is the most spreads, times and memory in their sums."""
    found = list(measured)
    errors = [one for one in found if one.error_spreads is not None]
    worst = max(errors, key=lambda one: math.inf if one.error_spreads is None else one.error_spreads, default=None)
    return Measurement(
        error=None if worst is None else worst.error,
        spread=None if worst is None else worst.spread,
        is_same=None if worst is None else all(one.is_same for one in errors),
        **_sums(found, "original_ms", "candidate_ms"),
        **_sums(found, "original_bytes", "candidate_bytes"),
    )


def finite(data: Any, instead: Callable[[float], Any] = lambda value: None) -> Any:
    """Plain values as JSON has them, with something ``instead`` of infinity and NaN, which it does not know."""
    if isinstance(data, Mapping):
        return {str(key): finite(value, instead) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value, instead) for value in data]
    return instead(data) if isinstance(data, float) and not math.isfinite(data) else data


def _sums(found: Iterable[Measurement], original: str, candidate: str) -> dict[str, Any]:
    """Of those that have both."""
    pairs = [(getattr(one, original), getattr(one, candidate)) for one in found]
    whole = [pair for pair in pairs if None not in pair]
    return dict(zip((original, candidate), map(sum, zip(*whole, strict=True)), strict=True)) if whole else {}
