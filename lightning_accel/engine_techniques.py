"""The techniques of one run: which there are, which take part, and what may happen to them between two steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from torch import nn

from lightning_accel.core.host import Host
from lightning_accel.core.patch import PatchSet
from lightning_accel.core.report import AccelError, AccelWarning, Report, TechniqueReport
from lightning_accel.core.states import VerdictKind
from lightning_accel.technique_run import Decisions, TechniqueRun
from lightning_accel.techniques.arms import Arm
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.notes import Verdict, Verdicts

T = TypeVar("T", bound=Technique)


class EngineTechniques:
    """What may happen to techniques between two steps: a part of :class:`~lightning_accel.engine.Engine`."""

    model: nn.Module
    host: Host
    report: Report
    decisions: Decisions  # that hold, of this run and of an earlier one
    has_edits = False  # whether forward and loss of a step may run otherwise than the user wrote them
    _strict: bool
    _is_sharded: bool
    _runs: list[TechniqueRun]
    _trial_step: int | None = None  # the next: 0, or 1 for what has to see the model as the others leave it
    # Read off the states of these when they change, and not in every step: see _refresh.
    _active: list[TechniqueRun]
    _at_work: Sequence[TechniqueRun] = ()  # those of them that a step has to do with
    _preparing: Sequence[TechniqueRun] = ()  # those of them that a batch has to do with

    @property
    def is_at_work(self) -> bool:
        """Whether a technique has something to do, or may have once there are optimizers."""
        return bool(self._at_work) or any(run.technique.edits_optimizers for run in self._active)

    @property
    def is_trying(self) -> bool:
        """Whether the next step that may be tried on is one of the trial steps."""
        return self._trial_step is not None

    def has(self, name: str) -> bool:
        """Whether a technique of this name is in force, or on trial."""
        return self.report.of(name).is_on and any(run.name == name for run in self._active if not run.is_disabled)

    def technique(self, kind: type[T]) -> T | None:
        """The technique of this class; None if this run has none."""
        return next((run.technique for run in self._runs if isinstance(run.technique, kind)), None)

    def arms(self) -> list[Arm]:
        """What live trials may switch. The list is complete once no technique is tried any more."""
        found: list[Arm] = []
        for run in self._active:
            found += run.ask("offer choices", lambda one: [*one.arms()], run.technique, otherwise=[])
        for arm in found:
            self.report.of(arm.name).waits_for_trials = arm.starts_off or arm.setup is not None
        return found

    def disable(self, names: Iterable[str]) -> None:
        """Leaves these techniques, and no others, out of the next steps: their arms are off."""
        self.apply_updates()
        names = set(names)
        for run in self._runs:
            run.is_disabled = run.name in names
        self._refresh()

    def apply_updates(self) -> None:
        """Acts on what techniques have said in the course of a step, also on those that are disabled."""
        for run in self._active:
            if run.notes.is_new:
                changes = run.take_notes()
                is_given_back = any((one.before, one.after) == ("ON", "OFF") for one in changes)
                run.record.was_in_force |= is_given_back and not self.is_trying

    def spoilt(self) -> list[tuple[str, str]]:
        """Returns, once, which techniques made the last step differ from the user's own step, each with how."""
        found = [(run.name, run.notes.spoilt) for run in self._active if run.notes.spoilt]
        for run in self._active:
            run.notes.spoilt = ""
        return found

    def carry_out(self, decisions: Mapping[str, Verdicts]) -> None:
        """Makes these verdicts hold now, without a trial of their own."""
        for run in self._active:
            if run.name in decisions:
                self.decisions[run.name] = decisions[run.name]
                run.carry_out(decisions[run.name])

    def add(self, technique: Technique) -> bool:
        """Adds a technique in mid-run, between two steps and after all others. Returns whether it has something to do.

        It replaces a technique of the same name. An earlier run's verdicts on it hold. Otherwise it is tried at the
        next calls of its sites, on a few samples: it is added for a lack of memory.
        """
        name = technique.name
        former = self._withdraw(name)
        self.report.techniques[name] = TechniqueReport(name, "off")
        if not self._enter(technique):
            return False
        added = self._runs[-1]
        added.is_disabled = any(run.is_disabled for run in former)
        added.find_sites(self.model, self.host)
        if added.is_active:
            added.record.change("decided")
        known = self.decisions.get(name)
        if known is not None:
            added.carry_out({patch.site: known.get(patch.site, Verdict("kept")) for patch in added.patches})
        elif technique.applied_before_trial:
            added.apply_early()
        technique.try_late(PatchSet(patch for patch in added.patches if patch.site not in (known or {})))
        added.settle()
        for run in self._active:
            run.technique.give_way(technique.protects(self.model))
        self.apply_updates()
        return added in self._at_work

    def withdraw(self, name: str, reason: str) -> None:
        """Removes a technique that was added in mid-run."""
        self._withdraw(name)
        self.report.techniques[name] = TechniqueReport(name, "reverted", f"taken back: {reason}")

    def _withdraw(self, name: str) -> list[TechniqueRun]:
        leaving = [run for run in self._active if run.name == name]
        for run in leaving:
            run.close()
            self.decisions.pop(name, None)
        self._refresh()
        return leaving

    def revert_all(self, reason: str, name: str | None = None, kind: VerdictKind = "failed") -> None:
        """Undoes edits for the rest of the run, and remembers it for a resumed one.

        Args:
            reason: Why.
            name: The technique whose edits are undone; None for all techniques.
            kind: The verdict on them. Only ``"refused"`` holds for later runs of the program.
        """
        for run in reversed(self._active):
            if name in (None, run.name):
                run.revert(reason, kind)

    def undo(self) -> None:
        """Undoes every edit: the model is again the one that was passed in. The report stays."""
        for run in reversed(self._runs):
            run.close()
        self._refresh()

    def degrade(self, message: str) -> None:
        """Says that something asked for is not done: a warning, or an error when the plan is strict."""
        if self._strict:
            raise AccelError(f"{message} (strict=True)")
        self.report.note(message)
        warnings.warn(message, AccelWarning, stacklevel=3)

    def _enter(self, technique: Technique) -> bool:
        """Lets a technique take part. Returns False if it cannot on this machine."""
        reason = technique.unavailable(self.host)
        if reason is None and self._is_sharded and technique.why_not_sharded:
            reason = f"not with sharded parameters: {technique.why_not_sharded}"
        record = self.report.of(technique.name)
        if reason is None:
            record.change("waiting")
            self._runs.append(TechniqueRun(technique, record, self.decisions, self.degrade, self._refresh))
            return True
        record.change("unavailable", reason)
        if technique.explicit or not technique.on_by_default:  # nobody will miss a default of ours
            self.degrade(f"{technique.name}: {reason}")
        return False

    def _refresh(self) -> None:
        """Reads off the states of the techniques what steps and batches have to do with."""
        self._active = [run for run in self._runs if run.is_active]
        awake = [(run, run.technique) for run in self._active if not run.is_disabled]
        acting = [run for run, one in awake if one.acts_without_sites or one.watches_on]
        self._at_work = [run for run, _ in awake if run in acting or run.has_edits]
        self.has_edits = any(one.alters_steps and (run in acting or run.patches) for run, one in awake)
        self._preparing = [run for run in self._at_work if type(run.technique).batch is not Technique.batch]
        if not self._active:
            self._trial_step = None
