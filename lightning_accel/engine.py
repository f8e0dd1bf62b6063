"""Puts a plan to work on one model: claims the sites, runs the trials, applies what they allow, reports, undoes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_accel.core.checks import SettingError
from lightning_accel.core.compiled import eager_where_compiled
from lightning_accel.core.heap import release_free_memory
from lightning_accel.core.host import Host
from lightning_accel.core.oom_errors import is_out_of_memory
from lightning_accel.core.open_purse import OpenPurse
from lightning_accel.core.optimizers import are_all, living_optimizers
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.purse import Purse
from lightning_accel.core.report import AccelError, Report, TechniqueReport, difference
from lightning_accel.core.trial import TOO_DEAR, one_line
from lightning_accel.edits import Edits
from lightning_accel.techniques.arms import Arm
from lightning_accel.techniques.base import LoaderTerms, Refusal, Technique
from lightning_accel.techniques.notes import Verdict, Verdicts

Decisions = dict[str, Verdicts]
T = TypeVar("T", bound=Technique)
R = TypeVar("R")


class Engine:
    """A plan at work on a model.

    Args:
        model: The module to accelerate; edited in place, and restored by :meth:`undo`.
        host: The machine it runs on.
        techniques: In the order in which they are applied.
        names: Those of all techniques that there are, for the report.
        strict: Whether to raise where the default is to warn.
        agree: Maps a value of this process, its verdicts say, to the one that holds for all; None with one process.
        gather: Maps a value of this process to those of all, in the order of their ranks; None with one process.
        is_sharded: Whether the model's parameters are, or will be, sharded over processes.
        decisions: Verdicts of an earlier run that hold without another trial.
        purse: What the run may pay for trials; None: whatever they take.
        begins: Whether the techniques go to work at once; else when :meth:`begin` is called.
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
        self.report = Report(device=host.described, purse=purse)
        self._edits = Edits(self.report, strict=strict)
        self.decisions: Decisions = dict(decisions or {})
        self._gather = gather or (lambda value: [value])
        self._is_sharded = is_sharded
        for technique in techniques:
            technique.agree, technique.purse = agree, purse or OpenPurse(technique.name)
        self._stage: str | None = None  # of the step under way
        self._optimizers: list[Optimizer] = []  # that the techniques know
        self._told: list[Optimizer] = []  # and those of them that were not found
        # Before both trial steps: a loop may make its optimizer in its first step.
        self._searches_left = 2
        for name in names or [technique.name for technique in techniques]:
            self.report.of(name).status = "off"
        self._techniques = [technique for technique in techniques if self._is_available(technique)]
        self._available = tuple(self._techniques)
        self._at_work: list[Technique] = []  # those that a step has to do with
        self._preparing: list[Technique] = []  # of these, those that a batch has
        self._has_edits = False
        self._resting: set[str] = set()  # whose arms are off
        self._trial_step: int | None = None
        self._added: set[str] = set()  # techniques that were put on in mid-run
        self._open = list(self._techniques)  # those that are not closed, among them such as stand aside
        self._owes_verdicts = False
        with self._undone_where_it_raises():
            for technique in self._techniques:
                self._claim(technique)
        if begins:
            self.begin()

    def costs_s(self, step_s: float) -> dict[str, float]:
        """What techniques will take at first, in seconds, about, where a step takes so long; only those that do."""
        costs = {
            one.name: one.setup_s + step_s * (one.trial_steps if one.name not in self.decisions else 0.0)
            for one in self._techniques
            if len(self._edits.on_model[one.name])
        }
        return {name: cost_s for name, cost_s in costs.items() if cost_s}

    def begin(self, left_out: Mapping[str, str] | None = None) -> None:
        """Has the techniques go to work: those that are not tried from now on, the others with the next step.

        Args:
            left_out: Techniques that do not, and why.
        """
        for name, reason in (left_out or {}).items():
            self._leave_out(name, reason)
        self._trial_step = 0 if self._techniques else None
        with self._undone_where_it_raises():
            for technique in list(self._techniques):
                if technique.applied_before_trial:
                    self._apply_early(technique)
        self._stay_together({name: {patch.site for patch in patches} for name, patches in self._edits.on_model.items()})
        self._find_at_work()
        self.carry_out(self.decisions)

    @contextmanager
    def _undone_where_it_raises(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.undo()
            raise

    def _leave_out(self, name: str, reason: str) -> None:
        for technique in [one for one in self._techniques if one.name == name]:
            for patch in list(self._edits.on_model[name]):
                self._edits.refuse(technique, patch.site, reason)
            self._techniques.remove(technique)
            record = self.report.of(name)
            record.is_on, record.status = False, reason

    def step(self, stage: str = "train", *, may_try: bool | None = None) -> AbstractContextManager[None]:
        """Enter it around forward and loss of every step.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
            may_try: Whether this step may be one of the trial steps; by default only where gradients are due.
        """
        if self._trial_step is not None:
            if may_try is None:
                may_try = stage == "train" and torch.is_grad_enabled()
            if may_try:
                if self._searches_left and stage == "train":
                    self._search_optimizers()
                return self._trial(stage)
        if not self._at_work:
            return nullcontext()
        contexts = [(one, self._ask(one, "begin a step", one.step, stage, otherwise=_NOTHING)) for one in self._at_work]
        around = [each for each in contexts if not isinstance(each[1], nullcontext)]
        return self._step_within(around, stage) if around else _UnderWay(self, stage)

    def batch(self, batch: Any, stage: str | None = None) -> Any:
        """What the techniques make of a batch that is on the device.

        Args:
            batch: Any structure of tensors.
            stage: As in :meth:`step`; None: that of the step that is under way, else ``"train"`` or ``"validate"`` as
                the model's own mode has it.
        """
        if not self._preparing:
            return batch
        stage = stage or self._stage or ("train" if self.model.training else "validate")
        for technique in self._preparing:
            batch = self._ask(technique, "take a batch", technique.batch, batch, stage, otherwise=batch)
        return batch

    def loader(self, loader: Any, terms: LoaderTerms) -> Any:
        """What is iterated over in the place of a loader of the training."""
        for technique in self._techniques:
            loader = self._ask(technique, "change a loader", technique.loader, loader, terms, otherwise=loader)
        return loader

    def add_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Shows optimizers that train the model to the techniques. Those that they know already are passed over."""
        told = list(optimizers)
        self._told += [one for one in told if all(one is not known for known in self._told)]
        self._take_up(told)

    def _take_up(self, optimizers: Iterable[Optimizer]) -> None:
        known = {id(optimizer) for optimizer in self._optimizers}
        new = [optimizer for optimizer in optimizers if id(optimizer) not in known]
        if not new:
            return
        named = {f"optimizer {index}": one for index, one in enumerate(new, start=len(self._optimizers))}
        self._optimizers += new
        kinds = ", ".join(type(optimizer).__name__ for optimizer in new)
        for technique in self._techniques:
            self._ask(technique, f"look at {kinds}", self._edit_optimizers, technique, named, otherwise=None)
            self._apply_updates(technique)

    def _edit_optimizers(self, technique: Technique, named: Mapping[str, Optimizer]) -> None:
        for claim in technique.optimizers(named):
            verdict = self.decisions.get(technique.name, {}).get(claim.site)
            if verdict is not None and not verdict.keep:
                claim = Refusal(claim.site, verdict.reason)
            self._edits.enter(technique, claim, self._edits.on_optimizers[technique.name])
            if isinstance(claim, Patch):
                self._edits.apply(technique, claim, claim.change)
                self._settle(technique)

    def _search_optimizers(self) -> None:
        self._searches_left -= 1
        reading = [one for one in self._techniques if type(one).optimizers is not Technique.optimizers]
        is_read = any(one.edits_optimizers or one in self._at_work for one in reading)
        if is_read and not are_all(self._told, self.model):  # to look for others takes a while
            self._take_up(living_optimizers(self.model))
        for technique in self._techniques:
            if technique.edits_optimizers and not self._searches_left and not self._edits.has(technique):
                self._edits.miss(technique)
                record = self.report.of(technique.name)
                record.status = technique.notes.status or record.outcome()

    def undo(self) -> None:
        """Takes every edit back: the model is again the one that was passed in. The report stays."""
        for technique in reversed(self._open):
            self._edits.undo(technique)
            self._ask(technique, "close", technique.close, otherwise=None)
        self._techniques, self._at_work, self._preparing, self._open = [], [], [], []
        self._has_edits = False
        self._trial_step = None

    @property
    def has_edits(self) -> bool:
        """Whether forward and loss of a step may run otherwise than the user wrote them."""
        return self._has_edits

    @property
    def is_at_work(self) -> bool:
        """Whether a technique has something to do, or may have once there are optimizers."""
        return bool(self._at_work) or any(technique.edits_optimizers for technique in self._techniques)

    @property
    def is_trying(self) -> bool:
        """Whether the next step that may be tried on is one of the trial steps."""
        return self._trial_step is not None

    def arms(self) -> list[Arm]:
        """What live trials may switch; complete once no technique is tried any more."""
        found: list[Arm] = []
        for technique in self._techniques:
            found += self._ask(technique, "offer choices", lambda one: [*one.arms()], technique, otherwise=[])
        for arm in found:
            self.report.of(arm.name).waits_for_trials = arm.starts_off or arm.setup is not None
        return found

    def disable(self, names: Iterable[str]) -> None:
        """Leaves these techniques out of the steps to come, until it is called again: their arms are off."""
        self.apply_updates()
        self._resting = set(names)
        self._find_at_work()

    def add(self, technique: Technique) -> bool:
        """Puts a technique on in mid-run, between two steps and after all others; whether it found anything to do.

        It is tried at the next call of its sites, in a trial step as well: what is put on for want of memory has none
        for a trial on the whole batch. What an earlier run has decided on it holds. Another of its name goes.
        """
        name = technique.name
        self._added.add(name)
        for former in [one for one in self._techniques if one.name == name]:
            self._withdraw(former)
        self.report.techniques[name] = TechniqueReport()
        if not self._is_available(technique):
            return False
        self._available += (technique,)
        self._techniques.append(technique)
        self._open.append(technique)
        self._claim(technique)
        known = self.decisions.get(name)
        patches = self._edits.on_model[name]
        if known is not None:
            self._carry_out(technique, {patch.site: known.get(patch.site, Verdict(keep=True)) for patch in patches})
        elif technique.applied_before_trial:
            self._apply_early(technique)
        technique.try_late(PatchSet(patch for patch in patches if patch.site not in (known or {})))
        self._settle(technique)
        for other in self._techniques:
            other.give_way(technique.protects(self.model))
            self._apply_updates(other)
        return technique in self._at_work

    def apply_updates(self) -> None:
        """Acts on what techniques had to say in the course of a step, those that rest among them."""
        for technique in self._techniques:
            if technique.notes.is_new:
                self._apply_updates(technique)

    def has(self, name: str) -> bool:
        """Whether a technique of this name is in force, or on trial."""
        return self.report.of(name).is_on and any(t.name == name for t in self._techniques if name not in self._resting)

    def spoilt(self) -> list[tuple[str, str]]:
        """Which techniques have had the step that is just over go otherwise than the user's would, and how."""
        found = [(technique.name, technique.notes.spoilt) for technique in self._techniques if technique.notes.spoilt]
        for technique in self._techniques:
            technique.notes.spoilt = ""
        return found

    def withdraw(self, name: str, reason: str) -> None:
        """Takes a technique back that was put on in mid-run."""
        for technique in [one for one in self._techniques if one.name == name]:
            self._withdraw(technique)
        self.report.techniques[name] = TechniqueReport(status=f"taken back: {reason}")

    def _withdraw(self, technique: Technique) -> None:
        self._edits.on_model[technique.name].undo()
        self._ask(technique, "close", technique.close, otherwise=None)
        self.decisions.pop(technique.name, None)
        for techniques in (self._techniques, self._open):
            if technique in techniques:  # closing, it may have left
                techniques.remove(technique)
        self._find_at_work()

    def revert_all(self, reason: str, name: str | None = None) -> None:
        """Takes edits back for the rest of the run, and remembers it for a resumed one.

        Args:
            reason: Why.
            name: Of the technique whose edits; None: of all.
        """
        leaving = [technique for technique in self._techniques if name in (None, technique.name)]
        # Not closed before the run ends: layouts that DistributedDataParallel counts on are held until then.
        self._techniques = [technique for technique in self._techniques if technique not in leaving]
        for technique in reversed(leaving):
            for patch in [*self._edits.on_model[technique.name], *self._edits.on_optimizers[technique.name]]:
                self._edits.refuse(technique, patch.site, reason)
                if technique.remembers:
                    refusal = Verdict(keep=False, reason=reason)
                    self.decisions.setdefault(technique.name, {})[patch.site] = refusal
            technique.notes.take()
            self._ask(technique, "settle", technique.settled, otherwise=None)
            record = self.report.of(technique.name)
            record.is_on, record.status = False, f"taken back: {reason}"
        if not self._techniques:
            self._trial_step = None
        self._find_at_work()

    def _ask(self, technique: Technique, what: str, call: Callable[..., R], *args: Any, otherwise: R) -> R:
        """What a technique answers. One that raises, on meeting what it does not know, is taken back and says why.

        What it tells the user, by a ``ValueError`` on what was set or an ``AccelError``, goes through.
        """
        try:
            return call(*args)
        except Exception as error:
            told = (AccelError, SettingError if technique.on_by_default else ValueError)
            if isinstance(error, told) or technique.is_part_of_training or is_out_of_memory(error):
                raise
            reason = f"could not {what}: {one_line(error)}"
        if technique in self._techniques:
            self.revert_all(reason, technique.name)
        self.degrade(f"{technique.name} {reason}")
        return otherwise

    def _enter(self, stack: ExitStack, technique: Technique, what: str, make: Callable[..., Any], *args: Any) -> Any:
        return self._ask(technique, what, lambda: stack.enter_context(make(*args)), otherwise=None)

    def join_after_failure(self) -> None:
        """Gives the other ranks the word they wait for, where a trial step of this rank was repeated without edits."""
        if self._owes_verdicts:
            self._owes_verdicts = False
            self._gather(None)
            self._stay_together({})

    def carry_out(self, decisions: Mapping[str, Verdicts]) -> None:
        """Makes these verdicts hold now, without a trial of their own."""
        for technique in self._techniques:
            if technique.name in decisions:
                self.decisions[technique.name] = decisions[technique.name]
                self._carry_out(technique, decisions[technique.name])

    def degrade(self, message: str) -> None:
        """Says that something asked for is not done: a warning, or an error when the plan is strict."""
        self._edits.degrade(message)

    def technique(self, kind: type[T]) -> T | None:
        """The technique of this class, if there is one in this run."""
        return next((technique for technique in self._available if isinstance(technique, kind)), None)

    def _is_available(self, technique: Technique) -> bool:
        reason = technique.unavailable(self.host)
        if reason is None and self._is_sharded and technique.why_not_sharded:
            reason = f"not with sharded parameters: {technique.why_not_sharded}"
        if reason is None:
            return True
        self.report.of(technique.name).status = reason
        if technique.explicit or not technique.on_by_default:  # nobody will miss a default of ours
            self.degrade(f"{technique.name}: {reason}")
        return False

    def _claim(self, technique: Technique) -> None:
        patches = self._edits.on_model[technique.name] = PatchSet()
        what, nothing = f"look at {type(self.model).__name__}", list[Patch | Refusal]()
        found = self._ask(technique, what, lambda: [*technique.patches(self.model, self.host)], otherwise=nothing)
        if technique not in self._techniques:
            return
        for claim in found:
            self._edits.enter(technique, claim, patches)
        record = self.report.of(technique.name)
        record.is_on = technique.acts_without_sites or len(patches) > 0
        if not technique.edits_optimizers:
            self._edits.miss(technique)
        waits = "waiting for optimizers" if technique.edits_optimizers else "no site in this model"
        record.status = technique.notes.status or ("waiting for the first step" if len(patches) else waits)
        self._apply_updates(technique)

    def _apply_early(self, technique: Technique) -> None:
        for patch in list(self._edits.on_model[technique.name]):
            self._edits.apply(technique, patch, patch.change)
        if technique.trial_step is None and len(self._edits.on_model[technique.name]):
            self._settle(technique)

    @contextmanager
    def _step_within(self, contexts: Iterable[tuple[Technique, Any]], stage: str) -> Iterator[None]:
        with _UnderWay(self, stage), ExitStack() as stack:
            for technique, context in contexts:
                self._ask(technique, "begin a step", stack.enter_context, context, otherwise=None)
            yield

    @contextmanager
    def _trial(self, stage: str) -> Iterator[None]:
        on_trial = [
            technique
            for technique in self._techniques
            if technique.trial_step == self._trial_step
            and len(self._edits.on_model[technique.name])
            and technique.name not in self.decisions
            and technique.name not in self._added
        ]
        found: Decisions = {}
        self._owes_verdicts = bool(on_trial)
        with _UnderWay(self, stage):
            with ExitStack() as stack:
                for technique in self._techniques:
                    self._enter(stack, technique, "begin a step", technique.step, stage)
                if on_trial and self._trial_step == 0:  # the compiler would trace the trials, and fail on them
                    stack.enter_context(eager_where_compiled(self.model))
                # The first technique's trial outermost: memory format times blocks that checkpointing tries as well.
                for technique in reversed(on_trial):
                    patches = self._edits.on_model[technique.name]
                    verdicts = self._enter(stack, technique, "be tried", technique.trial, patches)
                    found[technique.name] = {} if verdicts is None else verdicts  # still empty, if it has begun
                yield
            self._conclude(on_trial, found)
        # A trial may find that there is nothing to do, and say so.
        for technique in list(self._techniques):
            self._apply_updates(technique)

    def _conclude(self, on_trial: Sequence[Technique], found: Decisions) -> None:
        if not self._techniques:
            return  # undone in the middle of the step
        self._owes_verdicts = False
        ranks = self._gather(found) if on_trial else [{}]
        if None in ranks:
            self.revert_all(f"a trial step of rank {ranks.index(None)} raised")
            self._stay_together({})
            return
        for technique in [one for one in on_trial if one in self._techniques]:
            verdicts = ranks[0].get(technique.name, {})
            if technique.remembers and not any(TOO_DEAR in verdict.reason for verdict in verdicts.values()):
                self.decisions[technique.name] = verdicts
            self._carry_out(technique, verdicts)
        if any(technique.trial_steps for technique in on_trial):  # else there is nothing worth the time
            release_free_memory()
        if on_trial:
            tried = [technique.name for technique in self._techniques if technique.trial_step is not None]
            self._stay_together({name: {p.site for p in self._edits.on_model[name] if p.is_applied} for name in tried})
        self._trial_step = 1 if self._trial_step == 0 else None

    def _stay_together(self, sites: Mapping[str, set[str]]) -> None:
        """Stops all ranks, each with the same error, where one cannot do at a site what rank 0 does there."""
        records = self.report.techniques
        ranks = self._gather({n: (sites.get(n, set()), r.refusals, r.status) for n, r in records.items()})
        if (differing := difference(ranks)) is not None:
            raise AccelError(differing)

    def _carry_out(self, technique: Technique, verdicts: Verdicts) -> None:
        technique.decided(verdicts)
        for patch in list(self._edits.on_model[technique.name]):
            verdict = verdicts.get(patch.site) or Verdict(keep=False, reason="has no verdict: not seen in its trial")
            if verdict.keep:
                remark = f"{patch.change}{': ' if verdict.reason else ''}{verdict.reason}"
                self._edits.apply(technique, patch, remark, verdict.measured)
            else:
                self._edits.refuse(technique, patch.site, verdict.reason, verdict.measured)
        self._settle(technique)

    def _apply_updates(self, technique: Technique) -> None:
        """Acts on what a technique had to say."""
        if not technique.notes.is_new:
            return
        refused, revised, warned = technique.notes.take()
        record = self.report.of(technique.name)
        changed = refused | revised
        lost = [site for site, verdict in changed.items() if not verdict.keep and site in record.changes]
        record.was_in_force |= bool(lost) and not self.is_trying
        for site, verdict in refused.items():
            self._edits.refuse(technique, site, verdict.reason, verdict.measured)
        for site, verdict in revised.items():
            tell = self.report.record_applied if verdict.keep else self.report.record_refused
            tell(technique.name, site, verdict.reason, verdict.measured)
        if changed:
            if technique.remembers:  # a resumed run, too, must do so
                self.decisions[technique.name] = self.decisions.get(technique.name, {}) | changed
            self._settle(technique)
        record.status, record.details = technique.notes.status or record.status, technique.notes.details
        record.measured_as_a_whole = technique.notes.measured
        for message in warned:
            self.degrade(message)

    def _find_at_work(self) -> None:
        awake = [t for t in self._techniques if t.name not in self._resting]
        self._at_work = [t for t in awake if t.acts_without_sites or t.watches_on or self._edits.has(t)]
        self._preparing = [t for t in self._at_work if type(t).batch is not Technique.batch]
        self._has_edits = any(
            t.alters_steps and (t.acts_without_sites or t.watches_on or self._edits.on_model[t.name]) for t in awake
        )

    def _settle(self, technique: Technique) -> None:
        self._ask(technique, "settle", technique.settled, otherwise=None)
        if technique not in self._techniques:
            return
        self._find_at_work()
        record = self.report.of(technique.name)
        record.is_on = technique.acts_without_sites or bool(record.changes)
        record.status = technique.notes.status or record.outcome()
        if technique.explicit and not record.changes and not technique.acts_without_sites:
            self.degrade(f"{technique.name} was asked for and is not in force anywhere: {record.status}")


_NOTHING: AbstractContextManager[Any] = nullcontext()


class _UnderWay:
    """Around a step: what the engine itself has to know of it, and to do after it. No generator: every step pays."""

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
