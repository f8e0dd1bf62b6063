"""Puts a plan to work on one model: finds the sites, runs the trials, applies what they allow, reports, undoes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_accel.core.host import Host
from lightning_accel.core.open_purse import OpenPurse
from lightning_accel.core.optimizers import KnownOptimizers
from lightning_accel.core.patch import PatchSet
from lightning_accel.core.purse import Purse
from lightning_accel.core.report import AccelError, AccelWarning, Report, TechniqueReport
from lightning_accel.core.states import VerdictKind
from lightning_accel.technique_run import TechniqueRun
from lightning_accel.techniques.arms import Arm
from lightning_accel.techniques.base import LoaderTerms, Technique
from lightning_accel.techniques.technique_context import Verdict, Verdicts
from lightning_accel.techniques.technique_events import Added
from lightning_accel.trial_steps import TrialSteps

T = TypeVar("T", bound=Technique)


class Engine:
    """A plan at work on a model.

    Args:
        model: The module to accelerate; edited in place, and restored by :meth:`undo`.
        host: The machine it runs on.
        techniques: In the order in which they are applied.
        names: The names of all techniques that there are, for the report.
        strict: Whether to raise where the default is to warn.
        agree: Maps a value of this process, its verdicts say, to the one that holds for all; None with one process.
        gather: Maps a value of this process to those of all, in the order of their ranks; None with one process.
        is_sharded: Whether the model's parameters are, or will be, sharded over processes.
        decisions: Verdicts of an earlier run that hold without another trial.
        purse: What the run may pay for trials; None if there is no limit.
        begins: Whether the techniques go to work at once, or when :meth:`begin` is called.
    """

    def __init__(
        self,
        model: nn.Module,
        host: Host,
        techniques: Sequence[Technique],
        *,
        names: Sequence[str] = (),
        strict: bool = False,
        agree: Callable[[Any], Any] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
        is_sharded: bool = False,
        decisions: Mapping[str, Verdicts] | None = None,
        purse: Purse | None = None,
        begins: bool = True,
    ) -> None:
        self.model = model
        self.host = host
        self.report = Report([*names, *(technique.name for technique in techniques)], host.described, purse)
        self.decisions = dict(decisions or {})
        self._strict, self._is_sharded = strict, is_sharded
        self._runs: list[TechniqueRun] = []
        self.trial_steps = TrialSteps(model, self.report, lambda: self._active, gather)
        self.has_edits = False  # whether forward and loss of a step may run otherwise than the user wrote them
        # Read off the states of the techniques when they change, and not in every step: see _refresh.
        self._at_work: Sequence[TechniqueRun] = ()  # those that a step has to do with
        self._preparing: Sequence[TechniqueRun] = ()  # those that a batch has to do with
        self._stage: str | None = None  # of the current step
        self._optimizers = KnownOptimizers(model)
        # Before both trial steps: a loop may make its optimizer in its first step.
        self._searches_left = 2
        for technique in techniques:
            technique.run.agree, technique.run.purse = agree, purse or OpenPurse(technique.name)
            self._enter(technique)
        self._active = [*self._runs]
        with self._undone_if_it_raises():
            for run in self._active:
                run.find_sites(model, host)
        if begins:
            self.begin()

    def costs_s(self, step_s: float) -> dict[str, float]:
        """Estimates the seconds that techniques cost at first if a step takes ``step_s``. Free ones are left out."""
        # Others answer a lack of memory, and are at work.
        waiting = [run for run in self._active if run.patches and run.record.state == "waiting"]
        return {run.name: cost_s for run in waiting if (cost_s := run.cost_s(step_s))}

    def begin(self, left_out: Mapping[str, str] | None = None) -> None:
        """Starts the techniques: those without a trial act from now on, the others are tried in the next steps.

        Args:
            left_out: The techniques that do not start, each with the reason.
        """
        for run in self._active:
            if left_out and run.name in left_out:
                run.leave_out(left_out[run.name])
        self._active = [run for run in self._active if run.is_active]
        self.trial_steps.next = 0 if self._active else None
        with self._undone_if_it_raises():
            for run in self._active:
                run.apply_early()
        self.trial_steps.compare({run.name: {patch.site for patch in run.patches} for run in self._runs})
        for run in self._active:
            if run.traits.trial_step is None or not run.patches:
                run.record.change("decided")
        self._refresh()
        self.carry_out(self.decisions)

    def step(self, stage: str = "train", *, may_try: bool | None = None) -> AbstractContextManager[None]:
        """Enter it around forward and loss of every step.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
            may_try: Whether this step may be one of the trial steps; by default only where gradients are due.
        """
        if self.trial_steps.next is not None:
            if may_try is None:
                may_try = stage == "train" and torch.is_grad_enabled()
            if may_try:
                if self._searches_left and stage == "train":
                    self._search_optimizers()
                return self._trial(stage)
        if not self._at_work:
            return nullcontext()
        contexts = [run.ask("begin a step", run.technique.step, stage, otherwise=_NOTHING) for run in self._at_work]
        around = [each for each in zip(self._at_work, contexts, strict=True) if not isinstance(each[1], nullcontext)]
        return self._step_within(around, stage) if around else _UnderWay(self, stage)

    def batch(self, batch: Any, stage: str | None = None) -> Any:
        """Passes a batch that is on the device through the techniques.

        Args:
            batch: Any structure of tensors.
            stage: As in :meth:`step`. None stands for the stage of the current step, else for ``"train"`` or
                ``"validate"`` as the model's own mode has it.
        """
        if not self._preparing:
            return batch
        stage = stage or self._stage or ("train" if self.model.training else "validate")
        for run in self._preparing:
            batch = run.ask("take a batch", run.technique.batch, batch, stage, otherwise=batch)
        return batch

    def loader(self, loader: Any, terms: LoaderTerms) -> Any:
        """Passes a loader of the training through the techniques; returns what is iterated in its place."""
        for run in self._active:
            loader = run.ask("change a loader", run.technique.loader, loader, terms, otherwise=loader)
        return loader

    def add_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Shows the techniques optimizers that train the model. It skips those that they know already."""
        self._show(self._optimizers.told(optimizers))

    def _show(self, named: Mapping[str, Optimizer]) -> None:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in named.values())
        for run in self._active if named else ():
            run.ask(f"look at {kinds}", run.edit_optimizers, named, otherwise=None)
        self.apply_updates()

    def _search_optimizers(self) -> None:
        self._searches_left -= 1
        reading = [run for run in self._active if type(run.technique).optimizer_sites is not Technique.optimizer_sites]
        is_read = any(run.traits.edits_optimizers or run in self._at_work for run in reading)
        if is_read:
            self._show(self._optimizers.searched())
        for run in self._active:
            if run.traits.edits_optimizers and not self._searches_left and not run.has_edits:
                run.warn_if_missing()
                run.record.status = run.context.status or run.record.outcome()

    @contextmanager
    def _trial(self, stage: str) -> Iterator[None]:
        with _UnderWay(self, stage), self.trial_steps.around(stage):
            yield

    @contextmanager
    def _step_within(self, contexts: Iterable[tuple[TechniqueRun, Any]], stage: str) -> Iterator[None]:
        with _UnderWay(self, stage), ExitStack() as stack:
            for run, context in contexts:
                run.ask("begin a step", stack.enter_context, context, otherwise=None)
            yield

    @contextmanager
    def _undone_if_it_raises(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.undo()
            raise

    # -- between two steps -------------------------------------------------------------------------------------

    @property
    def is_at_work(self) -> bool:
        """Whether a technique has something to do, or may have once there are optimizers."""
        return bool(self._at_work) or any(run.traits.edits_optimizers for run in self._active)

    @property
    def is_trying(self) -> bool:
        """Whether the next step that may be tried on is one of the trial steps."""
        return self.trial_steps.next is not None

    def has(self, name: str) -> bool:
        """Whether a technique of this name is in force, or on trial."""
        return self.report.of(name).is_on and any(run.name == name for run in self._active if not run.is_disabled)

    def technique(self, kind: type[T]) -> T | None:
        """The technique of this class; None if this run has none."""
        return next((run.technique for run in self._runs if isinstance(run.technique, kind)), None)

    def arms(self) -> list[Arm]:
        """What live trials may switch. The list is complete once no technique is tried any more."""
        found = [arm for run in self._active if (arm := run.ask("offer choices", run.arm, otherwise=None)) is not None]
        for arm in found:
            self.report.of(arm.name).waits_for_trials = arm.starts_off or arm.setup is not None
        return found

    @property
    def without_arm(self) -> set[str]:
        """The techniques that live trials could switch, and that had done nothing when they asked."""
        return {run.name for run in self._active if run.had_no_arm}

    def disable(self, names: Iterable[str], *, pauses: Callable[[str], bool] = lambda name: False) -> None:
        """Leaves these techniques, and no others, out of the next steps: their arms are off.

        Of techniques without an arm, ``pauses`` says which have to leave the next steps alone.
        """
        self.apply_updates()
        names = set(names)
        for run in self._runs:
            run.is_disabled = run.pause(pauses(run.name)) or run.name in names
        self._refresh()

    def apply_updates(self) -> None:
        """Acts on what techniques have said in the course of a step, also on those that are disabled."""
        for run in self._active:
            if run.context.is_new:
                changes = run.take_notes()
                is_given_back = any((one.before, one.after) == ("ON", "OFF") for one in changes)
                run.record.was_in_force |= is_given_back and not self.is_trying

    def spoilt(self) -> list[tuple[str, str]]:
        """Returns, once, which techniques made the last step differ from the user's own step, each with how."""
        found = [(run.name, run.context.spoilt) for run in self._active if run.context.spoilt]
        for run in self._active:
            run.context.spoilt = ""
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
        else:
            added.apply_early()
        untried = PatchSet(patch for patch in added.patches if patch.site not in (known or {}))
        event = Added(name, untried, technique.run.protects)
        self._refresh()
        for run in [*self._active]:
            run.tell(event)
        added.settle()
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

    def revert_all(
        self, reason: str, name: str | None = None, kind: VerdictKind = "failed", *, keeps_optimizers: bool = False
    ) -> None:
        """Undoes edits for the rest of the run, and remembers it for a resumed one.

        Args:
            reason: Why.
            name: The technique whose edits are undone; None for all techniques.
            kind: The verdict on them. Only ``"refused"`` holds for later runs of the program.
            keeps_optimizers: Whether optimizers stay as they are: if ranks round differently, their weights diverge.
        """
        for run in reversed(self._active):
            if name in (None, run.name) and not (keeps_optimizers and run.traits.edits_optimizers):
                run.revert(reason, kind)

    def undo(self) -> None:
        """Undoes every edit: the model is again the one that was passed in. The report stays.

        If a technique raises, the error comes out once all the others are undone.
        """
        with ExitStack() as stack:  # whose last callback is called first
            stack.callback(self._refresh)
            for run in self._runs:
                stack.callback(run.close)

    def degrade(self, message: str) -> None:
        """Says that something asked for is not done: a warning, or an error when the plan is strict."""
        if self._strict:
            raise AccelError(f"{message} (strict=True)")
        self.report.note(message)
        warnings.warn(message, AccelWarning, stacklevel=3)

    def _enter(self, technique: Technique) -> bool:
        """Lets a technique take part. Returns False if it cannot on this machine."""
        traits = technique.traits
        reason = technique.unavailable(self.host) or traits.lacks(self.host)
        if reason is None and self._is_sharded and traits.why_not_sharded:
            reason = f"not with sharded parameters: {traits.why_not_sharded}"
        record = self.report.of(technique.name)
        if reason is None:
            record.change("waiting")
            self._runs.append(TechniqueRun(technique, record, self.decisions, self.degrade, self._refresh))
            return True
        record.change("unavailable", reason)
        if technique.run.explicit or not technique.run.on_by_default:  # nobody will miss a default of ours
            self.degrade(f"{technique.name}: {reason}")
        return False

    def _refresh(self) -> None:
        """Reads off the states of the techniques what steps and batches have to do with."""
        self._active = [run for run in self._runs if run.is_active]
        awake = [run for run in self._active if not run.is_disabled]
        acting = [run for run in awake if run.traits.acts_without_sites or run.context.watches_on]
        self._at_work = [run for run in awake if run in acting or run.has_edits]
        self.has_edits = any(run.traits.alters_steps and (run in acting or run.patches) for run in awake)
        self._preparing = [run for run in self._at_work if type(run.technique).batch is not Technique.batch]
        if not self._active:
            self.trial_steps.next = None


_NOTHING: AbstractContextManager[Any] = nullcontext()


class _UnderWay:
    """Tells the engine that a step runs, and that it is over. Each step pays for it, so it is no generator."""

    __slots__ = ("_engine", "_stage")

    def __init__(self, engine: Engine, stage: str) -> None:
        self._engine = engine
        self._stage = stage

    def __enter__(self) -> None:
        self._engine._stage = self._stage

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._engine._stage = None
        if kind is None:
            self._engine.apply_updates()
