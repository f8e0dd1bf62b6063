"""What the callbacks have to say of a run as a whole: on the console, and in the plugin's report where there is one."""

from __future__ import annotations

from lightning_utilities.core import rank_zero
from lightning_utilities.core.rank_zero import rank_prefixed_message

from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.report import Report
from lightning_accel.lightning.packages import Trainer


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


def say_of_rank(trainer: Trainer, line: str) -> None:
    """Says now what this rank has to say, though it may not be the first."""
    rank = trainer.global_rank if trainer.world_size > 1 else None
    rank_zero.log.info(rank_prefixed_message(f"lightning-accel: {line}", rank))


class Announcements:
    """Says each line once in a fit; it raises and warns of nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._said: set[str] = set()

    def say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            say(self._trainer, line)
