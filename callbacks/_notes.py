"""Says what could not be done, where a user looks: on the console and in AccelPlugin's report."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_accel.core.report import Report


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
        if line in self._said:
            return
        self._said.add(line)
        rank_zero_info(f"lightning-accel: {line}")
        report = report_of(self._trainer)
        if report is not None:
            report.note(line)


def report_of(trainer: Trainer) -> Report | None:
    """AccelPlugin's; None in a run without it."""
    report = getattr(trainer.precision_plugin, "report", None)
    return report if isinstance(report, Report) else None
