"""Tells console and loggers where a fit has settled, and at its end what it has come to: once each, on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning_accel.callbacks._announcements import say
from lightning_accel.callbacks._outcome import FitOutcome, adapters_of
from lightning_accel.callbacks._record import FitRecord
from lightning_accel.callbacks._reporting import report_path
from lightning_accel.core.ranks import rank_zero_info
from lightning_accel.core.report import one_line
from lightning_accel.evidence.epoch_speed import EpochSpeed
from lightning_accel.evidence.figures import can_draw
from lightning_accel.evidence.speed import Speed
from lightning_accel.lightning.packages import Trainer


class Teller:
    """What there is to tell of one fit. It never fails a run: what cannot be told is said, once."""

    def __init__(self, trainer: Trainer) -> None:
        self.epochs: list[EpochSpeed] = []  # those that have ended
        self._trainer = trainer
        self._has_failed = False
        self._adapters = adapters_of(trainer.loggers)

    @classmethod
    def open(cls, trainer: Trainer) -> Teller | None:
        """For the fit that begins, on rank 0, unless it is to be bare or over at once."""
        if not trainer.is_global_zero or trainer.fast_dev_run or trainer.barebones:  # type: ignore[attr-defined]
            return None
        return cls(trainer)

    @property
    def shows_figures(self) -> bool:
        """Whether somebody wants to see what a step's time goes to."""
        return bool(self._adapters) and can_draw()

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
        self._tell(FitOutcome(trainer=self._trainer, epochs=self.epochs, speed=speed))

    def ended(self, record: FitRecord, *, tells_all: bool, draws: bool) -> None:
        """Tells what the fit has come to: loggers more than metrics if ``tells_all``, and figures if it ``draws``."""
        if self.epochs:
            self._attempt(self._tell_end, record, tells_all, draws)

    def _tell(self, outcome: FitOutcome) -> None:
        for tell in self._adapters:
            self._attempt(tell, outcome)

    def _tell_end(self, record: FitRecord, tells_all: bool, draws: bool) -> None:
        drawn = {"parts_ms": record.parts_ms, "memory": record.memory} if draws else {}
        about: Any = {"trainer": self._trainer, "epochs": self.epochs, "speed": record.speed, **drawn}
        outcome = FitOutcome(is_end=True, record=record.path, **about)
        if tells_all:
            self._tell(outcome)
        # A report that is asked for is pointed to where it is written.
        path = None if report_path(self._trainer) is not None else record.path
        where = "" if path is None else ". Where its time went, and what to do next: lightning-accel report "
        rank_zero_info(f"lightning-accel: {outcome.line()}{where}{path.parent.parent if path is not None else ''}")

    def _attempt(self, tell: Callable[..., Any], *values: Any) -> None:
        try:
            tell(*values)
        except Exception as error:  # whatever it is: the run is worth more than what is told of it
            if not self._has_failed:
                self._has_failed = True
                say(self._trainer, f"a logger could not be told all of this run: {one_line(error)}. The run goes on.")
