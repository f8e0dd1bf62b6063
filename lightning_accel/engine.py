"""Puts a plan to work on one model: finds the sites, runs the trials, applies what they allow, reports, undoes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_accel.core.compiled import eager_where_compiled
from lightning_accel.core.heap import release_free_memory
from lightning_accel.core.host import Host
from lightning_accel.core.open_purse import OpenPurse
from lightning_accel.core.optimizers import are_all, living_optimizers
from lightning_accel.core.purse import Purse
from lightning_accel.core.report import AccelError, Report, difference
from lightning_accel.engine_techniques import EngineTechniques
from lightning_accel.technique_run import Decisions, TechniqueRun
from lightning_accel.techniques.base import LoaderTerms, Technique
from lightning_accel.techniques.notes import Verdicts


class Engine(EngineTechniques):
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
        self._gather = gather or (lambda value: [value])
        self._owes_verdicts = False  # whether other ranks wait for this one's verdicts
        self._runs = []
        self._stage: str | None = None  # of the current step
        self._optimizers: list[Optimizer] = []  # that the techniques know
        self._told: list[Optimizer] = []  # those of them that were not found by a search
        # Before both trial steps: a loop may make its optimizer in its first step.
        self._searches_left = 2
        for technique in techniques:
            technique.agree, technique.purse = agree, purse or OpenPurse(technique.name)
            self._enter(technique)
        self._active = [*self._runs]
        with self._undone_if_it_raises():
            for run in self._active:
                run.find_sites(model, host)
        if begins:
            self.begin()

    def costs_s(self, step_s: float) -> dict[str, float]:
        """Estimates the seconds that techniques cost at first if a step takes ``step_s``. Free ones are left out."""
        costs = {
            run.name: run.technique.setup_s + step_s * run.technique.trial_steps * (run.name not in self.decisions)
            for run in self._active
            if run.patches
        }
        return {name: cost_s for name, cost_s in costs.items() if cost_s}

    def begin(self, left_out: Mapping[str, str] | None = None) -> None:
        """Starts the techniques: those without a trial act from now on, the others are tried in the next steps.

        Args:
            left_out: The techniques that do not start, each with the reason.
        """
        for run in self._active:
            if left_out and run.name in left_out:
                run.leave_out(left_out[run.name])
        self._active = [run for run in self._active if run.is_active]
        self._trial_step = 0 if self._active else None
        with self._undone_if_it_raises():
            for run in self._active:
                if run.technique.applied_before_trial:
                    run.apply_early()
        self._stay_together({run.name: {patch.site for patch in run.patches} for run in self._runs})
        for run in self._active:
            if run.technique.trial_step is None or not run.patches:
                run.record.change("decided")
        self._refresh()
        self.carry_out(self.decisions)

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
        contexts = [
            (run, run.ask("begin a step", run.technique.step, stage, otherwise=_NOTHING)) for run in self._at_work
        ]
        around = [each for each in contexts if not isinstance(each[1], nullcontext)]
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
        told = list(optimizers)
        self._told += [one for one in told if all(one is not known for known in self._told)]
        self._show(told)

    def _show(self, optimizers: Iterable[Optimizer]) -> None:
        known = {id(optimizer) for optimizer in self._optimizers}
        new = [optimizer for optimizer in optimizers if id(optimizer) not in known]
        if not new:
            return
        named = {f"optimizer {index}": one for index, one in enumerate(new, start=len(self._optimizers))}
        self._optimizers += new
        kinds = ", ".join(type(optimizer).__name__ for optimizer in new)
        for run in self._active:
            run.ask(f"look at {kinds}", run.edit_optimizers, named, otherwise=None)
        self.apply_updates()

    def _search_optimizers(self) -> None:
        self._searches_left -= 1
        reading = [run for run in self._active if type(run.technique).optimizers is not Technique.optimizers]
        is_read = any(run.technique.edits_optimizers or run in self._at_work for run in reading)
        if is_read and not are_all(self._told, self.model):  # to look for others takes a while
            self._show(living_optimizers(self.model))
        for run in self._active:
            if run.technique.edits_optimizers and not self._searches_left and not run.has_edits:
                run.warn_if_missing()
                run.record.status = run.notes.status or run.record.outcome()

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

    # -- trials ------------------------------------------------------------------------------------------------

    @contextmanager
    def _trial(self, stage: str) -> Iterator[None]:
        """Around a step in which techniques are tried. If the step raises, the next one takes its place."""
        waiting = [run for run in self._active if run.record.state == "waiting" and run.patches]
        on_trial = [run for run in waiting if run.technique.trial_step == self._trial_step]
        found: Decisions = {}
        self._owes_verdicts = bool(on_trial)
        with _UnderWay(self, stage):
            with ExitStack() as stack:
                for run in self._active:
                    run.enter(stack, "begin a step", run.technique.step, stage)
                if on_trial and self._trial_step == 0:  # the compiler would trace the trials, and fail on them
                    stack.enter_context(eager_where_compiled(self.model))
                # The first technique's trial outermost: memory format times blocks that checkpointing tries as well.
                for run in reversed(on_trial):
                    verdicts = run.enter(stack, "be tried", run.technique.trial, run.patches)
                    found[run.name] = {} if verdicts is None else verdicts  # still empty, if it has begun
                yield
            if self._active:  # else all was undone in the middle of the step
                self._conclude(on_trial, found)
        self.apply_updates()  # a trial may find that there is nothing to do, and say so

    def _conclude(self, on_trial: Sequence[TechniqueRun], found: Decisions) -> None:
        self._owes_verdicts = False
        ranks = self._gather(found) if on_trial else [{}]
        if None in ranks:
            self.revert_all(f"a trial step of rank {ranks.index(None)} raised")
            self._stay_together({})
            return
        for run in on_trial:
            if run.is_active:
                run.conclude(ranks[0].get(run.name, {}))
        if any(run.technique.trial_steps for run in on_trial):  # else there is nothing worth the time
            release_free_memory()
        if on_trial:
            tried = [run for run in self._active if run.technique.trial_step is not None]
            self._stay_together({run.name: {p.site for p in run.patches if p.is_applied} for run in tried})
        self._trial_step = 1 if self._trial_step == 0 else None
        for run in self._active if self._trial_step is None else ():
            run.record.change("decided")

    def join_after_failure(self) -> None:
        """Answers the other ranks, which wait for verdicts, if this rank has repeated a trial step without edits."""
        if self._owes_verdicts:
            self._owes_verdicts = False
            self._gather(None)
            self._stay_together({})

    def _stay_together(self, sites: Mapping[str, set[str]]) -> None:
        """Stops all ranks, each with the same error, if one cannot edit a site that rank 0 edits."""
        records = self.report.techniques
        ranks = self._gather({n: (sites.get(n, set()), r.refusals, r.status) for n, r in records.items()})
        if (differing := difference(ranks)) is not None:
            raise AccelError(differing)


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
