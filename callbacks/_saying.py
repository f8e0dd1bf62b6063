"""What the callbacks have to say of a run as a whole: on the console, and in the plugin's report where there is one."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_accel.core.report import Report


def say(trainer: Trainer, *lines: str) -> None:
    """Says it now, and notes it."""
    report = getattr(trainer.precision_plugin, "report", None)
    if isinstance(report, Report):
        for line in lines:
            report.note(line)
    rank_zero_info(f"lightning-accel: {lines[0]}" if len(lines) == 1 else "\n  ".join(["lightning-accel:", *lines]))
