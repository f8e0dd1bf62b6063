"""Two runs that took turns, put beside each other: ratios round by round, and what they amount to in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from _turns import Outcome

if TYPE_CHECKING:
    from lightning_accel.callbacks import EpochSpeed

_SAME = 0.03  # two runs of the same thing differ by as much
_NEARLY_ALL = 0.9  # of the rounds have to agree before one side is called faster


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table.

    Attributes:
        title: What was measured.
        plain: The median over the rounds, or what was measured at the end, as it is printed.
        accelerated: Likewise.
        ratio: The median of the rounds' ratios, or the change; empty where there is none to give.
        spread: The least and the largest ratio of a round; empty where rounds have none.
    """

    title: str
    plain: str
    accelerated: str
    ratio: str = ""
    spread: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What there is to say of one model.

    Attributes:
        lines: Of the table.
        verdict: In a sentence, which says so where nothing is gained.
    """

    lines: tuple[Line, ...]
    verdict: str


def compare(rounds: Sequence[tuple[EpochSpeed, EpochSpeed]], plain: Outcome, accelerated: Outcome) -> Comparison:
    """Puts the plain run beside the accelerated one.

    Args:
        rounds: What (plain, accelerated) measured, of every round that counts.
        plain: What the plain run has come to.
        accelerated: What the accelerated one has.
    """
    lines = [
        _line("samples/s", rounds, "samples_per_sec", 1),
        _line("step p50, ms", rounds, "step_ms_p50", 1),
        _line("peak memory, MiB", rounds, "peak_memory_mib", 0),
        Line(title="loss before", plain=f"{plain.first_loss:.3f}", accelerated=f"{accelerated.first_loss:.3f}"),
        Line(
            title="loss after",
            plain=f"{plain.final_loss:.3f}",
            accelerated=f"{accelerated.final_loss:.3f}",
            ratio=f"{accelerated.final_loss / plain.final_loss - 1:+.1%}",
        ),
    ]
    before, after = plain.final_accuracy, accelerated.final_accuracy
    if before is not None and after is not None:
        change = f"{100 * (after - before):+.1f} points"
        lines.append(Line(title="accuracy", plain=f"{before:.1%}", accelerated=f"{after:.1%}", ratio=change))
    speed, memory = (ratios(rounds, field) for field in ("samples_per_sec", "peak_memory_mib"))
    return Comparison(lines=tuple(lines), verdict=f"{speed_words(speed)}; {memory_words(memory)}")


def ratios(rounds: Sequence[tuple[EpochSpeed, EpochSpeed]], field: str) -> list[float]:
    """Accelerated over plain, of every round."""
    return [getattr(fast, field) / getattr(plain, field) for plain, fast in rounds]


def _line(title: str, rounds: Sequence[tuple[EpochSpeed, EpochSpeed]], field: str, digits: int) -> Line:
    plain, fast = (statistics.median(getattr(side, field) for side in sides) for sides in zip(*rounds, strict=True))
    found = ratios(rounds, field)
    return Line(
        title=title,
        plain=f"{plain:.{digits}f}",
        accelerated=f"{fast:.{digits}f}",
        ratio=f"{statistics.median(found):.2f}x",
        spread=f"{min(found):.2f} to {max(found):.2f}",
    )


def speed_words(found: Sequence[float]) -> str:
    """What ratios of speed amount to: more than noise, and in nearly every round, or nothing."""
    median, faster, slower = _direction(found)
    counted = f"{median:.2f}x the speed"
    if faster:
        return f"faster in {sum(ratio > 1 for ratio in found)} of {len(found)} rounds ({counted})"
    if slower:
        return f"SLOWER here in {sum(ratio < 1 for ratio in found)} of {len(found)} rounds ({counted})"
    return f"no faster here ({counted}, {min(found):.2f} to {max(found):.2f})"


def memory_words(found: Sequence[float]) -> str:
    """What ratios of memory amount to."""
    median, more, less = _direction(found)
    if less:
        return f"{median:.2f}x the memory"
    return f"MORE memory here ({median:.2f}x)" if more else f"no less memory here ({median:.2f}x)"


def _direction(found: Sequence[float]) -> tuple[float, bool, bool]:
    """The median, whether it is clearly above one, whether it is clearly below."""
    median: float = statistics.median(found)
    enough = _NEARLY_ALL * len(found)
    above = median > 1 + _SAME and sum(ratio > 1 for ratio in found) >= enough
    below = median < 1 - _SAME and sum(ratio < 1 for ratio in found) >= enough
    return median, above, below
