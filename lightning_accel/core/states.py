"""The states of a site and of a technique in a run, and two tables of all allowed changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_accel.core.measured import Measurement

SiteState = Literal["PROPOSED", "ON", "OFF"]

VerdictKind = Literal["kept", "refused", "failed", "untried", "too_dear"]
"""The outcomes of a trial. Only the first two judge the candidate: after the others it may be tried again."""

TechniqueState = Literal["off", "unavailable", "waiting", "decided", "left out", "reverted"]

SITE_CHANGES: Mapping[tuple[SiteState | None, SiteState], str] = {
    (None, "PROPOSED"): "the technique proposes an edit",
    (None, "ON"): "the technique acts beside the model: on batches, on a loader",
    (None, "OFF"): "the technique leaves the site alone",
    ("PROPOSED", "ON"): "the edit is applied: its trial allows it, or it needs no trial",
    ("PROPOSED", "OFF"): "its trial refuses the edit, or the edit cannot be applied",
    ("ON", "ON"): "the technique does something else there, or more is known about it",
    ("ON", "OFF"): "the edit is undone",
    ("OFF", "PROPOSED"): "the technique proposes an edit after all",
    ("OFF", "ON"): "the technique uses an edit that it has kept ready",
    ("OFF", "OFF"): "there is another reason",
}
"""(before, after) → when. None stands for a site that nobody has named yet."""

TECHNIQUE_CHANGES: Mapping[tuple[TechniqueState, TechniqueState], str] = {
    ("off", "unavailable"): "the machine lacks what the technique needs",
    ("off", "waiting"): "the plan has the technique",
    ("off", "decided"): "it is decided elsewhere, as the precision of a Trainer is",
    ("waiting", "decided"): "verdicts hold, or there is nothing to decide",
    ("waiting", "left out"): "the run cannot pay for its trial",
    ("waiting", "reverted"): "its edits are undone for the rest of the run",
    ("decided", "reverted"): "its edits are undone for the rest of the run",
}
"""(before, after) → when."""


@dataclass(frozen=True)
class SiteChanged:
    """One change of state at one site. The last change of a site is the one that holds.

    Attributes:
        technique: The technique's name.
        site: The qualified name of a module, ``""`` for the model itself, or a name like ``"optimizer 0"``.
        before: The previous state; None if the site is new.
        after: The new state.
        reason: What was changed there, or why the site is off.
        measured: The figures of its trial; None if there are none.
    """

    technique: str
    site: str
    before: SiteState | None
    after: SiteState
    reason: str = ""
    measured: Measurement | None = None


class Sites(dict[str, SiteChanged]):
    """The sites of one technique, each with its last change. Sites of one state are in the order of reaching it."""

    def __init__(self, technique: str) -> None:
        super().__init__()
        self._technique = technique

    def change(self, site: str, after: SiteState, reason: str = "", measured: Measurement | None = None) -> SiteChanged:
        """Changes the state of a site. Nothing else does.

        Raises:
            ValueError: :data:`SITE_CHANGES` does not have this change.
        """
        last = self.get(site)
        before = None if last is None else last.after
        if (before, after) not in SITE_CHANGES:
            raise ValueError(f"{self._technique}: the site {site!r} cannot change from {before} to {after}.")
        if after != before:
            self.pop(site, None)
        known = None if last is None else last.measured
        self[site] = SiteChanged(self._technique, site, before, after, reason, known if measured is None else measured)
        return self[site]

    def reasons(self, state: SiteState) -> dict[str, str]:
        """Returns the sites in this state, each with its reason."""
        return {site: one.reason for site, one in self.items() if one.after == state}
