"""The report of a run: what was changed in a model, what was not, and why."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

from typing_extensions import override

from lightning_accel.core.measured import Measurement, together
from lightning_accel.core.purse import Purse
from lightning_accel.core.states import TECHNIQUE_CHANGES, Sites, TechniqueState

NEWEST_TORCH = (2, 15)
"""The newest torch version that the tests have run on."""


class AccelWarning(UserWarning):
    """A requested change could not be made. The run goes on without it; ``strict=True`` raises instead."""


class AccelError(RuntimeError):
    """Raised instead of an :class:`AccelWarning` with ``strict=True``."""


class EditError(RuntimeError):
    """An edit cannot do what it is asked for, although the user's own code can.

    A run that can repeat the step repeats it without the technique, and keeps the other techniques.

    Attributes:
        technique: The name of the technique whose edit raised this.
    """

    def __init__(self, technique: str, message: str) -> None:
        super().__init__(message)
        self.technique = technique

    @override
    def __reduce__(self) -> Any:
        return type(self), (self.technique, *self.args)


class TechniqueReport:
    """The record of one technique, or of another decision in a run, such as tuning.

    Attributes:
        sites: The state of each of its sites.
        state: The technique's state in the run.
        status: One line on the technique as a whole: ``"bf16-mixed: native bfloat16"``.
        details: Further text, such as a table.
        data: The details as plain values, for programs.
        is_on: Whether the technique found something to do.
        rests: Whether live trials decided against it.
        measured_as_a_whole: The measurement of all sites together; None if there is none.
        was_in_force: Whether a site was given back during the run, after all trials.
        rests_as: Why it does nothing, if it rests.
        waits_for_trials: Whether it does nothing until live trials switch it on.
    """

    def __init__(self, name: str, state: TechniqueState = "decided", status: str = "") -> None:
        self.sites = Sites(name)
        self.state, self.status, self.details = state, status, ""
        self.data: dict[str, Any] = {}
        self.measured_as_a_whole: Measurement | None = None
        self.is_on = self.rests = self.was_in_force = self.waits_for_trials = False
        self.rests_as = ""

    def change(self, state: TechniqueState, status: str = "", *, is_on: bool | None = None) -> None:
        """Changes the state and what is given with it. Nothing else changes the state."""
        assert state == self.state or state in TECHNIQUE_CHANGES.get(self.state, ()), f"{self.state} → {state}"
        self.state, self.status = state, status or self.status
        self.is_on = self.is_on if is_on is None else is_on

    @property
    def changes(self) -> dict[str, str]:
        """The sites that are on, each with what was changed there and what its trial measured."""
        return self.sites.reasons("ON")

    @property
    def refusals(self) -> dict[str, str]:
        """The sites that are off, each with the reason."""
        return self.sites.reasons("OFF")

    def figures(self) -> Measurement | None:
        """Returns the combined figures of the sites that are on, else of those that are off; None if there are none."""
        known = [(one.after, one.measured) for one in self.sites.values() if one.measured is not None]
        chosen = [figures for state, figures in known if state == "ON"] or [figures for _, figures in known]
        chosen += [self.measured_as_a_whole] if self.measured_as_a_whole is not None else []
        return together(chosen) if chosen else None

    @property
    def acts(self) -> bool:
        """Whether the technique affects the current steps."""
        return self.is_on and not self.rests

    @property
    def line(self) -> str:
        """The status, and whether the technique was switched off, and why."""
        had_something = self.is_on or len(self.refusals) < len(self.sites)
        is_off = self.rests and had_something
        return f"off, as {self.rests_as}; before: {self.status}" if is_off else self.status

    def outcome(self) -> str:
        """Returns what happened at the sites, in one line."""
        if self.changes:
            return "in force"
        reasons = Counter(self.refusals.values()).most_common(1)
        return f"left alone: {reasons[0][0] if reasons else 'nothing to do'}"

    def to_dict(self) -> dict[str, Any]:
        figures = self.figures()
        return {
            "on": self.acts,
            "rests": self.rests,
            "state": self.state,
            "status": self.line,
            "applied": self.changes,
            "refused": self.refusals,
            "details": self.details,
            "was_in_force": self.was_in_force,
            "waits_for_trials": self.waits_for_trials,
            **({"measured": figures.to_dict()} if figures is not None else {}),
            **({"data": self.data} if self.data else {}),
        }


class Report:
    """Names every site that was changed, and every site that was refused with the reason.

    Techniques have their names in the plan: ``"precision"``, ``"flash_attention"``, ``"gradient_checkpointing"``. The
    model itself is site ``""``, written ``(model)``.
    """

    def __init__(self, names: Iterable[str] = (), device: str = "", purse: Purse | None = None) -> None:
        self.device = device
        self.techniques = {name: TechniqueReport(name, "off", "off") for name in names}
        self.purse = purse
        self.page: Callable[[], str] | None = None  # returns the HTML page of a finished run
        self._notes: dict[str, str] = {}
        release = str(getattr(sys.modules.get("torch"), "__version__", "0.0"))
        major, minor = (int(number) for number in release.split(".")[:2])
        if device and (major, minor) > NEWEST_TORCH:
            self.note(f"torch {major}.{minor} is newer than those tested: changes are checked as ever")

    @property
    def notes(self) -> list[str]:
        """The remarks on the run as a whole."""
        return list(self._notes.values())

    @property
    def remarks(self) -> list[str]:
        """The notes on the run, and a line with the seconds of overhead that its purse has paid so far."""
        paid = self.purse.line() if self.purse is not None else ""
        return [*self.notes, *([f"paid so far, beside the user's own steps: {paid}"] if paid else [])]

    def of(self, technique: str) -> TechniqueReport:
        """Returns the record of a technique. Creates it at the first request."""
        if technique not in self.techniques:
            self.techniques[technique] = TechniqueReport(technique)
        return self.techniques[technique]

    def applied(self, technique: str) -> list[str]:
        """Returns the sites where ``technique`` is in force."""
        record = self.techniques.get(technique)
        return [] if record is None or record.rests else [*record.changes]

    def refused(self, technique: str) -> dict[str, str]:
        """Returns the sites that ``technique`` left alone or gave back, with the reasons."""
        return self.techniques[technique].refusals if technique in self.techniques else {}

    def settled(self, resting: Iterable[str], why: str = "live trials have settled without it") -> None:
        """Records which techniques live trials decided against, and why; none before the trials have settled."""
        resting = set(resting)
        for name, record in self.techniques.items():
            record.rests, record.rests_as = name in resting, why

    def note(self, line: str, key: str = "") -> None:
        """Adds a remark on the run as a whole, once.

        Args:
            line: The remark.
            key: The subject of the remark. A later remark with the same key replaces it. If it is empty, the remark
                stays.
        """
        if key:
            self._notes.pop(key, None)
        self._notes.setdefault(key or line, line)

    def summary(self) -> str:
        """Returns one line for each technique: its status, and how many sites it changed and left alone."""
        lines = [f"lightning-accel on {self.device}"] if self.device else ["lightning-accel"]
        for name, record in self.techniques.items():
            counts = [f"{len(record.changes)} sites"] if record.changes else []
            counts += [f"{len(record.refusals)} left alone"] if record.refusals else []
            tail = f" ({', '.join(counts)})" if counts else ""
            lines.append(f"  {'+' if record.acts else '-'} {name}: {record.line}{tail}")
        lines += [f"  ! {remark}" for remark in self.remarks]
        return "\n".join(lines)

    def to_text(self) -> str:
        """Returns the whole report. Sites with the same remark share a line."""
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
            "techniques": {name: record.to_dict() for name, record in self.techniques.items()},
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Returns the page of a run that has left a record, otherwise text, for notebooks."""
        if self.page is not None and (page := self.page()):
            return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 85vh; border: 0"></iframe>'
        return f"<pre>{escape(self.to_text())}</pre>"


def _grouped(remarks: dict[str, str], shown: int = 6) -> list[str]:
    lines = []
    for remark, count in Counter(remarks.values()).items():
        sites = [site or "(model)" for site, text in remarks.items() if text == remark]
        names = ", ".join(sites[:shown]) + (f", … and {count - shown} more" if count > shown else "")
        lines.append(f"  {names}: {remark}")
    return lines


def one_line(error: BaseException) -> str:
    """Returns the class of an exception and the first line of its message."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
