"""What live trials may switch between two training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OFF = "off"


@dataclass(frozen=True)
class Arm:
    """One thing of a technique that can be had in several ways, each of which trains the same.

    Attributes:
        name: The technique's, in the report and in what is remembered.
        choices: What there is to choose from beside ``"off"``, which is the user's own code; the first is what the
            technique would have by itself.
        choose: Puts a choice, or ``"off"``, in force from the next step on. Called between steps only.
        settle: Steps after a switch that pay for it (layouts, caches); they are not counted.
        saves_memory: Whether it is there to save memory, so that it stays unless the run is slower with it.
        gain_ms: What it could gain in a step, by the trial of its parts; None where nothing was timed.
    """

    name: str
    choices: tuple[str, ...]
    choose: Callable[[str], None]
    settle: int = 0
    saves_memory: bool = False
    gain_ms: float | None = None
