"""All that is known of a run, in the order in which a reader asks for it. What it looks like is in the templates."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml

from lightning_accel.core.byte_size import format_bytes
from lightning_accel.evidence import anatomy as categories
from lightning_accel.evidence import parts
from lightning_accel.evidence.anatomy import OPTIMIZER, ModuleCost
from lightning_accel.evidence.compare import Comparison, NotComparableError, compare
from lightning_accel.evidence.diagnosis import Finding, diagnose
from lightning_accel.evidence.peaks import Peaks
from lightning_accel.evidence.record import Record
from lightning_accel.settings import Plan

FORMAT = 1
PLAIN = "AccelPlugin()"


@dataclass
class Node:
    """A module and its parts, as a page unfolds them.

    Attributes:
        name: Its own name; the whole model's is ``(model)``.
        kind: Its class.
        forward_ms: Of its operations and those of its parts, in the forward pass.
        backward_ms: The same of the backward pass.
        flops: Of both.
        moved_bytes: That they read and wrote.
        held_bytes: What its forward pass made that was alive at the peak.
        parts: Below it, the most time first.
    """

    name: str
    kind: str = ""
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    flops: int = 0
    moved_bytes: int = 0
    held_bytes: int = 0
    parts: list[Node] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a prediction.

    Attributes:
        finding: Of the earlier run, which is not found in this one any more.
        predicted: How many times as fast this one was to be.
        measured: How many times as fast it is, as ``1.31x [1.27, 1.35]``.
        ratio: The same as a number.
        earlier: The record of the earlier run.
    """

    finding: str
    predicted: float
    measured: str
    ratio: float
    earlier: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """The content of a report; :func:`dataclasses.asdict` of it is the JSON form.

    Attributes:
        headline: The run in a sentence.
        verdict: What sets its pace.
        settings: What to write to have the same again: ``"python"`` and ``"yaml"``.
        findings: What to do next, the most promising first.
        outcomes: What earlier predictions have come to.
        step_ms: A step, in the mean of those that were looked at.
        looked_at: How many these were.
        parts_ms: What it goes to; the parts add up to it.
        rule: What belongs to which.
        modules: What the operations of one step take, module by module; None: no step was taken apart.
        operations: How many that step has.
        trials: Each live trial: name, verdict, ratio, interval, steps.
        techniques: Each technique: its state, what it has changed, and why not elsewhere.
        memory: Category → bytes at the peak of that step.
        peak_bytes: The largest peak that was measured, of whoever keeps the books.
        peak_source: Who that is.
        device_bytes: All that the device has.
        largest_batch: How many samples a batch may have for all of that, by what activations take now; None: unknown.
        peaks: What the machine can do at most; None: not measured.
        layouts: Copies that only change strides.
        waits: The user's lines that ask the device for results.
        curves: Name → step numbers and values over the run.
        step_quantiles_ms: The 50th, 95th and 99th percentile over the pieces of the run.
        epochs: What was logged of each.
        machine: What ran where, by what versions and settings.
        out_of_memory: What a run that died of it ended with; else empty.
        remarks: What to mind when this is read.
    """

    headline: str
    verdict: str
    settings: dict[str, str]
    findings: list[Finding]
    outcomes: list[Outcome]
    step_ms: float
    looked_at: int
    parts_ms: dict[str, float]
    rule: str
    modules: Node | None
    operations: int
    trials: list[dict[str, Any]]
    techniques: list[dict[str, Any]]
    memory: dict[str, int]
    peak_bytes: int
    peak_source: str
    device_bytes: int
    largest_batch: int | None
    peaks: Peaks | None
    layouts: list[dict[str, Any]]
    waits: dict[str, int]
    curves: dict[str, list[tuple[float, float]]]
    step_quantiles_ms: list[float]
    epochs: list[dict[str, Any]]
    machine: dict[str, str]
    out_of_memory: str
    remarks: list[str]
    format: int = FORMAT


def page_of(record: Record, earlier: Sequence[Record] = (), peaks: Peaks | None = None) -> Page:
    """The content of a report.

    Args:
        record: Of the run.
        earlier: Records of the same training, to set it beside; those of others are passed over.
        peaks: Of the machine that it ran on.
    """
    measured = record.parts_ms(0.2)
    known = [part for part in parts.ORDER if part in measured]
    parts_ms = {part: measured[part] for part in [*known, *(part for part in measured if part not in known)]}
    findings = diagnose(record, peaks)
    anatomy = record.anatomy
    memory = {} if anatomy is None or anatomy.memory is None else dict(anatomy.memory.parts)
    tuning = _techniques(record).get("tuning", {}).get("data", {})
    return Page(
        headline=_headline(record, tuning, earlier),
        verdict=_verdict(parts_ms, findings),
        settings=_settings(record, tuning),
        findings=findings,
        outcomes=list(_outcomes(record, findings, earlier)),
        step_ms=sum(parts_ms.values()),
        looked_at=sum(some.looked_at for some in record.steps),
        parts_ms=parts_ms,
        rule=parts.RULE,
        modules=None if anatomy is None else _tree(record),
        operations=0 if anatomy is None else anatomy.operations,
        trials=[_trial(one) for one in (tuning.get("results") or {}).values()],
        techniques=[_technique(name, one) for name, one in _techniques(record).items()],
        memory=dict(sorted(memory.items(), key=lambda one: -one[1])),
        peak_bytes=round((record.peak_memory_mib or 0.0) * 2**20),
        peak_source=str(record.epochs[-1].get("peak_memory_source", "")) if record.epochs else "",
        device_bytes=record.header.device_bytes,
        largest_batch=_largest_batch(record, memory),
        peaks=peaks,
        layouts=[] if anatomy is None else [asdict(one) for one in anatomy.copies[:20]],
        waits={} if anatomy is None else dict(sorted(anatomy.waits.items(), key=lambda one: -one[1])),
        curves=dict(_curves(record)),
        step_quantiles_ms=_quantiles(record),
        epochs=record.epochs,
        machine=_machine(record),
        out_of_memory=record.page,
        remarks=list(_remarks(record)),
    )


def _techniques(record: Record) -> dict[str, dict[str, Any]]:
    return {} if record.report is None else dict(record.report["techniques"])


def _headline(record: Record, tuning: dict[str, Any], earlier: Sequence[Record]) -> str:
    if record.page:
        return f"Out of memory after {record.num_steps:,} steps: {_first_line(record.page)}"
    if record.status not in ("finished", ""):
        return f"Ended after {record.num_steps:,} steps: {record.status}"
    if record.header.settings is None:
        return f"A run of {record.num_steps:,} steps without AccelPlugin: nothing was tried"
    whole = tuning.get("whole")
    if not whole:
        return f"A run of {record.num_steps:,} steps, too few to tell how much faster than plain it was"
    if not tuning.get("choices"):
        return "As fast as plain: nothing that was tried on its own steps was faster for sure"
    ratio, low, high = (float(whole["interval"][name]) for name in ("ratio", "low", "high"))
    words = [f"{ratio:.2f}x [{low:.2f}, {'∞' if math.isinf(high) else f'{high:.2f}'}] over plain"]
    plain = [one for one in earlier if one.header.settings is None and one.header.model == record.header.model]
    peaks = record.peak_memory_mib, plain[-1].peak_memory_mib if plain else None
    if peaks[0] and peaks[1]:
        words.append(f"{peaks[0] / peaks[1]:.2f}x the memory of {plain[-1].path.parents[1].name}")
    if (step := _profit_step(record, ratio)) is not None:
        words.append(f"from step {step:,} on in profit")
    return ", ".join(words)


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _profit_step(record: Record, ratio: float) -> int | None:
    """The step from which on the run has taken less, all in all, than a plain one that is slower by ``ratio``."""
    pieces = [piece for some in record.steps for piece in some.pieces()]
    late = [ms for _, _, ms in pieces[len(pieces) // 2 :]]
    if not late:
        return None
    plain_ms = ratio * statistics.median(late)
    saved, step = 0.0, None
    for first, count, ms in pieces:
        saved += count * (plain_ms - ms)
        if saved < 0:
            step = None
        elif step is None:
            step = first
    return step


def _verdict(parts_ms: dict[str, float], findings: Sequence[Finding]) -> str:
    if findings:
        return findings[0].says[:1].upper() + findings[0].says[1:] + "."
    if not parts_ms:
        return "Too few steps were looked at to tell what sets the pace."
    total = sum(parts_ms.values())
    most, ms = max(parts_ms.items(), key=lambda one: one[1])
    return f"Nothing stands out: {most} sets the pace, with {ms / total:.0%} of a step."


def _settings(record: Record, tuning: dict[str, Any]) -> dict[str, str]:
    """What was given, with what live trials have settled written out."""
    if record.header.settings is None:
        return {"python": f"Trainer(plugins=[{PLAIN}])", "yaml": "accel: {}"}
    defaults = Plan()
    try:
        plan = Plan.from_dict(record.header.settings)
    except (TypeError, ValueError):  # of another version, or of a technique that is not here
        return {}
    for arm, choice in {**dict.fromkeys(tuning.get("results") or {}, "off"), **(tuning.get("choices") or {})}.items():
        if tuning.get("is_settled") and arm in defaults.to_dict():
            try:
                plan = plan.replace(**{arm: choice})
            except (TypeError, ValueError):  # a choice that is no setting
                continue
    given, plain = plan.to_dict(), defaults.to_dict()
    other = {name: value for name, value in given.items() if value != plain[name]}
    if not other:
        return {"python": f"Trainer(plugins=[{PLAIN}])", "yaml": "accel: {}"}
    arguments = ", ".join(f"{name}={value!r}" for name, value in other.items())
    return {
        "python": f"Trainer(plugins=[AccelPlugin({arguments})])",
        "yaml": yaml.safe_dump({"accel": other}, sort_keys=False).strip(),
    }


def _outcomes(record: Record, findings: Sequence[Finding], earlier: Sequence[Record]) -> Iterator[Outcome]:
    now = {finding.name for finding in findings}
    for before in earlier:
        done = [one for one in diagnose(before) if one.speedup and one.speedup > 1.05 and one.name not in now]
        if not done or before.header.started >= record.header.started:
            continue
        try:
            found: Comparison = compare(before, record)
        except NotComparableError:
            continue
        for one in done:
            yield Outcome(
                finding=one.says,
                predicted=one.speedup or 1.0,
                measured=str(found.speed),
                ratio=found.speed.ratio,
                earlier=str(before.path),
            )


def _tree(record: Record) -> Node:
    assert record.anatomy is not None
    held = {} if record.anatomy.memory is None else record.anatomy.memory.modules
    costs = {one.module: one for one in record.anatomy.modules if one.module != OPTIMIZER}
    root = Node("(model)", costs[""].kind if "" in costs else "")
    nodes = {"": root}

    def node_of(path: str) -> Node:
        if path not in nodes:
            parent, _, name = path.rpartition(".")
            nodes[path] = Node(name)
            node_of(parent).parts.append(nodes[path])
        return nodes[path]

    for path in {*costs, *held}:
        cost = costs.get(path, ModuleCost(module=path, kind=""))
        node_of(path).kind = cost.kind
        for depth in range(len(path.split(".")) + 1 if path else 1):
            node = node_of(".".join(path.split(".")[:depth]))
            node.forward_ms += cost.forward_ms
            node.backward_ms += cost.backward_ms
            node.flops += cost.flops
            node.moved_bytes += cost.moved_bytes
            node.held_bytes += held.get(path, 0)
    for node in nodes.values():
        node.parts.sort(key=lambda one: -one.ms)
    return root


def _trial(result: dict[str, Any]) -> dict[str, Any]:
    interval = {name: float(value) for name, value in result["interval"].items()}
    return {"name": result["name"], "verdict": result["verdict"], "steps": result["turns"], **interval}


def _technique(name: str, one: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "is_on": one["on"],
        "status": one["status"],
        "changed": [[count, what] for what, count in Counter(one["applied"].values()).most_common()],
        "left_alone": [[count, why] for why, count in Counter(one["refused"].values()).most_common()],
        "sites": dict(one["applied"]) | dict(one["refused"]),
    }


def _largest_batch(record: Record, memory: dict[str, int]) -> int | None:
    """By what does not grow with the batch, and what does, in the step that was taken apart."""
    size = next((one["batch_size"] for one in record.header.loaders if "batch_size" in one), None)
    fixed = sum(
        memory.get(one, 0)
        for one in (categories.PARAMETERS, categories.GRADIENTS, categories.STATES, categories.BUFFERS)
    )
    grows = sum(memory.values()) - fixed
    if size is None or grows <= 0 or not record.header.device_bytes:
        return None
    outside = max(0, round((record.peak_memory_mib or 0.0) * 2**20) - sum(memory.values()))
    return max(0, int(size * (0.95 * record.header.device_bytes - fixed - outside) / grows))


def _curves(record: Record) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    cycles = [(float(number), ms) for some in record.steps for number, _, ms in some.pieces()]
    yield "step, ms", cycles
    waits = [ms for some in record.steps for ms in some.wait_ms]
    yield "waiting for data, ms", [(number, ms) for (number, _), ms in zip(cycles, waits, strict=False)]
    held = []
    for some in record.steps:
        length = (some.last - some.first + 1) / max(1, len(some.held_mib))
        held += [(some.first + length * (place + 1), mib) for place, mib in enumerate(some.held_mib)]
    yield "memory held, MiB", held
    yield "loss", [(float(step), loss) for step, loss in sorted(record.losses.items()) if math.isfinite(loss)]
    scales = [(epoch["epoch"], epoch.get("loss_scale")) for epoch in record.epochs]
    yield "loss scale, by epoch", [(float(at), float(scale)) for at, scale in scales if scale is not None]


def _quantiles(record: Record) -> list[float]:
    """Over pieces, each as often as it has steps."""
    pieces = sorted((ms, count) for some in record.steps for _, count, ms in some.pieces())
    if not pieces:
        return []
    reached = list(itertools.accumulate(count for _, count in pieces))
    wanted = [share * reached[-1] for share in (0.5, 0.95, 0.99)]
    return [next(ms for (ms, _), upto in zip(pieces, reached, strict=True) if upto >= need) for need in wanted]


def _machine(record: Record) -> dict[str, str]:
    header = record.header
    return {
        "machine": f"{header.machine}, {header.cores} cores, {format_bytes(header.device_bytes)}",
        "model": f"{header.model}, {header.parameters or 0:,} parameters",
        "precision": header.precision,
        "strategy": f"{header.strategy}, {header.world_size} rank{'s' if header.world_size > 1 else ''}",
        "loaders": "; ".join(", ".join(f"{name}={value}" for name, value in one.items()) for one in header.loaders),
        "started": f"{header.started} (UTC)",
        "command": " ".join(header.command),
        "versions": ", ".join(f"{name} {number}" for name, number in header.versions.items()),
        "record": str(record.path),
    }


def _remarks(record: Record) -> Iterator[str]:
    if not record.status:
        yield "the record has no end: the run was killed, or still goes on"
    if record.anatomy is not None:
        yield (
            f"modules and memory are of step {record.anatomy.step:,}, watched operation by operation, uncompiled:"
            " shares hold, milliseconds are longer than in others"
        )
    yield from (record.report or {}).get("notes", [])
    for other in record.passed_over:
        yield f"{other} is newer, and has no steps"
