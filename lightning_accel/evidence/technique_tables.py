"""What was tried as tables: live trials, and what each technique has contributed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.evidence.cells import NOTHING, Cell, Table, bounds, number_cell, table, without_empty
from lightning_accel.evidence.technique_summary import TrialSummary, Tried


def trials_table(trials: Iterable[TrialSummary]) -> Table:
    """What live trials have come to."""
    heads = {"arm": False, "verdict": False, "ratio": True, "95% interval": False, "steps": True, "peak": True}
    heads |= {"set up, s": True}
    rows = [
        [
            one.name,
            one.verdict,
            (f"{one.ratio:.3f}x", one.ratio),
            bounds(one.low, one.high),
            number_cell(one.steps),
            _memory(one.peak_bytes_without, one.peak_bytes_with),
            number_cell(one.setup_s),
        ]
        for one in trials
    ]
    return without_empty(table("Live trials", heads, rows))


def contributions_table(techniques: Iterable[Tried]) -> Table:
    """What each technique has contributed, losers included; not those that are off."""
    heads = {"technique": False, "came of it": False, "ratio [95%]": True, "judged on": False}
    heads |= {"peak": True, "error, spreads": True, "its part": True, "its memory": True, "why": False}
    rows = [_contribution(one) for one in techniques if one.came_of_it is not None and not one.is_off]
    return without_empty(table("What each technique contributed", heads, rows))


def _contribution(one: Tried) -> list[Any]:
    trial, part = one.trial, one.measured
    was_tried = part is not None and (part.error is not None or part.original_ms is not None)
    on_whole_steps: list[Any] = [NOTHING, "first batch" if was_tried else "", NOTHING]
    if trial is not None:
        ratio = f"{trial.ratio:.2f}x {bounds(trial.low, trial.high)}", trial.ratio
        peak = _times(trial.peak_bytes_without, trial.peak_bytes_with)
        on_whole_steps = [ratio, f"{trial.steps:,} steps", peak]
    of_its_part: list[Any] = [NOTHING, NOTHING, NOTHING]
    if part is not None:
        of_its_part = [
            _spreads(one),
            _ratio(part.original_ms, part.candidate_ms),
            _times(part.original_bytes, part.candidate_bytes),
        ]
    return [one.name, one.came_of_it, *on_whole_steps, *of_its_part, one.why]


def _spreads(one: Tried) -> Cell:
    if one.measured is not None and one.measured.is_same:
        return "the same to the bit", 0.0
    off = one.error_spreads
    if off is None or math.isnan(off):
        return NOTHING
    return (f"{off:.2g}", off) if math.isfinite(off) else ("∞", sys.float_info.max)


def _ratio(original: float | None, candidate: float | None) -> Cell:
    """How many times as fast."""
    return (f"{original / candidate:.2f}x", original / candidate) if original and candidate else NOTHING


def _memory(original: int | None, candidate: int | None) -> Cell:
    """How many times as much, and how much more or less."""
    text, ratio = _times(original, candidate)
    if not original or candidate is None:
        return NOTHING
    more = candidate - original
    return f"{text} ({'+' if more >= 0 else '−'}{format_bytes(abs(more))})", ratio


def _times(original: int | None, candidate: int | None) -> Cell:
    return (f"{candidate / original:.2f}x", candidate / original) if original and candidate is not None else NOTHING
