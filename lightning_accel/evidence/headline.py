"""A run in a sentence, what to do about it, what earlier predictions have come to, and how to have the same again."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import yaml

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.evidence.amounts import duration
from lightning_accel.evidence.compare import compare_runs
from lightning_accel.evidence.diagnosis import Finding, diagnose
from lightning_accel.evidence.peaks import Peaks
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.speed import Speed, speed_of
from lightning_accel.experiment.pair_test import RatioInterval
from lightning_accel.settings import Plan

_PLAIN = {"python": "Trainer(plugins=[AccelPlugin()])", "yaml": "accel: {}"}
_WORTH = 1.05  # less than that is not predicted to anybody's benefit

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a record raises whose values are not of the kinds that they were written as."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What became of a prediction."""

    finding: str  # of the earlier run, which is not found in this one any more
    predicted: float  # how many times as fast this one was to be
    measured: str  # how many times as fast it is, as `1.31x [1.27, 1.35]`
    ratio: float  # the same as a number
    earlier: str  # the record of the earlier run


def headline_of(record: Record, earlier: Sequence[Record]) -> str:
    """The run in a sentence."""
    if record.page:
        after = f" after {record.num_steps:,} steps" if record.steps else ""  # a run without a logger counts none
        return f"Out of memory{after}: {_line(record.page, 0)}"
    if record.status not in ("finished", ""):
        return f"Ended after {record.num_steps:,} steps: {record.status}"
    if record.header.settings is None:
        return f"A run of {record.num_steps:,} steps without AccelPlugin: nothing was tried"
    if record.held.whole is None:
        return f"A run of {record.num_steps:,} steps: nothing was measured against plain"
    over_plain = _over_plain(record)
    if over_plain is None:
        return "As fast as plain: no option made its steps measurably faster"
    words = [f"{over_plain} over plain"]
    source = record.peak_memory_source
    plain = [one for one in earlier if one.header.settings is None and one.peak_memory_source == source]
    peaks = record.peak_memory_mib, plain[-1].peak_memory_mib if plain else None
    if peaks[0] and peaks[1]:
        words.append(f"{peaks[0] / peaks[1]:.2f}x the memory of {plain[-1].path.parent.parent.name}")
    _, step = _saved(record, over_plain.ratio)
    if step is not None:
        words.append(f"from step {step:,} on in profit")
    return ", ".join(words)


def facts_of(record: Record, findings: Sequence[Finding]) -> dict[str, str]:
    """The first line of a page: which run, how fast beside plain, what that has saved, what to do next."""
    header, over_plain = record.header, _over_plain(record)
    speed = speed_of(record.steps, record.held.step, header.world_size)
    facts = {
        "run": "/".join(record.path.parts[-4:-2]),
        "model": header.model.rpartition(".")[2],
        "started": f"{header.started[:16].replace('T', ' ')} UTC",
        "speed now": "not measured: too few steps" if speed is None else str(speed),
    }
    if header.settings is None:
        facts["plain"] = "this run is plain"
    elif over_plain is not None and speed is not None:
        facts["plain"] = str(Speed(speed.per_second / over_plain.ratio, speed.unit))
        saved_s, _ = _saved(record, over_plain.ratio)
        facts["time saved"] = (
            duration(1e3 * saved_s) if saved_s > 0 else f"none yet: trials took {duration(-1e3 * saved_s)} more"
        )
    elif record.held.whole is not None:
        facts |= {"plain": "the same: it trains as plain", "time saved": "none"}
    else:
        facts["plain"] = "not measured"
    if findings:
        facts["next"] = gain_of(findings[0]) or findings[0].action
    return facts


def _over_plain(record: Record) -> RatioInterval | None:
    """How many times as fast as plain a run has come to be; None where that is not known, or it trains as plain."""
    held = record.held
    return held.whole.interval if held.whole is not None and held.choices else None


def _line(text: str, number: int) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[number].strip() if number < len(lines) else ""


def _saved(record: Record, ratio: float) -> tuple[float, int | None]:
    """The seconds that the run has taken less than a plain one, slower by ``ratio``, and since which step it has."""
    pieces = [piece for some in record.steps for piece in some.pieces()]
    late = [piece.ms for piece in pieces[len(pieces) // 2 :]]
    if not late:
        return 0.0, None
    plain_ms = ratio * statistics.median(late)
    saved, step = 0.0, None
    for piece in pieces:
        saved += piece.steps * (plain_ms - piece.ms)
        if saved < 0:
            step = None
        elif step is None:
            step = piece.first
    return saved / 1e3, step


def verdict_of(record: Record, parts_ms: Mapping[str, float], findings: Sequence[Finding]) -> str:
    """What sets the pace, and what would change that."""
    if record.page:
        return _line(record.page, 1)
    if findings:
        first = findings[0]
        says = first.says[:1].upper() + first.says[1:]
        return f"{says}: {gain_of(first)}." if gain_of(first) else f"{says}."
    if not parts_ms:
        return "Too few steps were looked at to tell what sets the pace."
    total = sum(parts_ms.values())
    most, ms = max(parts_ms.items(), key=lambda one: one[1])
    return f"Nothing stands out: {most} sets the pace, with {ms / total:.0%} of a step."


def gain_of(finding: Finding) -> str:
    """What is predicted of an action: ``num_workers=4 would give about 1.5x``; empty: nothing is."""
    gains = [f"give about {finding.speedup:.2g}x" if (finding.speedup or 1.0) > _WORTH else ""]
    gains += [f"free {format_bytes(finding.freed_bytes)}" if finding.freed_bytes else ""]
    what = finding.python.partition("\n")[0] or finding.action
    return f"{what} would {' and '.join(filter(None, gains))}" if any(gains) else ""


def settings_of(record: Record) -> dict[str, str]:
    """What was given, with what live trials have settled written out; empty where that cannot be told."""
    if record.header.settings is None:
        return dict(_PLAIN)
    try:
        plan = Plan.from_dict(record.header.settings)
    except (TypeError, ValueError):  # of another version, or of a technique that is not here
        return {}
    techniques = {} if record.report is None else record.report["techniques"]
    resting = [name for name, one in techniques.items() if one.get("rests")]
    choices = {**dict.fromkeys(resting, "off"), **record.held.choices}
    for arm, choice in choices.items() if record.held.is_settled else ():
        # An arm that is no technique here, or a choice that is no setting, is left out.
        with suppress(TypeError, ValueError):
            plan = plan.replace(**{arm: choice})
    if plan == Plan():
        return dict(_PLAIN)
    accel = {"accel": plan.to_dict(whole=False)}
    return {
        "python": f"Trainer(plugins=[Accel{repr(plan).replace('Plan(', 'Plugin(', 1)}])",
        "yaml": yaml.safe_dump(accel, sort_keys=False, allow_unicode=True).strip(),
    }


def outcomes_of(
    record: Record, findings: Sequence[Finding], earlier: Sequence[Record], peaks: Peaks | None
) -> Iterator[RunOutcome]:
    """What came of predictions that earlier runs were given."""
    now = {finding.name for finding in findings}
    for before in earlier:
        is_same_machine = before.header.machine == record.header.machine
        try:
            found = diagnose(before, peaks if is_same_machine else None)
            done = [one for one in found if (one.speedup or 1.0) > _WORTH and one.name not in now]
            speed = compare_runs(before, record).speed if done else None
        except MALFORMED:  # another's record that is damaged, or not of this training: nothing of this run
            continue
        if speed is None:
            continue
        for one in done:
            yield RunOutcome(
                finding=one.says,
                predicted=one.speedup or 1.0,
                measured=str(speed),
                ratio=speed.ratio,
                earlier=str(before.path),
            )
