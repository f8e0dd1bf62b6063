"""Tells console and loggers where a fit has settled, and at its end what it has come to: once each, on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_accel.callbacks._announcements import say
from lightning_accel.callbacks._epoch import PREFIX, EpochSpeed
from lightning_accel.callbacks._logger_adapters import Board, boards_of
from lightning_accel.callbacks._outcome import FitOutcome, Picture
from lightning_accel.callbacks._record import FitRecord
from lightning_accel.callbacks._reporting import report_path
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.report import one_line
from lightning_accel.evidence.figures import can_draw, share_bar
from lightning_accel.evidence.speed import Speed
from lightning_accel.lightning.packages import Trainer

_SUMMARY = f"{PREFIX}summary"


class Teller:
    """What there is to tell of one fit. It never fails a run: what cannot be told is said, once."""

    def __init__(self, trainer: Trainer) -> None:
        self.epochs: list[EpochSpeed] = []  # those that have ended
        self._trainer = trainer
        self._has_settled = self._has_failed = False
        self._boards = boards_of(trainer.loggers)

    @classmethod
    def open(cls, trainer: Trainer) -> Teller | None:
        """For the fit that begins, on rank 0, unless it is to be bare or over at once."""
        if not trainer.is_global_zero or trainer.fast_dev_run or trainer.barebones:  # type: ignore[attr-defined]
            return None
        return cls(trainer)

    @property
    def shows_figures(self) -> bool:
        """Whether somebody wants to see what a step's time goes to."""
        return bool(self._boards) and can_draw()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Tells every logger of metrics, and not Lightning, which would show them as the user's."""
        if not metrics:  # of a run of a step or two nothing is measured
            return
        trainer = self._trainer
        # As Lightning counts for loggers: by batches where the module steps several optimizers itself.
        by_optimizer = trainer.lightning_module.automatic_optimization
        step = trainer.global_step - 1 if by_optimizer else trainer.fit_loop.epoch_loop.total_batch_idx
        for logger in trainer.loggers:
            self._attempt(partial(logger.log_metrics, metrics=dict(metrics), step=max(0, step)))

    def settled(self, speed: Speed | None) -> None:
        """Tells the loggers that live trials have settled, and how fast the fit was until then."""
        self._has_settled = True
        self._attempt(lambda: self._tell(FitOutcome.of(self._trainer, self.epochs, speed, {})))

    def ended(self, record: FitRecord, *, tells_all: bool, draws: bool) -> None:
        """Tells what the fit has come to: loggers more than metrics if ``tells_all``, and figures if it ``draws``."""
        if self.epochs:
            self._attempt(self._tell_end, record, tells_all, draws)

    def _tell(self, outcome: FitOutcome, record: Path | None = None) -> None:
        if self._boards:
            text = outcome.markdown(record)
            for board in self._boards:
                self._attempt(board.text, _SUMMARY, text, self._trainer.global_step)

    def _tell_end(self, record: FitRecord, tells_all: bool, draws: bool) -> None:
        outcome = FitOutcome.of(self._trainer, self.epochs, record.speed, record.parts_ms, record.memory)
        step, path = self._trainer.global_step, record.path
        if tells_all:
            self._attempt(self._tell, outcome, path)
            run, *compared = outcome.sessions()
        for board in self._boards if tells_all else ():
            if draws and can_draw():
                for picture in outcome.pictures():
                    self._attempt(_draw, board, picture, step)
            self._attempt(board.conclude, run, compared, self._logged(), step)
        # A report that is asked for is pointed to where it is written.
        is_pointed_to = report_path(self._trainer) is not None
        rank_zero_info(f"lightning-accel: {outcome.line(None if is_pointed_to else path)}")

    def _logged(self) -> set[str]:
        """The names of all metrics that this fit has logged."""
        of_trials = {f"{PREFIX}tuning/ratio", f"{PREFIX}tuning/low"} if self._has_settled else set()
        return of_trials.union(*(epoch.metrics() for epoch in self.epochs))

    def _attempt(self, tell: Callable[..., Any], *values: Any) -> None:
        try:
            tell(*values)
        except Exception as error:  # whatever it is: the run is worth more than what is told of it
            if not self._has_failed:
                self._has_failed = True
                say(self._trainer, f"a logger could not be told all of this run: {one_line(error)}. The run goes on.")


def _draw(board: Board, picture: Picture, step: int) -> None:
    board.figure(picture.name, share_bar(picture.values, picture.unit, picture.title), step)
