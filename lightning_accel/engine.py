"""Puts a plan to work on one model: claims the sites, runs the trials, applies what they allow, reports, undoes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_accel.core.compiled import eager_where_compiled
from lightning_accel.core.heap import release_free_memory
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.report import TECHNIQUES, Report, TechniqueReport
from lightning_accel.memory.schedule import MemorySchedule
from lightning_accel.settings import Plan
from lightning_accel.techniques.base import Refusal, Technique, Verdict, Verdicts
from lightning_accel.techniques.gradient_checkpointing import MemoryBudget
from lightning_accel.techniques.mixed_precision import MixedPrecision

Decisions = dict[str, Verdicts]
T = TypeVar("T", bound=Technique)


class AccelWarning(UserWarning):
    """Something that was asked for could not be done; the run goes on without it (``strict=True`` raises instead)."""


class AccelError(RuntimeError):
    """What would be an :class:`AccelWarning`, with ``strict=True``."""


class Engine:
    """A plan at work on a model.

    Args:
        model: The module to accelerate; edited in place, and restored by :meth:`undo`.
        plan: What to do.
        host: The machine it runs on.
        techniques: In the order in which they are applied.
        agree: Maps a value of this process, its verdicts say, to the one that holds for all; None with one process.
        gather: Maps a value of this process to those of all, in the order of their ranks; None with one process.
        is_sharded: Whether the model's parameters are, or will be, sharded over processes.
        decisions: Verdicts of an earlier run that hold without another trial.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        host: Host,
        techniques: Sequence[Technique],
        *,
        agree: Callable[[Any], Any] | None = None,
        gather: Callable[[Any], list[Any]] | None = None,
        is_sharded: bool = False,
        decisions: Mapping[str, Verdicts] | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.host = host
        self.report = Report(device=host.described)
        self.decisions: Decisions = dict(decisions or {})
        self._gather = gather or (lambda value: [value])
        self._is_sharded = is_sharded
        for technique in techniques:
            technique.agree = agree
        self._patches: dict[str, PatchSet] = {}
        self._stage: str | None = None  # of the step under way
        self._budget = next((technique for technique in techniques if isinstance(technique, MemoryBudget)), None)
        for name in TECHNIQUES:
            self.report.of(name).status = "off"
        self._techniques = [technique for technique in techniques if self._is_available(technique)]
        self._at_work: list[Technique] = []  # those that a step has to do with
        self._trial_step: int | None = 0 if self._techniques else None
        self._retired: list[Technique] = []
        self._owes_verdicts = False
        try:
            for technique in self._techniques:
                self._claim(technique)
            for technique in self._techniques:
                if technique.applied_before_trial:
                    self._apply_early(technique)
        except BaseException:
            self.undo()
            raise
        self._stay_together({name: {patch.site for patch in patches} for name, patches in self._patches.items()})
        self._find_at_work()
        self.carry_out(self.decisions)

    # -- the life of a run -------------------------------------------------------------------------------------

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
                return self._trial(stage)
        if not self._at_work:
            return nullcontext()
        contexts = [technique.step(stage) for technique in self._at_work]
        around = [context for context in contexts if not isinstance(context, nullcontext)]
        return self._step_within(around, stage) if around else _UnderWay(self, stage)

    def batch(self, batch: Any, stage: str | None = None) -> Any:
        """What the techniques make of a batch that is on the device.

        Args:
            batch: Any structure of tensors.
            stage: As in :meth:`step`; None: that of the step that is under way, else ``"train"`` or ``"validate"`` as
                the model's own mode has it.
        """
        if not self._at_work:
            return batch
        stage = stage or self._stage or ("train" if self.model.training else "validate")
        for technique in self._at_work:
            batch = technique.batch(batch, stage)
        return batch

    def predictions(self, outputs: Any) -> Any:
        """What a predict step returned, as the original would have."""
        for technique in self._at_work:
            outputs = technique.predictions(outputs)
        return outputs

    def undo(self) -> None:
        """Takes every edit back: the model is again the one that was passed in. The report stays."""
        for technique in reversed(self._techniques or self._retired):
            self._patches.get(technique.name, PatchSet()).undo()
            technique.close()
        self._techniques, self._at_work, self._retired = [], [], []
        self._trial_step = None

    @property
    def has_edits(self) -> bool:
        """Whether a step may run otherwise than the user wrote it."""
        return bool(self._at_work)

    @property
    def is_trying(self) -> bool:
        """Whether the next step that may be tried on is one of the trial steps."""
        return self._trial_step is not None

    def stand_aside(self, reason: str) -> None:
        """Takes every edit back for the rest of the run, and remembers it for a resumed one."""
        for technique in reversed(self._techniques):
            for patch in list(self._patches[technique.name]):
                self._refuse(technique, patch.site, reason)
                if technique.remembers:
                    refusal = Verdict(keep=False, reason=reason)
                    self.decisions.setdefault(technique.name, {})[patch.site] = refusal
            technique.objections, technique.revisions = {}, {}
            technique.settled()
            record = self.report.of(technique.name)
            record.is_on, record.status = False, f"taken back: {reason}"
        # Not closed before the run ends: layouts that DistributedDataParallel counts on are held until then.
        self._techniques, self._at_work, self._retired = [], [], self._techniques or self._retired
        self._trial_step = None

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
        if self.plan.strict:
            raise AccelError(f"{message} (strict=True)")
        self.report.note(message)
        warnings.warn(message, AccelWarning, stacklevel=2)

    @property
    def memory_plan(self) -> MemorySchedule | None:
        """With a memory budget, what each block does for it, once that is decided; else None. It outlives the run."""
        return None if self._budget is None else self._budget.memory_schedule

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The gradient scaler of a plain loop; it passes everything through unless the precision is ``"16-mixed"``."""
        mixed = self.technique(MixedPrecision)
        if mixed is None:
            raise AttributeError("Only a handle from accelerate() has a scaler, and only until undo().")
        return mixed.scaler

    def technique(self, kind: type[T]) -> T | None:
        """The technique of this class, if there is one in this run."""
        return next((t for t in (*self._techniques, *self._retired) if isinstance(t, kind)), None)

    # -- its parts ---------------------------------------------------------------------------------------------

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
        patches = self._patches[technique.name] = PatchSet()
        for claim in technique.patches(self.model, self.host):
            if isinstance(claim, Refusal):
                self.report.record_refused(technique.name, claim.site, claim.reason)
            else:
                patches.add(claim)
        record = self.report.of(technique.name)
        record.is_on = technique.acts_without_sites or len(patches) > 0
        if technique.explicit and not patches and not technique.acts_without_sites:
            reason = "; ".join(record.refusals.values()) or "this model has nothing for it"
            self.degrade(f"{technique.name} was asked for and found no site: {reason}")
        record.status = technique.status or ("waiting for the first step" if len(patches) else "no site in this model")
        self._hear(technique)

    def _apply_early(self, technique: Technique) -> None:
        for patch in list(self._patches[technique.name]):
            self._apply(technique, patch, patch.change)
        if technique.trial_step is None and len(self._patches[technique.name]):
            self._settle(technique)

    def _apply(self, technique: Technique, patch: Patch, remark: str) -> None:
        try:
            patch.apply()
        except Exception as error:
            self._refuse(technique, patch.site, f"could not be applied: {type(error).__name__}: {error}")
        else:
            self.report.record_applied(technique.name, patch.site, remark)

    def _refuse(self, technique: Technique, site: str, reason: str) -> None:
        if site in self._patches[technique.name]:
            self._patches[technique.name].drop(site)
        self.report.record_refused(technique.name, site, reason)

    @contextmanager
    def _step_within(self, contexts: Iterable[AbstractContextManager[Any]], stage: str) -> Iterator[None]:
        with _UnderWay(self, stage), ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            yield

    @contextmanager
    def _trial(self, stage: str) -> Iterator[None]:
        with _UnderWay(self, stage, is_trial=True):
            yield from self._step_with_trials(stage)

    def _step_with_trials(self, stage: str) -> Iterator[None]:
        on_trial = [
            technique
            for technique in self._techniques
            if technique.trial_step == self._trial_step
            and len(self._patches[technique.name])
            and technique.name not in self.decisions
        ]
        found: Decisions = {}
        self._owes_verdicts = bool(on_trial)
        with ExitStack() as stack:
            for technique in self._techniques:
                stack.enter_context(technique.step(stage))
            if on_trial and self._trial_step == 0:  # the compiler would trace the trials, and fail on them
                stack.enter_context(eager_where_compiled(self.model))
            # The first technique's trial outermost: memory format times blocks that checkpointing tries as well.
            for technique in reversed(on_trial):
                found[technique.name] = stack.enter_context(technique.trial(self._patches[technique.name]))
            yield
        if not self._techniques:
            return  # undone in the middle of the step
        self._owes_verdicts = False
        ranks = self._gather(found) if on_trial else [{}]
        if None in ranks:
            self.stand_aside(f"a trial step of rank {ranks.index(None)} raised")
            self._stay_together({})
            return
        for technique in on_trial:
            verdicts = ranks[0].get(technique.name, {})
            if technique.remembers:
                self.decisions[technique.name] = verdicts
            self._carry_out(technique, verdicts)
        if on_trial:
            release_free_memory()
            tried = [technique.name for technique in self._techniques if technique.trial_step is not None]
            self._stay_together({name: {p.site for p in self._patches[name] if p.is_applied} for name in tried})
        self._trial_step = 1 if self._trial_step == 0 else None

    def _stay_together(self, sites: Mapping[str, set[str]]) -> None:
        """Stops all ranks, each with the same error, where one cannot do what rank 0 does.

        Args:
            sites: Technique → where this rank has it.
        """
        records = self.report.techniques
        ranks = self._gather({n: (sites.get(n, set()), r.refusals, r.status) for n, r in records.items()})
        for name in records:
            decided = ranks[0][name][0]
            for rank, techniques in enumerate(ranks):
                done = techniques[name][0]
                if done == decided:
                    continue
                site = min(done ^ decided)
                without, having = (0, rank) if site in done else (rank, 0)
                _, refusals, status = ranks[without][name]
                reason = refusals.get(site, status or "it has no such site")
                raise AccelError(
                    f"The ranks do not do the same: rank {without} goes without {name} at {site or 'the model'!r}"
                    f" ({reason}), rank {having} with it. All of them stop here. Set {name} to 'off', or make their"
                    " machines alike."
                )

    def _carry_out(self, technique: Technique, verdicts: Verdicts) -> None:
        technique.decided(verdicts)
        for patch in list(self._patches[technique.name]):
            verdict = verdicts.get(patch.site) or Verdict(keep=False, reason="has no verdict: not seen in its trial")
            if verdict.keep:
                remark = f"{patch.change}{': ' if verdict.reason else ''}{verdict.reason}"
                self._apply(technique, patch, remark)
            else:
                self._refuse(technique, patch.site, verdict.reason)
        self._settle(technique)

    def _hear(self, technique: Technique) -> None:
        """What a technique noticed during a step."""
        if technique.objections:
            self._take_back(technique)
        if technique.revisions:
            self._revise(technique)
        record = self.report.techniques[technique.name]
        record.status, record.details = technique.status or record.status, technique.details
        if not technique.complaints:
            return
        complaints, technique.complaints = technique.complaints, ()
        for complaint in complaints:
            self.degrade(complaint)

    def _revise(self, technique: Technique) -> None:
        verdicts, technique.revisions = technique.revisions, {}
        for site, verdict in verdicts.items():
            record = self.report.record_applied if verdict.keep else self.report.record_refused
            record(technique.name, site, verdict.reason)
        if technique.remembers:
            self.decisions[technique.name] = self.decisions.get(technique.name, {}) | dict(verdicts)
        self._settle(technique)

    def _take_back(self, technique: Technique) -> None:
        reasons, technique.objections = technique.objections, {}
        for site, reason in reasons.items():
            self._refuse(technique, site, reason)
        # A resumed run, too, must leave these sites alone.
        refusals = {site: Verdict(keep=False, reason=reason) for site, reason in reasons.items()}
        if technique.remembers:
            self.decisions[technique.name] = self.decisions.get(technique.name, {}) | refusals
        self._settle(technique)

    def _find_at_work(self) -> None:
        self._at_work = [t for t in self._techniques if t.acts_without_sites or t.watches_on or self._patches[t.name]]

    def _settle(self, technique: Technique) -> None:
        technique.settled()
        self._find_at_work()
        record = self.report.of(technique.name)
        record.is_on = technique.acts_without_sites or bool(record.changes)
        record.status = technique.status or _outcome(record)
        if technique.explicit and not record.changes and not technique.acts_without_sites:
            self.degrade(f"{technique.name} was asked for and is not in force anywhere: {record.status}")


class _UnderWay:
    """Around a step: what the engine itself has to know of it, and to do after it. No generator: every step pays."""

    __slots__ = ("_engine", "_is_trial", "_stage")

    def __init__(self, engine: Engine, stage: str, *, is_trial: bool = False) -> None:
        self._engine = engine
        self._stage = stage
        self._is_trial = is_trial

    def __enter__(self) -> None:
        self._engine._stage = self._stage

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._engine._stage = None
        if kind is None:
            # A trial may find that there is nothing to do, and say so.
            for technique in self._engine._techniques if self._is_trial else self._engine._at_work:
                self._engine._hear(technique)


def _outcome(record: TechniqueReport) -> str:
    if record.changes:
        return "in force"
    reasons = Counter(record.refusals.values()).most_common(1)
    return f"left alone: {reasons[0][0] if reasons else 'nothing to do'}"
