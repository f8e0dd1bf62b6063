"""The tables of :mod:`rivals`: of all sides, of the verdicts, and of what each side asks of its user."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from _rivals_cases import CASES
from _rivals_rounds import Measured, Run
from _rivals_sides import AGAIN, EXPERT, OURS, PLAIN, SIDES

LEAST = 0.97  # of the best side's speed over all steps
# Beside the best side: what an expert gets out of the same Trainer, and what costs its user one line.
ALSO_BESIDE = [EXPERT, *(name for name, side in SIDES.items() if side.is_one_line and not name.startswith(OURS))]
ASKS_COLUMNS = ("", "lines of yours", "keeps Lightning's Trainer", "checked by itself", "what can be undone")


def columns(measured: Measured) -> list[str]:
    after = [f"{mark:,} steps, s" for mark in measured.options.marks]
    return [
        *("", "side", "settled step, ms", "settled speed", *after, "speed over all", "least to most"),
        *("peak, MiB", "loss at the end", "of plain's"),
    ]


def rows(measured: Measured) -> list[list[str]]:
    """Of every model with every side that there is."""
    return [_row(measured, name, side) for name in CASES for side in SIDES if measured.found.get(name, {}).get(side)]


def _row(measured: Measured, name: str, side: str) -> list[str]:
    runs = measured.found[name][side]
    after = [
        _seconds([run.after_s[str(mark)] for run in runs if str(mark) in run.after_s])
        for mark in measured.options.marks
    ]
    loss, of_plain = _loss(measured, name, side), _loss(measured, name, PLAIN)
    return [
        CASES[name].title,
        SIDES[side].title,
        f"{statistics.median(run.step_ms for run in runs):.1f}",
        settled(measured, name, side, PLAIN),
        *after,
        *over(measured, name, side, PLAIN),
        f"{statistics.median(run.peak_mib for run in runs):,.0f}",
        "" if loss is None else f"{loss:.4f}",
        "" if loss is None or of_plain is None else f"{loss / of_plain:.3f}",
    ]


def _loss(measured: Measured, name: str, side: str) -> float | None:
    """At the end of all steps; None if no run came to it."""
    ended = [run.last_loss for run in measured.found[name].get(side, []) if run.steps == measured.options.steps]
    return statistics.median(ended) if ended else None


def _seconds(found: Sequence[float]) -> str:
    return f"{statistics.median(found):,.1f}" if found else "cut off"


def ratios(measured: Measured, name: str, side: str, other: str) -> list[float]:
    """How many times as fast as another a side was over all steps, by rounds; none where one was cut off."""
    last = str(measured.options.steps)
    return [
        theirs.after_s[last] / own.after_s[last]
        for own, theirs in _pairs(measured, name, side, other)
        if {last} <= own.after_s.keys() & theirs.after_s.keys()
    ]


def settled(measured: Measured, name: str, side: str, other: str) -> str:
    """How many times as fast as another a side was once both had settled; empty where one is not there."""
    found = [theirs.step_ms / own.step_ms for own, theirs in _pairs(measured, name, side, other)]
    return f"{statistics.median(found):.2f}x" if found else ""


def _pairs(measured: Measured, name: str, side: str, other: str) -> list[tuple[Run, Run]]:
    sides = measured.found.get(name, {})
    return list(zip(sides.get(side, []), sides.get(other, []), strict=False))


def over(measured: Measured, name: str, side: str, other: str) -> tuple[str, str]:
    found = ratios(measured, name, side, other)
    if not found:
        return "", ""
    return f"{statistics.median(found):.2f}x", f"{min(found):.2f} to {max(found):.2f}"


def best_other(measured: Measured, name: str) -> str | None:
    """The side that took the least time over all steps, ours left out; None if none came to the end."""
    last = str(measured.options.steps)
    taken = {
        side: statistics.median(run.after_s[last] for run in runs if last in run.after_s)
        for side, runs in measured.found.get(name, {}).items()
        if not side.startswith(OURS) and any(last in run.after_s for run in runs)
    }
    return min(taken, key=taken.__getitem__, default=None)


def best_settled(measured: Measured, name: str) -> str:
    """The side whose settled steps take the least time, ours left out."""
    found = {side: runs for side, runs in measured.found[name].items() if not side.startswith(OURS)}
    return min(found, key=lambda side: statistics.median(run.step_ms for run in found[side]))


def verdict_columns(measured: Measured) -> list[str]:
    over_others = [f"over {SIDES[side].title}" for side in _also_beside(measured)]
    again = ["once more, over it"] if _is_measured(measured, AGAIN) else []
    of_best = ["the best other side", "`AccelPlugin()` over it", "least to most", "asked"]
    return ["", *of_best, *again, *over_others, "the best once settled", "settled, over it"]


def verdicts(measured: Measured) -> list[list[str]]:
    """Whether ``AccelPlugin()`` is as fast as the best side over all steps, and how it is beside others."""
    found = []
    for name in CASES:
        best = best_other(measured, name)
        if best is None or not (of_best := ratios(measured, name, OURS, best)):
            continue
        value = statistics.median(of_best)
        again = [over(measured, name, AGAIN, best)[0]] if _is_measured(measured, AGAIN) else []
        others = again + [over(measured, name, OURS, side)[0] for side in _also_beside(measured)]
        kept = f"{LEAST}x: {'yes' if value >= LEAST else 'no'}"
        then = best_settled(measured, name)
        beside = [SIDES[best].title, *over(measured, name, OURS, best), kept, *others, SIDES[then].title]
        found.append([CASES[name].title, *beside, settled(measured, name, OURS, then)])
    return found


def _also_beside(measured: Measured) -> list[str]:
    return [side for side in ALSO_BESIDE if _is_measured(measured, side)]


def _is_measured(measured: Measured, side: str) -> bool:
    return any(side in sides for sides in measured.found.values())


def asks() -> list[list[str]]:
    """What each side asks of a user who has a program of Lightning's."""
    return [
        [side.title, str(len(side.lines)), "yes" if side.keeps_trainer else "no", side.checked, side.undone]
        for side in SIDES.values()
        if side.runs == 1
    ]


def missing(measured: Measured) -> list[str]:
    """What could not be measured, and why."""

    def said(name: str) -> str:
        model, _, side = name.rpartition(", ")
        of = f"{CASES[model].title}, " if model else ""
        return f"{of}{SIDES[side].title}" if side in SIDES else name

    return [f"{said(name)}: {why}" for name, why in measured.missing.items()]
