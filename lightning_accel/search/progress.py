"""The progress of a search: a line that is rewritten on a terminal, and a line for each comparison."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text
from typing_extensions import Self, override

from lightning_accel.core.clocks import Deadline
from lightning_accel.search.job import TrialSetup
from lightning_accel.tuning.comparison import Result


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
        self._best = TrialSetup()
        self._told: list[Result] = []

    def __enter__(self) -> Self:
        self._line.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._line.stop()

    def trying(self, what: str) -> None:
        self._line.update(self._task, description=f"trying {what} · best so far: {self._best}")

    def told(self, result: Result, best: TrialSetup) -> None:
        """Prints the result of a comparison once, even if the last comparison repeats it."""
        self._best = best
        if result in self._told:
            return
        self._told.append(result)
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
