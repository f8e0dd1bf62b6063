"""What the callbacks have to say of a run as a whole: on the console, and in the plugin's report where there is one."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_accel.core.report import Report


def report_of(trainer: Trainer) -> Report | None:
    """AccelPlugin's; None in a run without it."""
    report = getattr(trainer.precision_plugin, "report", None)
    return report if isinstance(report, Report) else None


def say(trainer: Trainer, *lines: str) -> None:
    """Says it now, and notes it."""
    if (report := report_of(trainer)) is not None:
        for line in lines:
            report.note(line)
    rank_zero_info(f"lightning-accel: {lines[0]}" if len(lines) == 1 else "\n  ".join(["lightning-accel:", *lines]))


class Notes:
    """Says each line once in a fit; it raises and warns of nothing.

    Args:
        trainer: Of the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._said: set[str] = set()

    def say(self, line: str) -> None:
        """Says it, once."""
        if line not in self._said:
            self._said.add(line)
            say(self._trainer, line)
