"""One technique in one run: its edits, and what the report says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from lightning_accel.core.checks import SettingError
from lightning_accel.core.host import Host
from lightning_accel.core.measured import Measurement
from lightning_accel.core.oom_errors import is_out_of_memory
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.report import AccelError, TechniqueReport, one_line
from lightning_accel.core.states import SiteChanged, VerdictKind
from lightning_accel.techniques.base import Refusal, Technique
from lightning_accel.techniques.notes import Verdict, Verdicts

Decisions = dict[str, Verdicts]
"""Technique → site → verdict."""

R = TypeVar("R")


class TechniqueRun:
    """A technique at work on a model; ``record`` has its state and that of its sites.

    Args:
        technique: The technique.
        record: Its part of the report.
        decisions: The verdicts of the run; those on this technique are added.
        degrade: Called with what was asked for and is not done.
        refresh: Called after a change of what the technique has to do in a step.
    """

    def __init__(
        self,
        technique: Technique,
        record: TechniqueReport,
        decisions: Decisions,
        degrade: Callable[[str], None],
        refresh: Callable[[], None],
    ) -> None:
        self.technique, self.name, self.notes = technique, technique.name, technique.notes
        self.record = record
        self.patches, self.optimizer_patches = PatchSet(), PatchSet()  # in force or not yet
        self.is_disabled = False  # by live trials, for the steps to come
        self.is_closed = False
        self._decisions, self._degrade, self._refresh = decisions, degrade, refresh

    @property
    def is_active(self) -> bool:
        """Whether the technique takes part in the run."""
        return not self.is_closed and self.record.state in ("waiting", "decided")

    @property
    def has_edits(self) -> bool:
        """Whether it has edits, in force or not yet."""
        return bool(self.patches or self.optimizer_patches)

    # -- sites -------------------------------------------------------------------------------------------------

    def find_sites(self, model: nn.Module, host: Host) -> None:
        """Takes up what the technique finds in the model."""
        one, nothing = self.technique, list[Patch | Refusal]()
        found = self.ask(f"look at {type(model).__name__}", lambda: [*one.patches(model, host)], otherwise=nothing)
        if not self.is_active:
            return
        for claim in found:
            self._propose(claim, self.patches)
        is_on = one.acts_without_sites or bool(self.patches)
        if not one.edits_optimizers:
            self.warn_if_missing()
        waits_for = "the first step" if self.patches else "optimizers" if one.edits_optimizers else ""
        status = self.notes.status or (f"waiting for {waits_for}" if waits_for else "no site in this model")
        self.record.change("waiting" if waits_for or is_on else "decided", status, is_on=is_on)
        self.take_notes()

    def edit_optimizers(self, named: Mapping[str, Optimizer]) -> None:
        """Takes up what the technique finds in optimizers, and puts it in force at once."""
        for claim in self.technique.optimizers(named):
            verdict = self._decisions.get(self.name, {}).get(claim.site)
            if verdict is not None and not verdict.keep:
                claim = Refusal(claim.site, verdict.reason)
            self._propose(claim, self.optimizer_patches)
            if isinstance(claim, Patch):
                self._apply(claim, claim.change)
                self.settle()

    def warn_if_missing(self) -> None:
        """Warns if the user asked for the technique by name and it has found nothing to do."""
        if self.technique.explicit and not self.has_edits and not self.technique.acts_without_sites:
            reason = "; ".join(self.record.refusals.values()) or "this model has nothing for it"
            self._degrade(f"{self.name} was asked for and found no site: {reason}")

    def apply_early(self) -> None:
        """Puts the edits in force, before their trial if there is one."""
        for patch in list(self.patches):
            self._apply(patch, patch.change)
        if self.technique.trial_step is None and self.patches:
            self.settle()

    def conclude(self, verdicts: Verdicts) -> None:
        """Applies the verdicts of a trial. If the trial was complete, keeps them for resumed and later runs, too."""
        if all(verdict.kind != "too_dear" for verdict in verdicts.values()):
            self._remember(verdicts)
        self.carry_out(verdicts)

    def carry_out(self, verdicts: Verdicts) -> None:
        """Puts the edits in force that these verdicts keep, and undoes the others."""
        self.record.change("decided")
        self.technique.decided(verdicts)
        for patch in list(self.patches):
            verdict = verdicts.get(patch.site) or Verdict("untried", "has no verdict: not seen in its trial")
            if verdict.keep:
                self._apply(patch, ": ".join(filter(None, [patch.change, verdict.reason])), verdict.measured)
            else:
                self._refuse(patch.site, verdict.reason, verdict.measured)
        self.settle()

    def settle(self) -> None:
        """Tells the technique, and then the report, that its edits have changed."""
        self.ask("settle", self.technique.settled, otherwise=None)
        if not self.is_active:
            return
        self._refresh()
        record = self.record
        record.is_on = self.technique.acts_without_sites or bool(record.changes)
        record.status = self.notes.status or record.outcome()
        if self.technique.explicit and not record.is_on:
            self._degrade(f"{self.name} was asked for and is not in force anywhere: {record.status}")

    def _propose(self, claim: Patch | Refusal, patches: PatchSet) -> None:
        if isinstance(claim, Refusal):
            self.record.sites.change(claim.site, "OFF", claim.reason)
        else:
            patches.add(claim)
            self.record.sites.change(claim.site, "PROPOSED", claim.change)

    def _apply(self, patch: Patch, remark: str, measured: Measurement | None = None) -> None:
        try:
            patch.apply()
        except Exception as error:
            self._refuse(patch.site, f"could not be applied: {type(error).__name__}: {error}", measured)
        else:
            self.record.sites.change(patch.site, "ON", remark, measured)

    def _refuse(self, site: str, reason: str, measured: Measurement | None = None) -> SiteChanged:
        """Undoes an edit for good."""
        for patches in (self.patches, self.optimizer_patches):
            if site in patches:
                patches.drop(site)
        return self.record.sites.change(site, "OFF", reason, measured)

    def _remember(self, verdicts: Verdicts) -> None:
        """Has verdicts hold for resumed and later runs, too."""
        if self.technique.remembers:
            self._decisions[self.name] = self._decisions.get(self.name, {}) | verdicts

    # -- what the technique says -------------------------------------------------------------------------------

    def take_notes(self) -> list[SiteChanged]:
        """Acts on what the technique has said; returns the changes of sites that come of it."""
        refused, revised, warned = self.notes.take()
        record = self.record
        changes = [self._refuse(site, one.reason, one.measured) for site, one in refused.items()]
        for site, one in revised.items():
            changes.append(record.sites.change(site, "ON" if one.keep else "OFF", one.reason, one.measured))
        if changes:
            self._remember(refused | revised)
            self.settle()
        record.status, record.details = self.notes.status or record.status, self.notes.details
        record.measured_as_a_whole = self.notes.measured
        for message in warned:
            self._degrade(message)
        return changes

    def ask(self, what: str, call: Callable[..., R], *args: Any, otherwise: R) -> R:
        """Calls the technique; reverts it, with a warning, if it raises an error.

        Errors that tell the user something go through: a ``ValueError`` on a setting, an ``AccelError``. So does a lack
        of memory.
        """
        try:
            return call(*args)
        except Exception as error:
            told = (AccelError, SettingError if self.technique.on_by_default else ValueError)
            if isinstance(error, told) or self.technique.is_part_of_training or is_out_of_memory(error):
                raise
            reason = f"could not {what}: {one_line(error)}"
        if self.is_active:
            self.revert(reason, "refused")
        self._degrade(f"{self.name} {reason}")
        return otherwise

    def enter(self, stack: ExitStack, what: str, make: Callable[..., Any], *args: Any) -> Any:
        """Enters a context that the technique makes; returns what it yields, None if the technique raised."""
        return self.ask(what, lambda: stack.enter_context(make(*args)), otherwise=None)

    # -- the end -----------------------------------------------------------------------------------------------

    def leave_out(self, reason: str) -> None:
        """Undoes all edits before they were tried."""
        self.record.change("left out", reason, is_on=False)
        for patch in list(self.patches):
            self._refuse(patch.site, reason)

    def revert(self, reason: str, kind: VerdictKind) -> None:
        """Undoes all edits for the rest of the run, and remembers it for a resumed one.

        The technique is closed when the run ends: layouts that DistributedDataParallel counts on are held until then.
        """
        self.record.change("reverted", f"taken back: {reason}", is_on=False)
        for patch in [*self.patches, *self.optimizer_patches]:
            self._refuse(patch.site, reason)
            self._remember({patch.site: Verdict(kind, reason)})
        self.notes.take()
        self.ask("settle", self.technique.settled, otherwise=None)
        self._refresh()

    def close(self) -> None:
        """Undoes all edits and releases the technique. The report stays."""
        if not self.is_closed:
            self.optimizer_patches.undo()
            self.patches.undo()
            self.ask("close", self.technique.close, otherwise=None)
            self.is_closed = True
