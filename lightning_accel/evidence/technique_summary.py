"""What was tried and what came of it: live trials one by one, and techniques with all that was measured of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from lightning_accel.core.measured import Measurement
from lightning_accel.evidence.events import TrialDecided
from lightning_accel.evidence.record import Record

CameOfIt = Literal["kept", "undone", "refused", "not asked"]

TUNING = "tuning"
"""What live trials have come to, among the techniques of a report."""

_REFUSED = "refused in its trial"  # of what live trials have to set up before
_MOST_REMARKS = 20  # of a technique, other than each other
_MOST_SITES = 200


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """What one live trial has come to."""

    name: str  # of the arm; `whole plan`: all that holds against plain
    verdict: str  # `"faster"`, `"slower"`, `"cannot tell"` and the like
    ratio: float  # how many times as fast the steps are with it
    low: float  # the least that this may be, with 95% confidence
    high: float | None  # the most; None: no bound is known
    steps: int  # on how many it was judged
    setup_s: float | None  # seconds that it took before it could be had; None: nothing to speak of
    peak_bytes_without: int | None = None  # the most memory that a step has held without it; None: that was not seen
    peak_bytes_with: int | None = None  # the same with it


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What one technique did, and what was measured of it."""

    name: str  # as in the settings
    is_on: bool  # whether it acts at all
    is_off: bool  # whether the plan does without it
    status: str  # in a line
    changed: list[tuple[int, str]]  # how many sites, and what was changed there, with what its trial has measured
    left_alone: list[tuple[int, str]]  # how many sites, and why
    details: str  # what there is to say beside
    sites: dict[str, str]  # the first of them: what came of each
    num_sites: int  # how many there are in all
    # `"kept"`; `"undone"` after it had been in force or had its turns; `"refused"` before; `"not asked"`: it is off.
    # None: it is no technique
    came_of_it: CameOfIt | None = None
    why: str = ""  # of that, in a line
    trial: TrialSummary | None = None  # on whole training steps, by itself; None: it had none
    # of its parts, on the first batch: the largest error, times and memory in their sums; None: nothing
    measured: Measurement | None = None
    error_spreads: float | None = None  # that error, as a multiple of the spread; 0: the same numbers, to the bit


def tried_of(name: str, one: Mapping[str, Any], record: Record) -> Tried:
    """What a technique did, by its name in the settings, the report's record of it, and what the run has recorded."""
    applied, refused = record.reasons(name, "ON"), record.reasons(name, "OFF")
    sites = {**applied, **refused}
    state = one.get("measured")
    measured = None if state is None else Measurement.from_dict(state)
    tried = Tried(
        name=name,
        is_on=bool(one["on"]),
        is_off=one.get("state") == "off",
        status=str(one["status"]),
        changed=_counted(applied),
        left_alone=_counted(refused),
        details=str(one.get("details", "")),
        sites={site: str(what) for site, what in islice(sites.items(), _MOST_SITES)},
        num_sites=len(sites),
        trial=_trial_by_itself(name, record),
        measured=measured,
        error_spreads=None if measured is None else measured.error_spreads,
    )
    if name == TUNING:
        return tried
    came_of_it, why = _came_of(tried, one, record)
    return replace(tried, came_of_it=came_of_it, why=why)


def _came_of(tried: Tried, one: Mapping[str, Any], record: Record) -> tuple[CameOfIt, str]:
    if tried.trial is not None and tried.trial.verdict == _REFUSED:
        return "refused", _most_said(tried.left_alone) or tried.trial.verdict
    is_tuned = any(tried.name in _arms_of(result) for result in record.trials.values())
    if tried.name in record.held.choices:
        return "kept", tried.status if tried.trial is None else _verdict_on(tried.trial)
    if tried.is_on and not is_tuned and not one.get("waits_for_trials"):
        return "kept", tried.status
    if is_tuned:
        return "undone", _why_undone(tried, record)
    if one.get("waits_for_trials"):
        return "not asked", tried.status
    why = tried.status if one.get("rests") else _most_said(tried.left_alone) or tried.status
    if one.get("rests") or one.get("was_in_force") or one.get("state") == "reverted":
        return "undone", why
    return ("not asked", "off") if tried.is_off else ("refused", why)


def _why_undone(tried: Tried, record: Record) -> str:
    if tried.trial is None:
        verdicts = [str(result.verdict) for result in record.trials.values() if tried.name in _arms_of(result)]
        return f"together with others: {verdicts[-1]}; not asked by itself"
    if tried.trial.verdict == "faster":
        return "faster by itself; what held with it was then not faster than plain for sure"
    return _verdict_on(tried.trial)


def _verdict_on(trial: TrialSummary) -> str:
    """With the choice, where there are several."""
    return f"{trial.name}: {trial.verdict}" if "=" in trial.name else trial.verdict


def _trial_by_itself(name: str, record: Record) -> TrialSummary | None:
    """The latest in which nothing but this arm made the difference, rather with it than with a choice of it."""
    found = None
    for result in record.trials.values():
        if result.original.keys() ^ result.candidate.keys() == {name}:
            found = summary_of(result, is_turned=name not in result.candidate)
    return found


def _arms_of(result: TrialDecided) -> set[str]:
    return {*result.original, *result.candidate, result.name}


def summary_of(trial: TrialDecided, *, is_turned: bool = False) -> TrialSummary:
    """What a live trial has come to, as a page shows it; turned round if it was of the run without the candidate."""
    ratio, low, high = trial.interval.ratio, trial.interval.low, trial.interval.high
    peaks = trial.peak_bytes if len(trial.peak_bytes) == 2 else (None, None)
    if is_turned:
        ratio, low, high, peaks = 1 / ratio, 1 / high, 1 / low if low else math.inf, peaks[::-1]
    return TrialSummary(
        name=str(trial.name),
        verdict=f"without it: {trial.verdict}" if is_turned else str(trial.verdict),
        ratio=ratio,
        low=low,
        high=high if math.isfinite(high) else None,
        steps=trial.turns,
        setup_s=trial.setup_s,
        peak_bytes_without=peaks[0],
        peak_bytes_with=peaks[1],
    )


def _counted(sites: Mapping[str, Any]) -> list[tuple[int, str]]:
    """What is said of the most of them, each with how many these are."""
    return [(count, what) for what, count in Counter(map(str, sites.values())).most_common(_MOST_REMARKS)]


def _most_said(counted: list[tuple[int, str]]) -> str:
    return counted[0][1] if counted else ""
