"""What a technique has to say in the course of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Self

from lightning_accel.core.measured import Measured


@dataclass(frozen=True)
class Verdict:
    """What a trial decided about one site.

    Attributes:
        keep: Whether the patch stays.
        reason: What was measured, or why not.
        choices: What a technique decided in more detail than to keep or not: by the kind of call.
        measured: The figures of ``reason``; None: nothing was measured.
    """

    keep: bool
    reason: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    measured: Measured | None = None

    def to_dict(self) -> dict[str, Any]:
        """Of plain values, for checkpoints and JSON."""
        measured = None if self.measured is None else self.measured.to_dict()
        return {"keep": self.keep, "reason": self.reason, "choices": dict(self.choices), "measured": measured}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """What :meth:`to_dict` gave.

        Raises:
            KeyError, TypeError: It did not.
        """
        measured = state["measured"]
        return cls(**{**state, "measured": None if measured is None else Measured.from_dict(measured)})


Verdicts = dict[str, Verdict]


@dataclass(eq=False)
class Notes:
    """One technique's word to the run. It is acted on as soon as the step under way is over.

    Attributes:
        status: One line for the report; empty: the sites are counted.
        details: What the full report says below the status, several lines perhaps.
        measured: What was measured of the technique as a whole; None: nothing yet.
        is_new: Whether something was said that nobody has acted on.
        spoilt: How the step under way has gone otherwise than the user's would; who can, runs it again without the
            technique. Empty: it has not.
    """

    status: str = ""
    details: str = ""
    measured: Measured | None = None
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

    def refuse(self, site: str, why: str, measured: Measured | None = None) -> None:
        """The patch at ``site`` must be taken back, here and in resumed runs."""
        self._refused[site] = Verdict(keep=False, reason=why, measured=measured)
        self.is_new = True

    def revise(self, site: str, verdict: Verdict) -> None:
        """The technique itself has changed what it does at ``site``; ``verdict`` is what now holds there."""
        self._revised[site] = verdict
        self.is_new = True

    def warn(self, message: str) -> None:
        """Something that was asked for is not done. Said once, however often it is called; an error if ``strict``."""
        if message not in self._warned:
            self._warned.add(message)
            self._warnings.append(message)
            self.is_new = True

    def take(self) -> tuple[Verdicts, Verdicts, list[str]]:
        """What was refused, revised and warned of since the last call."""
        taken = self._refused, self._revised, self._warnings
        self._refused, self._revised, self._warnings, self.is_new = {}, {}, [], False
        return taken
