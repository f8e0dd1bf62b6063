"""The search: tries the largest possible gain first, then leaves each change out, then compares all with plain.

:class:`SearchProgress` shows it: a line that is rewritten on a terminal, and a line for each comparison.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text
from typing_extensions import Self, override

from lightning_accel.core.clocks import Deadline
from lightning_accel.data.worker_schedule import LEAST_WAIT
from lightning_accel.experiment.subprocess_runner import SubprocessError
from lightning_accel.search.job import TrialSetup
from lightning_accel.search.judging import Facts
from lightning_accel.search.knobs import Knob, knobs
from lightning_accel.search.setup_runs import SetupRuns
from lightning_accel.tuning.comparison import Result

_RESERVE = 0.2  # the share of the time for the last comparison
_SHARE = 0.3  # the largest share of the remaining time for one question
_PLAIN = TrialSetup()


@dataclass
class SearchOutcome:
    """The result of a search."""

    best: TrialSetup = _PLAIN  # the changes to make
    whole: Result | None = None  # all changes against the original run; None if not compared
    facts: dict[str, Facts] = field(default_factory=dict)  # measurements of setups, by their keys
    results: list[Result] = field(default_factory=list)  # all comparisons, in order
    notes: list[str] = field(default_factory=list)  # further remarks
    is_whole: bool = True  # whether all questions were asked, without an early end or interrupt


class _OutOfTimeError(Exception):
    pass


class Search:
    """One search of so many seconds. ``keeps_effective_batch`` fixes the number of samples in an optimizer step."""

    def __init__(
        self, bench: SetupRuns, *, seconds: float, keeps_effective_batch: bool, watcher: SearchProgress
    ) -> None:
        self._bench, self._job, self._watcher = bench, bench.job, watcher
        self._keeps_effective_batch = keeps_effective_batch
        self._seconds, self._deadline = seconds, Deadline(seconds)
        self._adopted: dict[str, TrialSetup] = {}  # by knob
        self._start = _PLAIN  # the setup before any question: plain, or one that fits into the limit
        # Includes the notes of the bench.
        self.outcome = SearchOutcome(facts=bench.answers.facts, notes=bench.notes)
        if not self._job.has_plugin:
            self.outcome.notes.append("The Trainer has no AccelPlugin: it is compared as it is with one.")

    def run(self) -> SearchOutcome:
        """Searches until all questions are asked, the time is over, or Ctrl-C is pressed.

        Raises:
            ValueError: The run does not train, does not fit, or the time is too short for one comparison.
        """
        outcome = self.outcome
        try:
            self._begin()
            try:
                self._ask_all()
                self._leave_one_out()
            except _OutOfTimeError:
                outcome.is_whole = False
                outcome.notes.append(
                    "The time was over before everything was asked; a second search goes on from here."
                )
            self._compare_whole()
        except KeyboardInterrupt:
            outcome.is_whole = False
            outcome.notes.append("Interrupted: this is the best so far; a second search goes on from here.")
            outcome.whole = self._bench.answers.result(_PLAIN, outcome.best)
        except SubprocessError as error:  # a setup that has run before failed
            outcome.is_whole = False
            outcome.notes.append(f"The search ended early: {outcome.best} could not be run again: {error}")
            outcome.best = self._start
        finally:
            self._bench.close()
        return outcome

    # -- the course ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Runs the original setup. If that does not fit into the limit, finds one that does."""
        self._watcher.trying("the run as it is", _PLAIN)
        try:
            plain = self._bench.look_anew(_PLAIN)
            if not self._bench.is_limit_given:
                self._bench.limit = max(self._bench.limit, plain.needed_bytes)
        except SubprocessError as error:
            if error.is_late:
                raise ValueError(
                    f"time={self._seconds:.0f}s is too short: the run was not ready, {error}. Give more time; nothing"
                    " was written."
                ) from error
            if not error.is_memory:
                raise ValueError(f"The run does not train: {error}. Mend that first; nothing was written.") from error
            plain = None
        if plain is None or plain.needed_bytes > self._bench.limit:
            self.outcome.best = self._start = self._least()
            plain = self._bench.facts(self._start)
        if self._left() < (least := self._bench.least_s(plain)):
            spent = self._seconds - self._deadline.left_s()
            raise ValueError(
                f"time={self._seconds:.0f}s is too short for one comparison: the run took {spent:.0f} s to start, and a"
                f" comparison takes about {least:.0f} s here. Give at least {math.ceil(2 * (spent + least))} s."
            )

    def _least(self) -> TrialSetup:
        """Returns the first setup that fits into the limit; setups that cost the least time come first."""
        setup, needed, limit = _PLAIN, dict[str, int](), _in_words(self._bench.limit)
        size, effective = self._job.batch_size or 1, (self._job.batch_size or 1) * self._job.accumulate
        sizes = [size >> halved for halved in range(1, size.bit_length()) if size % (1 << halved) == 0]
        changes = [TrialSetup(plan={"gradient_checkpointing": mode}) for mode in ("selective", "full")]
        # The user did not ask for a smaller batch. So an optimizer step still sees as many samples.
        changes += [TrialSetup(batch_size=one, accumulate=effective // one) for one in sizes]
        for change in changes:
            tried = setup.with_(change)
            self._watcher.trying(f"{tried}, to fit into the limit", _PLAIN)
            try:
                facts = self._bench.facts(tried)
            except SubprocessError:  # for example, a model without repeated blocks
                continue
            setup, needed[str(tried)] = tried, facts.needed_bytes
            if facts.needed_bytes <= self._bench.limit:
                self.outcome.notes.append(f"As it is, the run does not fit into {limit}; with {tried} it does.")
                return tried
        if not needed:
            raise ValueError(f"memory_limit={limit}: nothing that needs less memory could be run here.")
        least = min(needed, key=needed.__getitem__)
        raise ValueError(
            f"memory_limit={limit} is below what any setup needs here: the least was"
            f" {_in_words(needed[least])}, with {least}. Give at least that, or a smaller model."
        )

    def _ask_all(self) -> None:
        bench = self._bench
        left = knobs(self._job, bench.host, bench.objective, keeps_effective_batch=self._keeps_effective_batch)
        self._note_what_cannot_be_set()
        while left:
            facts = bench.facts(self.outcome.best)
            left.sort(key=lambda knob: knob.bound(facts))
            self._ask(left.pop(), facts)

    def _ask(self, knob: Knob, facts: Facts) -> None:
        tries, is_better = knob.tries(facts, self.outcome.best), None
        with suppress(StopIteration):
            while True:
                change = tries.send(is_better)
                is_better = self._adopts(str(change), self.outcome.best.with_(change))
                if is_better:
                    self._adopted[knob.name] = self._adopted.get(knob.name, _PLAIN).with_(change)

    def _leave_one_out(self) -> None:
        """Removes changes that were adopted early and are no longer useful."""
        if len(self._adopted) < 2:
            return
        for name, change in list(self._adopted.items()):
            kept = {other: one for other, one in self._adopted.items() if other != name}
            if self._adopts(f"without {change}", reduce(TrialSetup.with_, kept.values(), self._start)):
                self._adopted = kept

    def _adopts(self, name: str, candidate: TrialSetup) -> bool:
        """Returns whether a candidate is better than the best setup so far, whose place it then takes."""
        result = self._compare(name, self.outcome.best, candidate)
        if result.is_won:
            self.outcome.best = candidate
        return result.is_won

    def _compare_whole(self) -> None:
        outcome = self.outcome
        if outcome.best == _PLAIN or self._start != _PLAIN:
            return
        outcome.whole = self._compare("everything", _PLAIN, outcome.best, is_last=True)
        if outcome.whole.verdict in ("not faster", "raised an error", "out of memory", "needs more memory"):
            outcome.notes.append("All changes together were no better than the run as it is: nothing is changed.")
            outcome.best = _PLAIN

    def _compare(self, name: str, original: TrialSetup, candidate: TrialSetup, *, is_last: bool = False) -> Result:
        result = self._bench.answers.result(original, candidate)
        if result is None:
            self._watcher.trying(name, self.outcome.best)
            if not is_last and self._left() < self._bench.least_s(self._bench.facts(original)):
                raise _OutOfTimeError
            seconds = self._deadline.left_s() if is_last else _SHARE * self._left()
            result = self._bench.compare(name, original, candidate, seconds)
        if result not in self.outcome.results:  # a single change was already compared with the original run
            self.outcome.results.append(result)
            self._watcher.told(result)
        return result

    def _left(self) -> float:
        """Returns the remaining seconds for questions."""
        return self._deadline.left_s() - _RESERVE * self._seconds

    def _note_what_cannot_be_set(self) -> None:
        notes, facts = self.outcome.notes, self._bench.facts(self.outcome.best)
        if self._job.batch_size is None:
            notes.append(
                "batch_size was not tried: neither the data module nor the module has an attribute of this name."
            )
        if "num_workers" not in self._job.loader_settings and facts.waited >= LEAST_WAIT:
            notes.append(
                f"Waiting for data takes {facts.waited:.0%} of the time, and the data module has no num_workers that"
                " could be set: give it one, and hand it to its DataLoader."
            )


def _in_words(count: int) -> str:
    return f"{count / 2**30:.2f}GiB" if count >= 2**30 else f"{count / 2**20:.0f}MiB"


class SearchProgress:
    """Shows what is being tried, the best setup so far, and the remaining time."""

    def __init__(self, seconds: float) -> None:
        self._console = Console(stderr=True)
        self._line = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            _TimeLeft(seconds),
            console=self._console,
            transient=True,
            refresh_per_second=2,  # it shares the processor with the timed runs
            disable=not self._console.is_terminal,
        )
        self._task = self._line.add_task("", total=None)

    def __enter__(self) -> Self:
        self._line.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._line.stop()

    def trying(self, what: str, best: TrialSetup) -> None:
        self._line.update(self._task, description=f"trying {what} · best so far: {best}")

    def told(self, result: Result) -> None:
        """Prints the result of a comparison."""
        line = f"{result.name}: {better(result)}, {result.interval}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def better(result: Result) -> str:
    """Returns the verdict as text: a setup that saves memory may be better although slower."""
    words: dict[str, str] = {"faster": "better", "not faster": "no better"}
    return words.get(result.verdict, result.verdict)


class _TimeLeft(ProgressColumn):
    def __init__(self, seconds: float) -> None:
        self._deadline = Deadline(seconds)
        super().__init__()

    @override
    def render(self, task: Task) -> Text:
        return Text(f"· {max(0.0, self._deadline.left_s()):.0f} s left")
