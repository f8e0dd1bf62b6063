"""A search as it goes: a line that is rewritten on a terminal, a line for each comparison elsewhere, too."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text
from typing_extensions import Self, override

from lightning_accel.core.clocks import Deadline
from lightning_accel.search.setup import TrialSetup
from lightning_accel.tuning.comparison import Result


class SearchProgress:
    """What is tried, the best so far, and the time that is left."""

    def __init__(self, seconds: float) -> None:
        self._console = Console(stderr=True)
        self._line = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            _TimeLeft(seconds),
            console=self._console,
            transient=True,
            refresh_per_second=2,  # it shares the processor with what is timed
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
        """Prints how a comparison ended; not twice, where one is the last one, too."""
        self._best = best
        if result in self._told:
            return
        self._told.append(result)
        line = f"{result.name}: {better(result)}, {result.interval}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def better(result: Result) -> str:
    """The verdict in words: what saves memory may be better, and slower."""
    words: dict[str, str] = {"faster": "better", "not faster": "no better"}
    return words.get(result.verdict, result.verdict)


class _TimeLeft(ProgressColumn):
    def __init__(self, seconds: float) -> None:
        self._deadline = Deadline(seconds)
        super().__init__()

    @override
    def render(self, task: Task) -> Text:
        return Text(f"· {max(0.0, self._deadline.left_s()):.0f} s left")
