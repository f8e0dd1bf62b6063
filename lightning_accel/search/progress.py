"""A search as it goes: a line that is rewritten on a terminal, a line for each comparison elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from typing_extensions import Self, override

from lightning_accel.search.setup import Setup
from lightning_accel.tuning.comparison import Result


class SearchProgress(AbstractContextManager["SearchProgress"]):
    """What is tried, the best so far, and the time that is left.

    Args:
        seconds: That the search may take.
        console: Where to; by default standard error.
    """

    def __init__(self, seconds: float, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._began, self._seconds = time.monotonic(), seconds
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=seconds, left="")
        self._best, self._trying = "as it is", ""
        self._told: list[Result] = []

    @override
    def __enter__(self) -> Self:
        self._bar.start()
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def trying(self, what: str) -> None:
        """Shows what is being tried."""
        self._trying = what
        self.tick()

    def tick(self) -> None:
        """Shows how much time is left."""
        spent = min(self._seconds, time.monotonic() - self._began)
        left = f"{self._seconds - spent:.0f} s left"
        self._bar.update(
            self._task, completed=spent, left=left, description=f"trying {self._trying} · best so far: {self._best}"
        )

    def told(self, result: Result, best: Setup) -> None:
        """Prints how a comparison ended; not twice, where one is the last one, too."""
        self._best = str(best)
        if result in self._told:
            return
        self._told.append(result)
        self._console.print(f"{result.name}: {result.verdict}, {result.interval}", highlight=False, soft_wrap=True)
        self.tick()
