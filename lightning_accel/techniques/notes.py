"""What a technique tells the run: verdicts on its sites, and lines for the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from typing_extensions import Self

from lightning_accel.core.measured import Measurement
from lightning_accel.core.states import VerdictKind


@dataclass(frozen=True)
class Verdict:
    """What was decided about one site.

    Attributes:
        kind: ``"kept"``, or why not: ``"refused"`` for its numbers or its time, ``"failed"`` with an error,
            ``"untried"`` as nothing called it, ``"too_dear"`` for this run to try to the end.
        reason: What was measured, or why the site is not changed.
        choices: What the technique decided for each kind of call.
        measured: The figures of ``reason``; None if nothing was measured.
    """

    kind: VerdictKind
    reason: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    measured: Measurement | None = None

    @property
    def keep(self) -> bool:
        """Whether the patch stays."""
        return self.kind == "kept"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints and JSON."""
        return {**asdict(self), "measured": None if self.measured is None else self.measured.to_dict()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """The verdict of which :meth:`to_dict` gave the values.

        Raises:
            KeyError, TypeError, ValueError: The values are not those of a verdict.
        """
        measured = state["measured"]
        if state["kind"] not in get_args(VerdictKind):
            raise ValueError(f"{state['kind']!r} is no kind of verdict")
        return cls(**{**state, "measured": None if measured is None else Measurement.from_dict(measured)})


Verdicts = dict[str, Verdict]
"""Site → verdict."""


@dataclass(eq=False)
class Notes:
    """What one technique tells the run. The run acts on it as soon as the current step is over.

    Attributes:
        status: One line for the report; if it is empty, the report counts the sites.
        details: What the full report says below the status; it may have several lines.
        measured: What was measured of the technique as a whole; None if nothing was.
        is_new: Whether something was said on which nobody has acted yet.
        spoilt: How the current step differs from the user's own; empty if it does not. A run that can repeat the step
            repeats it without the technique.
    """

    status: str = ""
    details: str = ""
    measured: Measurement | None = None
    is_new: bool = False
    spoilt: str = ""
    _refused: Verdicts = field(default_factory=dict, init=False)
    _revised: Verdicts = field(default_factory=dict, init=False)
    _warnings: list[str] = field(default_factory=list, init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("status", "details", "measured") and value != getattr(self, name):
            self.is_new = True
        super().__setattr__(name, value)

    def refuse(self, site: str, why: str, measured: Measurement | None = None, kind: VerdictKind = "refused") -> None:
        """Has the patch at ``site`` undone, here and in resumed runs."""
        self._refused[site] = Verdict(kind, why, measured=measured)
        self.is_new = True

    def revise(self, site: str, verdict: Verdict) -> None:
        """Reports that the technique itself has changed what it does at ``site``, and that ``verdict`` now holds."""
        self._revised[site] = verdict
        self.is_new = True

    def warn(self, message: str) -> None:
        """Warns once that something that was asked for is not done; with ``strict``, raises an error."""
        if message not in self._warned:
            self._warned.add(message)
            self._warnings.append(message)
            self.is_new = True

    def take(self) -> tuple[Verdicts, Verdicts, list[str]]:
        """Returns what was refused, revised and warned of since the last call."""
        taken = self._refused, self._revised, self._warnings
        self._refused, self._revised, self._warnings, self.is_new = {}, {}, [], False
        return taken
