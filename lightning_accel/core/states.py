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

SITE_CHANGES: Mapping[SiteState | None, tuple[SiteState, ...]] = {
    None: ("PROPOSED", "ON", "OFF"),
    "PROPOSED": ("ON", "OFF"),
    "ON": ("ON", "OFF"),
    "OFF": ("PROPOSED", "ON", "OFF"),
}
"""State → the states that may follow; docs/states.md says when. None stands for a site that nobody has named yet."""

TECHNIQUE_CHANGES: Mapping[TechniqueState, tuple[TechniqueState, ...]] = {
    "off": ("unavailable", "waiting", "decided"),
    "waiting": ("decided", "left out", "reverted"),
    "decided": ("reverted",),
}
"""State → the states that may follow; docs/states.md says when."""


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
        if after not in SITE_CHANGES[before]:
            raise ValueError(f"{self._technique}: the site {site!r} cannot change from {before} to {after}.")
        if after != before:
            self.pop(site, None)
        known = None if last is None else last.measured
        self[site] = SiteChanged(self._technique, site, before, after, reason, known if measured is None else measured)
        return self[site]

    def reasons(self, state: SiteState) -> dict[str, str]:
        """Returns the sites in this state, each with its reason."""
        return {site: one.reason for site, one in self.items() if one.after == state}
