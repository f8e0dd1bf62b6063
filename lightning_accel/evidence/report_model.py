"""All that is known of a run, in the order in which a reader asks for it. What it looks like is in the templates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.evidence import phase_names
from lightning_accel.evidence.amounts import duration
from lightning_accel.evidence.diagnosis import Finding, diagnose
from lightning_accel.evidence.headline import (
    MALFORMED,
    RunOutcome,
    facts_of,
    headline_of,
    outcomes_of,
    settings_of,
    verdict_of,
)
from lightning_accel.evidence.memory_use import MemoryUse, memory_use
from lightning_accel.evidence.module_tree import Node, tree_of
from lightning_accel.evidence.peaks import Peaks
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.record_reader import RecordError, read_earlier, read_record
from lightning_accel.evidence.run_history import Curve, curves_of, epochs_of, number, quantiles_ms
from lightning_accel.evidence.served import Served
from lightning_accel.evidence.speed import BEGINNING, speed_of
from lightning_accel.evidence.step_breakdown import OPTIMIZER, Anatomy, LayoutCopy
from lightning_accel.evidence.technique_summary import TrialSummary, Tried, summary_of, tried_of

FORMAT = 1
_MOST_LINES = 20  # of copies and of waits


@dataclass(frozen=True, kw_only=True)
class Page:
    """The content of a report; :func:`dataclasses.asdict` of it is the JSON form, by ``report.schema.json``."""

    headline: str  # the run in a sentence
    # the first line: which run, model and date, its speed beside plain, the time saved, what to do next
    facts: dict[str, str]
    verdict: str  # what sets its pace, and what would change that
    speed: str  # how fast it was, as `Speed` has it; empty: too few steps to tell
    # what to write to have the same again: `"python"` and `"yaml"`; empty: that cannot be told
    settings: dict[str, str]
    findings: list[Finding]  # what to do next, the most promising first
    outcomes: list[RunOutcome]  # what earlier predictions have come to
    step_ms: float  # a step, in the mean of those that were looked at
    looked_at: int  # how many these were
    parts_ms: dict[str, float]  # what it goes to; the parts add up to it
    rule: str  # what belongs to which
    modules: Node | None  # what the operations of one step take, module by module; None: no step was taken apart
    operations: int  # how many the step has whose operations these are
    modules_note: str  # how these times were taken, beside those of other steps
    trials: list[TrialSummary]  # of live trials, each
    settled_step: int | None  # the step at which they had settled; None: they had not, or there were none
    techniques: list[Tried]  # what each did, losers included
    memory: MemoryUse  # at the peak
    peaks: Peaks | None  # what the machine can do at most; None: not measured
    layouts: list[LayoutCopy]  # copies that only change strides
    waits: dict[str, int]  # the user's lines that ask the device for results
    curves: dict[str, Curve]  # name → step numbers and values over the run
    step_quantiles_ms: list[float]  # the 50th, 95th and 99th percentile over the pieces of the run
    epochs: list[dict[str, float]]  # each, or every so many: name → value
    cards: dict[str, float]  # what NVML said of the cards over the run, where GpuStats was among the callbacks
    served: Served | None  # the forms in which its model was measured for serving; None: it was not
    machine: dict[str, str]  # what ran where
    plan: dict[str, str]  # every setting of the plugin, as it was given
    out_of_memory: str  # what a run that died of it ended with; else empty
    remarks: list[str]  # what to mind when this is read
    # of this form; another one is not to be read by those who know this
    format: int = field(default=FORMAT, kw_only=True)


def page_on(path: Path, peaks: Peaks | None = None, **known: Any) -> Page:
    """The content of a report on the run of a record's file, with what is ``known`` in the place of what it has.

    Raises:
        OSError, RecordError: It cannot be read.
    """
    record = read_record(path)
    return page_of(replace(record, **known), read_earlier(record), peaks)


def page_of(record: Record, earlier: Sequence[Record] = (), peaks: Peaks | None = None) -> Page:
    """The content of a report on a run, beside ``earlier`` ones; those of another training are passed over.

    Raises:
        RecordError: The record's values are not of the kinds that they were written as.
    """
    try:
        return _page_of(record, earlier, peaks)
    except MALFORMED as error:
        message = f"{record.path} is damaged: {type(error).__name__}: {error}. Run the training again."
        raise RecordError(message) from error


def _page_of(record: Record, earlier: Sequence[Record], peaks: Peaks | None) -> Page:
    measured, anatomy = record.parts_ms(BEGINNING), record.anatomy
    known = [part for part in phase_names.ORDER if part in measured]
    parts_ms = {part: measured[part] for part in [*known, *(part for part in measured if part not in known)]}
    techniques = {} if record.report is None else dict(record.report["techniques"])
    findings = diagnose(record, peaks)
    return Page(
        headline=headline_of(record, earlier),
        facts=facts_of(record, findings),
        verdict=verdict_of(record, parts_ms, findings),
        speed=str(speed_of(record.steps, record.held.step, record.header.world_size) or ""),
        settings=settings_of(record),
        findings=findings,
        outcomes=list(outcomes_of(record, findings, earlier, peaks)),
        step_ms=sum(parts_ms.values()),
        looked_at=sum(some.looked_at for some in record.steps),
        parts_ms=parts_ms,
        rule=phase_names.RULE,
        modules=None if anatomy is None else tree_of(anatomy, {} if record.memory is None else record.memory.modules),
        operations=0 if anatomy is None else anatomy.operations,
        modules_note="" if anatomy is None else _modules_note(anatomy, record.held.step, parts_ms),
        trials=[summary_of(one) for one in record.trials.values()],
        settled_step=record.held.step,
        techniques=[tried_of(name, one, record) for name, one in techniques.items()],
        memory=memory_use(record),
        peaks=peaks,
        layouts=[] if anatomy is None else anatomy.copies[:_MOST_LINES],
        waits={} if anatomy is None else dict(Counter(anatomy.waits).most_common(_MOST_LINES)),
        curves=curves_of(record),
        step_quantiles_ms=quantiles_ms(record),
        epochs=epochs_of(record),
        cards={name: told for name, value in record.cards.items() if (told := number(value)) is not None},
        served=record.served,
        machine=_machine(record),
        plan={name: str(value) for name, value in (record.header.settings or {}).items()},
        out_of_memory=record.page,
        remarks=list(_remarks(record)),
    )


def _machine(record: Record) -> dict[str, str]:
    header = record.header
    return {
        "machine": f"{header.machine}, {header.cores} cores, {format_bytes(header.device_bytes)}",
        "model": f"{header.model}, {header.parameters or 0:,} parameters",
        "precision": _precision(record),
        "strategy": f"{header.strategy}, {header.world_size} rank{'s' if header.world_size > 1 else ''}",
        "loaders": "; ".join(", ".join(f"{name}={value}" for name, value in one.items()) for one in header.loaders),
        "started": f"{header.started} (UTC)",
        "command": " ".join(header.command),
        "versions": ", ".join(f"{name} {version}" for name, version in header.versions.items()),
        "record": str(record.path),
    }


def _modules_note(anatomy: Anatomy, settled_step: int | None, parts_ms: Mapping[str, float]) -> str:
    before = "" if settled_step is None or anatomy.step > settled_step else ", before live trials had settled,"
    forward_ms = sum(one.forward_ms for one in anatomy.modules if one.module != OPTIMIZER)
    other = parts_ms.get(phase_names.FORWARD)
    beside = f" Its forward pass took {duration(forward_ms)}, that of others {duration(other)}." if other else ""
    return (
        f"The {anatomy.operations:,} operations of step {anatomy.step:,}{before} were timed one by one, uncompiled,"
        f" which takes longer.{beside} Compare shares, not milliseconds."
    )


def _precision(record: Record) -> str:
    """What steps have come to compute in: live trials, or an error, may have taken back what was chosen for a run."""
    found = ((record.report or {}).get("techniques") or {}).get("precision", {})
    at_first = record.header.precision
    is_back = found.get("on") is False and not at_first.startswith("32")
    return f"32-true, {at_first} before it was switched off" if is_back else at_first


def _remarks(record: Record) -> Iterator[str]:
    if not record.status:
        yield "the record has no end: the run was killed, or still goes on"
    lost = [step for step, loss in sorted(record.losses.items()) if not math.isfinite(loss)]
    if lost:
        yield f"the loss was no number (NaN or infinite), at first in step {lost[0]:,} of those that were kept"
    yield from map(str, (record.report or {}).get("notes", []))
    for other in record.passed_over:
        yield f"{other} is newer, and has no steps"
