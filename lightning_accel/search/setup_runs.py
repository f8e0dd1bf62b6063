"""Comparisons of setups: keeps at most two runs alive, and measures nothing twice."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

from lightning_accel.core.host import Host
from lightning_accel.experiment.pair_test import MEMORY_RISE, PairTest, RatioInterval
from lightning_accel.experiment.subprocess_runner import SubprocessError, Worker
from lightning_accel.search.job import TrialSetup, TuneJob
from lightning_accel.search.judging import (
    MIN_PAIRS,
    Facts,
    Objective,
    SetupSide,
    TrialRun,
    judged,
    worth_of_memory,
    worth_of_start,
)
from lightning_accel.search.search_cache import Answers
from lightning_accel.tuning.comparison import Result, Verdict
from lightning_accel.tuning.trial_scheduler import ALPHA

NOTHING_TOLD = RatioInterval(1.0, 0.0, math.inf)
_PATIENCE_S, _LEAST_PATIENCE_S = 600.0, 60.0  # for the start of a run, and for a block of its turns
# Imported, not run as a script: the classes of its messages would otherwise belong to ``__main__``.
_PROGRAM = "from lightning_accel.search.worker import main; main()"
_QUESTIONS = 10  # the approximate number of questions, among which the error rate is divided


class SetupRuns:
    """Runs of one job, each in its own process, and their comparisons.

    Methods that run a setup raise a :class:`SubprocessError` if it does not train.

    Args:
        limit: The bytes that a run may hold. If None, ``available``, or what the original run holds if that is more.
        available: The bytes that the machine has for two runs.
        answers: The results of earlier searches, which are not measured again.
        seconds: The time of the search.

    Raises:
        ValueError: The job cannot be copied.
    """

    def __init__(
        self,
        job: TuneJob,
        host: Host,
        objective: Objective,
        *,
        limit: int | None,
        available: int,
        answers: Answers,
        seconds: float,
    ) -> None:
        self.job, self.host, self.objective, self.answers = job, host, objective, answers
        self.is_limit_given, self._available = limit is not None, available
        self.limit = available if limit is None else limit
        self.notes = [answers.complaint] if answers.complaint else []  # remarks for the user
        self._patience_s = min(_PATIENCE_S, max(_LEAST_PATIENCE_S, seconds))
        self._alive: dict[str, TrialRun] = {}
        self._forked: dict[str, Worker] = {}  # processes that have read the job, by their environments
        self._all: list[Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="lightning-accel-")
        self._path = Path(self._folder.name) / "job"
        job.write(self._path)

    def facts(self, setup: TrialSetup, beside: TrialSetup | None = None) -> Facts:
        """Returns the measurements of ``setup``; runs it if there are none. The run of ``beside`` stays alive."""
        if setup.key not in self.answers.facts:
            self._keep(setup, beside or setup)
            self.answers.facts[setup.key] = self._measured(setup)
        return self.answers.facts[setup.key]

    def look_anew(self, setup: TrialSetup) -> Facts:
        """Measures ``setup`` again. If the run has become another one, forgets all earlier results."""
        before, now = self.answers.facts.get(setup.key), self._measured(setup)
        if before is not None and not now.is_like(before):
            self.answers.forget()
            self.notes.append("What an earlier search has found out is not used: the run has become another one.")
        self.answers.facts[setup.key] = now
        return now

    def _measured(self, setup: TrialSetup) -> Facts:
        try:
            return Facts.of(self.run(setup))
        except SubprocessError as error:
            if not error.is_memory or not self._alive.keys() - {setup.key}:
                raise
        self._keep()  # it may fit without another run beside it
        return Facts.of(self.run(setup))

    def compare(self, name: str, original: TrialSetup, candidate: TrialSetup, seconds: float) -> Result:
        """Compares the speed of two setups and decides which one is better, in about ``seconds``.

        A candidate that does not run is not better; only an original that does not run any more raises.
        """
        result = self._compared(name, original, candidate, seconds)
        if result.turns:  # a setup that could not run may run another time
            self.answers.add(original, candidate, result)
        return result

    def _compared(self, name: str, original: TrialSetup, candidate: TrialSetup, seconds: float) -> Result:
        before = self.facts(original)
        after = self._can_run(name, before, original, candidate)
        if not isinstance(after, Facts):
            return Result(name, after, NOTHING_TOLD, 0)
        worth = worth_of_memory(before, after, self.objective)
        if candidate.plan.get("compile") != original.plan.get("compile"):
            worth += worth_of_start(before, after, self._samples(before))
        if math.isinf(worth):
            self.notes.append(f"{name} takes {after.started_s:.0f} s to start: this run is too short to win that back.")
            return Result(name, "not faster", NOTHING_TOLD, 0)
        self._keep(original, candidate)
        test = PairTest(ALPHA / _QUESTIONS, worth)
        side = self._side(original, before)
        try:
            result = judged(name, side, self._side(candidate, after), test, seconds)
        except SubprocessError as error:
            self.notes.append(f"{name}: {error}" + (" (beside another run)" if error.is_memory else ""))
            return Result(name, _verdict_of(error), test.interval(), 0)
        return result if self._fits(name, candidate, after) else replace(result, verdict="needs more memory")

    def _fits(self, name: str, setup: TrialSetup, facts: Facts) -> bool:
        """Returns whether the setup still fits after all batches so far."""
        most = self.run(setup).most_bytes
        if most > (1 + MEMORY_RISE) * facts.needed_bytes:
            self.notes.append(
                f"{name}: its batches differ in what they need, {most >> 20} MiB after {facts.needed_bytes >> 20} MiB:"
                " one that was not seen may need more. A lower memory_limit leaves it room."
            )
        self.answers.facts[setup.key] = replace(facts, most_bytes=max(most, facts.most_bytes))
        return most <= self.limit

    def _side(self, setup: TrialSetup, facts: Facts) -> SetupSide:
        loader = {**self.job.loader_settings, **setup.loader}
        return SetupSide(self.run(setup), facts, facts.settling_turns(loader, self.accumulate(setup)))

    def least_s(self, facts: Facts) -> float:
        """Returns the seconds of the shortest comparison that can prove something."""
        return facts.started_s + 2 * MIN_PAIRS * facts.block_s(0)

    def accumulate(self, setup: TrialSetup) -> int:
        """Returns the batches in an optimizer step."""
        return setup.accumulate or self.job.accumulate

    def close(self) -> None:
        """Ends all processes. It may be called at any time."""
        for worker in self._all:
            worker.end()
        self._folder.cleanup()

    def _can_run(self, name: str, before: Facts, original: TrialSetup, candidate: TrialSetup) -> Facts | Verdict:
        """Returns the measurements of the candidate, or the reason why it cannot be compared."""
        if candidate.key not in self.answers.facts and self._would_take_all_memory(before, original, candidate):
            self.notes.append(f"{name}: not tried: by what {original} needs, there is not enough memory for it.")
            return "needs more memory"
        try:
            after = self.facts(candidate, beside=original)
        except SubprocessError as error:
            self.notes.append(f"{name}: {error}")
            return _verdict_of(error)
        samples = after.samples / self.accumulate(candidate)
        if candidate.batch_size is not None and samples < 0.75 * candidate.batch_size:
            self.notes.append(
                f"{name}: batches have {samples:.0f} samples all the same: the loader is made without batch_size, or"
                " has no more of them."
            )
            return "raised an error"
        return "needs more memory" if after.needed_bytes > self.limit else after

    def _would_take_all_memory(self, before: Facts, original: TrialSetup, candidate: TrialSetup) -> bool:
        """Predicts whether a run would exhaust a CPU's memory. Not tried, as it would affect all programs."""
        now = original.batch_size or self.job.batch_size
        if self.host.kind != "cpu" or candidate.batch_size is None or now is None:
            return False
        activations = before.peak_bytes - before.base_bytes
        predicted = before.base_bytes + candidate.batch_size / now * activations
        return predicted > self.limit or predicted + before.peak_bytes > self._available

    def _samples(self, facts: Facts) -> float:
        """Returns the samples of the user's whole run; infinite if it does not end by itself."""
        job = self.job
        by_steps = math.inf if job.max_steps < 0 else job.max_steps * facts.samples
        by_epochs = math.inf if job.max_epochs < 0 else job.max_epochs * facts.batches * facts.samples / job.accumulate
        return min(by_steps, by_epochs)

    def run(self, setup: TrialSetup) -> TrialRun:
        """Returns the run of a setup, warm, and waiting for turns."""
        if setup.key not in self._alive or self._alive[setup.key].is_over:
            self._alive[setup.key] = TrialRun(self._worker(setup))
        return self._alive[setup.key]

    def _worker(self, setup: TrialSetup) -> Worker:
        name = repr(sorted(setup.environment.items()))
        if (worker := self._forked.get(name)) is None:
            worker = Worker(_PROGRAM, str(self._path), environment=setup.environment, patience_s=self._patience_s)
            self._all.append(worker)
        if not self.job.can_fork:
            worker.send(setup)
            return worker
        self._forked[name] = worker
        self._all.insert(0, fork := worker.fork(setup))  # forks end before their parent, which reports their status
        return fork

    def _keep(self, *setups: TrialSetup) -> None:
        wanted = {setup.key for setup in setups}
        for key in [key for key in self._alive if key not in wanted]:
            self._alive.pop(key).close()


def _verdict_of(error: SubprocessError) -> Verdict:
    return "out of memory" if error.is_memory else "raised an error"
