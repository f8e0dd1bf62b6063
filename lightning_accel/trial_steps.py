"""The steps of a run in which techniques are tried, and what its ranks have to agree on after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lightning_accel.core.compiled import eager_where_compiled
from lightning_accel.core.heap import release_free_memory
from lightning_accel.core.ranks import stay_together
from lightning_accel.core.report import Report
from lightning_accel.technique_run import Decisions, TechniqueRun


class TrialSteps:
    """Two steps: in the second, techniques are tried that have to see the model as the others leave it.

    Attributes:
        next: Which of them comes next, 0 or 1; None if none does.
        owes_verdicts: Whether other ranks wait for the verdicts of this one.
    """

    def __init__(
        self,
        model: nn.Module,
        report: Report,
        active: Callable[[], list[TechniqueRun]],  # those that take part
        gather: Callable[[Any], list[Any]] | None,
    ) -> None:
        self.next: int | None = None
        self._model, self._report, self._active = model, report, active
        self._gather = gather or (lambda value: [value])
        self.owes_verdicts = False

    @contextmanager
    def around(self, stage: str) -> Iterator[None]:
        """Around a step in which techniques are tried. If the step raises, the next one takes its place."""
        waiting = [run for run in self._active() if run.record.state == "waiting" and run.patches]
        on_trial = [run for run in waiting if run.traits.trial_step == self.next]
        found: Decisions = {}
        self.owes_verdicts = bool(on_trial)
        with ExitStack() as stack:
            for run in self._active():
                run.enter(stack, "begin a step", run.technique.step, stage)
            if on_trial and self.next == 0:  # the compiler would trace the trials, and fail on them
                stack.enter_context(eager_where_compiled(self._model))
            # The first technique's trial outermost: memory format times blocks that checkpointing tries as well.
            for run in reversed(on_trial):
                verdicts = run.enter(stack, "be tried", run.trial)
                found[run.name] = {} if verdicts is None else verdicts  # still empty, if it has begun
            yield
        if self._active():  # else all was undone in the middle of the step
            self._conclude(on_trial, found)

    def _conclude(self, on_trial: Sequence[TechniqueRun], found: Decisions) -> None:
        self.owes_verdicts = False
        ranks = self._gather(found) if on_trial else [{}]
        if None in ranks:
            for run in reversed(self._active()):
                run.revert(f"a trial step of rank {ranks.index(None)} raised", "failed")
            self.compare({})
            return
        for run in on_trial:
            if run.is_active:
                run.conclude(ranks[0].get(run.name, {}))
        if any(run.traits.trial_steps for run in on_trial):  # else there is nothing worth the time
            release_free_memory()
        if on_trial:
            tried = [run for run in self._active() if run.traits.trial_step is not None]
            self.compare({run.name: {p.site for p in run.patches if p.is_applied} for run in tried})
        self.next = 1 if self.next == 0 else None
        for run in self._active() if self.next is None else ():
            run.record.change("decided")

    def join_after_failure(self) -> None:
        """Answers the other ranks, which wait for verdicts, if this rank has repeated a trial step without edits."""
        if self.owes_verdicts:
            self.owes_verdicts = False
            self._gather(None)
            self.compare({})

    def compare(self, sites: Mapping[str, set[str]]) -> None:
        """Stops all ranks, each with the same error, if one cannot edit a site that rank 0 edits."""
        records = self._report.techniques
        stay_together(self._gather({n: (sites.get(n, set()), r.refusals, r.status) for n, r in records.items()}))
