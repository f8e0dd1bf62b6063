"""What was done to a model, what was not, and why: the evidence a run leaves behind."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from typing_extensions import override

from lightning_accel.core.measured import Measured, together
from lightning_accel.core.purse import Purse

NEWEST_TORCH = (2, 15)
"""The newest that the tests have run on."""


class AccelWarning(UserWarning):
    """Something that was asked for could not be done; the run goes on without it (``strict=True`` raises instead)."""


class AccelError(RuntimeError):
    """What would be an :class:`AccelWarning`, with ``strict=True``."""


class EditError(RuntimeError):
    """What an edit raises that cannot do what it is asked for, where the user's own code can.

    A run that can repeat the step does so without the technique, and keeps the others.

    Attributes:
        technique: Whose edit it is.
    """

    def __init__(self, technique: str, message: str) -> None:
        super().__init__(message)
        self.technique = technique

    @override
    def __reduce__(self) -> Any:
        return type(self), (self.technique, *self.args)


@dataclass
class TechniqueReport:
    """The record of one technique.

    Attributes:
        status: One line on the technique as a whole: ``"bf16-mixed: native bfloat16"``.
        changes: Site → what was changed there, and what its trial measured.
        refusals: Site → why it was left alone or reverted.
        is_on: Whether the technique found something to do.
        rests: Whether live trials have settled without it.
        details: What there is to say beyond sites: a table, say.
        data: The same as plain values, for programs.
        measured: Site → the figures of its trial.
        measured_as_a_whole: What was measured of all sites together; None: nothing.
        was_in_force: Whether some site was given back in mid-run, after all trials.
        waits_for_trials: Whether it does nothing until live trials have put it on.
    """

    status: str = ""
    details: str = ""
    changes: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    is_on: bool = False
    rests: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)
    measured_as_a_whole: Measured | None = None
    was_in_force: bool = False
    waits_for_trials: bool = False

    def take_up(self, site: str, measured: Measured | None) -> None:
        """Keeps the figures of a site; what was measured before holds where nothing was now."""
        if measured is not None:
            self.measured[site] = measured

    def figures(self) -> Measured | None:
        """What was measured, all in all: where it is in force, else where it was refused; None: nothing was."""
        chosen = [one for site, one in self.measured.items() if site in self.changes] or list(self.measured.values())
        chosen += [self.measured_as_a_whole] if self.measured_as_a_whole is not None else []
        return together(chosen) if chosen else None

    @property
    def acts(self) -> bool:
        """Whether the technique acts on the steps that are under way."""
        return self.is_on and not self.rests

    @property
    def line(self) -> str:
        """Its status, and that it rests."""
        return f"off, as live trials have settled without it; before: {self.status}" if self.rests else self.status

    def outcome(self) -> str:
        """What came of the sites, in a line."""
        if self.changes:
            return "in force"
        reasons = Counter(self.refusals.values()).most_common(1)
        return f"left alone: {reasons[0][0] if reasons else 'nothing to do'}"


def _notes_on_versions() -> list[str]:
    release = str(getattr(sys.modules.get("torch"), "__version__", "0.0"))
    major, minor = (int(number) for number in release.split(".")[:2])
    is_newer = (major, minor) > NEWEST_TORCH
    return [f"torch {major}.{minor} is newer than those tested: changes are checked as ever"] if is_newer else []


class Report:
    """Names every site touched, every site refused and the reason.

    Techniques go by their names in the plan: ``"precision"``, ``"flash_attention"``, ``"gradient_checkpointing"``. The
    model itself is site ``""``, written ``(model)``.
    """

    def __init__(self, device: str = "", purse: Purse | None = None) -> None:
        self.device = device
        self.techniques: dict[str, TechniqueReport] = {}
        self.notes: list[str] = _notes_on_versions() if device else []
        self.purse = purse

    @property
    def remarks(self) -> list[str]:
        """The notes, and what the run has paid for all that is not the user's own step."""
        paid = self.purse.line() if self.purse is not None else ""
        return [*self.notes, *([f"paid so far, beside the user's own steps: {paid}"] if paid else [])]

    def of(self, technique: str) -> TechniqueReport:
        """The record of a technique, made when first asked for."""
        return self.techniques.setdefault(technique, TechniqueReport())

    def applied(self, technique: str) -> list[str]:
        """The sites where ``technique`` is in force."""
        record = self.techniques.get(technique)
        return [] if record is None or record.rests else list(record.changes)

    def refused(self, technique: str) -> dict[str, str]:
        """The sites that ``technique`` left alone or gave back, with the reasons."""
        return dict(self.techniques[technique].refusals) if technique in self.techniques else {}

    def settled(self, resting: Iterable[str]) -> None:
        """Says which techniques live trials have settled without; none while they have not settled."""
        resting = set(resting)
        for name, record in self.techniques.items():
            record.rests = name in resting

    def note(self, line: str) -> None:
        """Adds a remark on the run as a whole, once."""
        if line not in self.notes:
            self.notes.append(line)

    def record_applied(self, technique: str, site: str, change: str, measured: Measured | None = None) -> None:
        """Says what was changed at a site, and what its trial has measured."""
        record = self.of(technique)
        record.changes[site] = change
        record.refusals.pop(site, None)
        record.take_up(site, measured)

    def record_refused(self, technique: str, site: str, reason: str, measured: Measured | None = None) -> None:
        """Says why a site was left alone or given back, and what its trial has measured."""
        record = self.of(technique)
        record.refusals[site] = reason
        record.changes.pop(site, None)
        record.take_up(site, measured)

    def summary(self) -> str:
        """A line a technique: its status, and how many sites it changed and refused."""
        lines = [f"lightning-accel on {self.device}"] if self.device else ["lightning-accel"]
        for name, record in self.techniques.items():
            counts = [f"{len(record.changes)} sites"] if record.changes else []
            counts += [f"{len(record.refusals)} left alone"] if record.refusals else []
            tail = f" ({', '.join(counts)})" if counts else ""
            lines.append(f"  {'+' if record.acts else '-'} {name}: {record.line}{tail}")
        lines += [f"  ! {remark}" for remark in self.remarks]
        return "\n".join(lines)

    def to_text(self) -> str:
        """The whole report; sites with the same remark share a line."""
        lines = [self.summary()]
        for name, record in self.techniques.items():
            applied = "applied before it was switched off" if record.rests else "applied"
            for title, remarks in ((applied, record.changes), ("refused", record.refusals)):
                if remarks:
                    lines.append(f"\n{name}, {title}:")
                    lines += _grouped(remarks)
            if record.details:
                lines += [f"\n{name}:", *(f"  {line}" for line in record.details.split("\n"))]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "notes": self.remarks,
            "techniques": {
                name: {
                    "on": record.acts,
                    "rests": record.rests,
                    "status": record.line,
                    "applied": dict(record.changes),
                    "refused": dict(record.refusals),
                    "details": record.details,
                    "was_in_force": record.was_in_force,
                    "waits_for_trials": record.waits_for_trials,
                    **({"measured": figures.to_dict()} if (figures := record.figures()) else {}),
                    **({"data": record.data} if record.data else {}),
                }
                for name, record in self.techniques.items()
            },
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return f"<pre>{escape(self.to_text())}</pre>"


def difference(ranks: Sequence[Mapping[str, tuple[set[str], Mapping[str, str], str]]]) -> str | None:
    """Where one rank cannot do what rank 0 does, and why; None where all do the same.

    Args:
        ranks: Of each rank, technique by technique: the sites it has, its refusals, its status.
    """
    for name, (decided, _, _) in ranks[0].items():
        for rank, techniques in enumerate(ranks):
            done = techniques[name][0]
            if done != decided:
                site = min(done ^ decided)
                without, having = (0, rank) if site in done else (rank, 0)
                _, refusals, status = ranks[without][name]
                reason = refusals.get(site, status or "it has no such site")
                return (
                    f"The ranks do not do the same: rank {without} goes without {name} at {site or 'the model'!r}"
                    f" ({reason}), rank {having} with it. All of them stop here. Set {name} to 'off', or make their"
                    " machines alike."
                )
    return None


def _grouped(remarks: dict[str, str], shown: int = 6) -> list[str]:
    lines = []
    for remark, count in Counter(remarks.values()).items():
        sites = [site or "(model)" for site, text in remarks.items() if text == remark]
        names = ", ".join(sites[:shown]) + (f", … and {count - shown} more" if count > shown else "")
        lines.append(f"  {names}: {remark}")
    return lines
