"""One technique in one run: its edits and its part of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from lightning_accel.core.checks import SettingError
from lightning_accel.core.host import Host
from lightning_accel.core.measured import Measurement
from lightning_accel.core.oom_errors import is_out_of_memory
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.purse import TRIALS
from lightning_accel.core.report import AccelError, TechniqueReport, one_line
from lightning_accel.core.states import SiteChanged, VerdictKind
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.techniques.base import Technique, Traits
from lightning_accel.techniques.site import PausedPatch, Site
from lightning_accel.techniques.technique_context import Verdict, Verdicts
from lightning_accel.techniques.technique_events import Decided, Event, Paused, Settled, Switched

Decisions = dict[str, Verdicts]
"""Technique → site → verdict."""

R = TypeVar("R")


class TechniqueRun:
    """A technique applied to a model. ``record`` holds the states of the technique and of its sites.

    Args:
        technique: The technique.
        record: Its part of the report.
        decisions: The verdicts of the run, to which those on this technique are added.
        degrade: Called with a message if something that was requested is not done.
        refresh: Called after a change of what the technique does in a step.
    """

    def __init__(
        self,
        technique: Technique,
        record: TechniqueReport,
        decisions: Decisions,
        degrade: Callable[[str], None],
        refresh: Callable[[], None],
    ) -> None:
        self.technique, self.name, self.record = technique, technique.name, record
        self.context = technique.run
        self.patches, self.optimizer_patches = PatchSet(), PatchSet()  # applied or waiting
        self.is_disabled = False  # by live trials, for the following steps
        self.is_closed = False
        self._decisions, self._degrade, self._refresh = decisions, degrade, refresh
        self._variant: str | None = None  # the one that live trials have switched to
        self.had_no_arm = self._is_paused = False  # it had done nothing when they asked, and may do so later

    @property
    def is_active(self) -> bool:
        """Whether the technique takes part in the run."""
        return not self.is_closed and self.record.state in ("waiting", "decided")

    @property
    def traits(self) -> Traits:
        """Returns the technique's traits, some of which follow from its sites."""
        return self.technique.traits

    @property
    def has_edits(self) -> bool:
        """Whether the technique has edits, applied or waiting."""
        return bool(self.patches or self.optimizer_patches)

    # -- sites -------------------------------------------------------------------------------------------------

    def find_sites(self, model: nn.Module, host: Host) -> None:
        """Proposes the edits for the sites that the technique finds in the model."""
        one, nothing = self.traits, list[Patch]()
        find = self.technique.sites
        found = self.ask(f"look at {type(model).__name__}", lambda: [*find(model, host)], otherwise=nothing)
        if not self.is_active:
            return
        for claim in found:
            self._propose(claim, self.patches)
        is_on = one.acts_without_sites or bool(self.patches)
        if not one.edits_optimizers:
            self.warn_if_missing()
        waits_for = "the first step" if self.patches else "optimizers" if one.edits_optimizers else ""
        nothing_there = self.record.outcome() if self.record.refusals else "no site in this model"
        status = self.context.status or (f"waiting for {waits_for}" if waits_for else nothing_there)
        self.record.change("waiting" if waits_for or is_on else "decided", status, is_on=is_on)
        self.take_notes()

    def edit_optimizers(self, named: Mapping[str, Optimizer]) -> None:
        """Proposes and immediately applies the edits for the sites that the technique finds in optimizers."""
        for claim in self.technique.optimizer_sites(named):
            verdict = self._decisions.get(self.name, {}).get(claim.site)
            if verdict is not None and not verdict.keep:
                claim = Site(claim.site, why_not=verdict.reason)
            self._propose(claim, self.optimizer_patches)
            if not claim.why_not:
                self._apply(claim, claim.change)
                if self._variant is not None:
                    claim.switch(self._variant)
                self.settle()

    def warn_if_missing(self) -> None:
        """Warns if the user requested the technique by name and it has found no site."""
        if self.context.explicit and not self.has_edits and not self.traits.acts_without_sites:
            reason = "; ".join(dict.fromkeys(self.record.refusals.values())) or "this model has nothing for it"
            self._degrade(f"{self.name} was asked for and found no site: {reason}")

    def apply_early(self) -> None:
        """Applies the edits that precede their trial or need no trial."""
        is_early = self.traits.applied_before_trial or not self.context.verify
        if not is_early or (self.context.live is not None and self.context.live.starts_off):
            return
        for patch in list(self.patches):
            self._apply(patch, patch.change)
        if self.traits.trial_step is None and self.patches:
            self.settle()

    def cost_s(self, step_s: float) -> float:
        """Estimates the seconds that the technique costs at first if a step takes ``step_s``."""
        return self.context.setup_s + step_s * self.traits.trial_steps * (self.name not in self._decisions)

    def trial(self) -> AbstractContextManager[Verdicts]:
        """Returns the context of the forward pass that tests the edits. Without a trial, it keeps all edits."""
        if self.context.verify:
            return self.technique.trial(self.patches)
        return nullcontext({patch.site: Verdict("kept") for patch in self.patches})

    def conclude(self, verdicts: Verdicts) -> None:
        """Applies the verdicts of a trial, and remembers them for resumed and later runs if the trial was complete."""
        if all(verdict.kind != "too_dear" for verdict in verdicts.values()):
            self._remember(verdicts)
        elif (purse := self.context.purse) is not None and not any(verdict.keep for verdict in verdicts.values()):
            # It takes longer than it was expected to.
            purse.owed_s[self.name] = max(self.cost_s(purse.step_s or 0.0), 2 * purse.spent_s[TRIALS])
        self.carry_out(verdicts)

    def carry_out(self, verdicts: Verdicts) -> None:
        """Applies the edits that these verdicts keep, and undoes the others."""
        self.record.change("decided")
        self.tell(Decided(verdicts))
        for patch in list(self.patches):
            verdict = verdicts.get(patch.site) or Verdict("untried", "has no verdict: not seen in its trial")
            if verdict.keep:
                self._apply(patch, ": ".join(filter(None, [patch.change, verdict.reason])), verdict.measured)
            else:
                self._refuse(patch.site, verdict.reason, verdict.measured)
        self.settle()

    def settle(self) -> None:
        """Tells the technique that its edits have changed, and updates the report."""
        self.tell(Settled())
        if not self.is_active:
            return
        self._refresh()
        record = self.record
        record.is_on = self.traits.acts_without_sites or bool(record.changes)
        record.status = self.context.status or record.outcome()
        if self.context.explicit and not record.is_on:
            self._degrade(f"{self.name} was asked for and is not in force anywhere: {record.status}")

    # -- live trials -------------------------------------------------------------------------------------------

    def arm(self) -> Arm | None:
        """Returns what live trials may switch. None if there is nothing, or before the technique's own trial."""
        if self.context.live is None or (self.record.state == "waiting" and self.context.verify):
            return None
        patches = [*self.patches, *self.optimizer_patches]
        choices = tuple(dict.fromkeys(variant for patch in patches for variant in patch.variants))
        live, settle = self.context.live, max((patch.settle for patch in patches), default=0)
        choices = choices or live.variants
        self.had_no_arm = not choices
        if len(choices) > 1 and not live.starts_off and live.setup is None:
            self.switch(choices[0])  # optimizers of several kinds may have begun with different variants
        return Arm(self.name, choices, self.switch, settle, **vars(live)) if choices else None

    def switch(self, variant: str) -> None:
        """Switches all sites of the technique to a variant, or to the original, from the next step on."""
        if not self.is_active:  # of several ranks, this one has taken it back, and the others do not know yet
            return
        self._variant = variant
        patches = [*self.patches, *self.optimizer_patches]
        for patch in patches if variant != OFF else reversed(patches):
            patch.switch(variant)
        self.tell(Switched(variant))
        acting = [patch for patch in patches if patch.is_applied and variant in patch.variants]
        begun = [patch for patch in acting if patch.site not in self.record.changes]
        for patch in begun:
            self.record.sites.change(patch.site, "ON", patch.change)
        if begun:
            self.settle()

    def pause(self, is_paused: bool) -> bool:
        """Pauses a technique that had no arm, or lets it act again. Returns whether it is paused."""
        if self.had_no_arm and self.is_active and is_paused != self._is_paused:
            self._is_paused = is_paused
            for patch in self.patches:
                if isinstance(patch, PausedPatch):
                    patch.switch(OFF if is_paused else "on")
            self.tell(Paused(is_paused))
        return self._is_paused

    # -- sites, one by one -------------------------------------------------------------------------------------

    def _propose(self, claim: Patch, patches: PatchSet) -> None:
        if claim.why_not:
            self.record.sites.change(claim.site, "OFF", claim.why_not)
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
        """Undoes an edit permanently."""
        for patches in (self.patches, self.optimizer_patches):
            if site in patches:
                patches.drop(site)
        return self.record.sites.change(site, "OFF", reason, measured)

    def _remember(self, verdicts: Verdicts) -> None:
        """Stores verdicts for resumed and later runs."""
        if self.traits.remembers:
            self._decisions[self.name] = self._decisions.get(self.name, {}) | verdicts

    # -- messages from and to the technique --------------------------------------------------------------------

    def take_notes(self) -> list[SiteChanged]:
        """Applies the refusals, revisions and warnings that the technique has noted, and returns the changed sites."""
        refused, revised, warned = self.context.take()
        record = self.record
        changes = [self._refuse(site, one.reason, one.measured) for site, one in refused.items()]
        for site, one in revised.items():
            changes.append(record.sites.change(site, "ON" if one.keep else "OFF", one.reason, one.measured))
        if changes:
            self._remember(refused | revised)
            self.settle()
        record.status, record.details = self.context.status or record.status, self.context.details
        record.measured_as_a_whole = self.context.measured
        for message in warned:
            self._degrade(message)
        return changes

    def ask(self, what: str, call: Callable[..., R], *args: Any, otherwise: R) -> R:
        """Calls the technique, and reverts it with a warning if it raises an error.

        Errors for the user pass through: a ``ValueError`` on a setting, an ``AccelError``. So does an out-of-memory
        error.
        """
        try:
            return call(*args)
        except Exception as error:
            told = (AccelError, SettingError if self.context.on_by_default else ValueError)
            if isinstance(error, told) or self.traits.is_part_of_training or is_out_of_memory(error):
                raise
            reason = f"could not {what}: {one_line(error)}"
        if self.is_active:
            self.revert(reason, "refused")
        self._degrade(f"{self.name} {reason}")
        return otherwise

    def tell(self, event: Event) -> None:
        """Sends an event to the technique."""
        self.ask(f"hear of {type(event).__name__}", self.technique.on, event, otherwise=None)

    def enter(self, stack: ExitStack, what: str, make: Callable[..., Any], *args: Any) -> Any:
        """Enters a context that the technique makes, and returns what it yields. None if the technique raised."""
        return self.ask(what, lambda: stack.enter_context(make(*args)), otherwise=None)

    # -- the end -----------------------------------------------------------------------------------------------

    def leave_out(self, reason: str) -> None:
        """Undoes all edits before their trial."""
        self.record.change("left out", reason, is_on=False)
        for patch in list(self.patches):
            self._refuse(patch.site, reason)

    def revert(self, reason: str, kind: VerdictKind) -> None:
        """Undoes all edits for the rest of the run, and remembers this for a resumed run.

        The technique closes only when the run ends: DistributedDataParallel relies on its layouts until then.
        """
        self.record.change("reverted", f"taken back: {reason}", is_on=False)
        for patch in [*self.patches, *self.optimizer_patches]:
            self._refuse(patch.site, reason)
            self._remember({patch.site: Verdict(kind, reason)})
        self.context.take()
        self.tell(Settled())
        self.tell(Paused(True))  # sites that were to be asked again
        self._refresh()

    def close(self) -> None:
        """Undoes all edits and releases the technique. The report stays."""
        if not self.is_closed:
            self.optimizer_patches.undo()
            self.patches.undo()
            self.ask("close", self.context.at_end.close, otherwise=None)
            self.is_closed = True
