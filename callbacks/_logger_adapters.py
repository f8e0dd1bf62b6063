"""Tells the loggers of a fit more than metrics: a text, figures, settings with what came of them, an arrangement.

Each gets what it can show. Nothing of the user's own is touched: what TensorBoard keeps once for each run, as its
HParams tab and the arrangement of charts, is kept in a run of its own below the user's, ``<run>/accel``.
"""

from __future__ import annotations

import csv
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from importlib import import_module
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_accel.callbacks._epoch import PREFIX
from lightning_accel.callbacks._outcome import LoggedSession
from lightning_accel.evidence.figures import pixels
from lightning_accel.evidence.record import FOLDER
from lightning_accel.lightning.packages import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

_LAYOUT: dict[str, dict[str, tuple[str, ...]]] = {
    "accel: speed": {
        "samples per second": ("samples_per_sec",),
        "steps per second": ("steps_per_sec",),
        "TFLOP/s": ("tflops",),
        "share of what the device could do": ("mfu",),
        "times as fast as plain": ("tuning/ratio", "tuning/low"),
    },
    "accel: step times": {
        "ms": ("step_ms_p50", "step_ms_p95", "step_ms_p95_slowest_rank", "before_backward_ms_p95_latest_rank"),
    },
    "accel: memory": {"MiB": ("peak_memory_mib", "host_rss_mib")},
    "accel: waiting": {"share of the time spent waiting for data": ("data_wait_frac",)},
    "accel: scaler": {"loss scale": ("loss_scale",), "skipped steps": ("skipped_steps",)},
    "accel: energy": {"joules per sample": ("energy_j_per_sample",)},
}
"""Group → chart → metrics."""


class Board(ABC):
    """What one logger can be told."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    @abstractmethod
    def text(self, name: str, markdown: str, step: int) -> None:
        """Files a text."""

    @abstractmethod
    def figure(self, name: str, figure: Any, step: int) -> None:
        """Files a figure of matplotlib's."""

    @abstractmethod
    def conclude(
        self, run: LoggedSession, compared: Sequence[LoggedSession], metrics: AbstractSet[str], step: int
    ) -> None:
        """Files settings and what came of them, and puts charts in groups where it has charts.

        ``compared`` is what the run's live trials compared, ``metrics`` the names of all that were logged, ``step`` the
        optimizer's last.
        """


def boards_of(loggers: Iterable[Any]) -> list[Board]:
    """Those of the loggers that can be told more than metrics."""
    return [board(logger) for logger in loggers for kind, board in _BOARDS.items() if isinstance(logger, kind)]


class TensorBoard(Board):
    """Text, Images, HParams and Custom Scalars.

    All runs below a folder share the columns of its HParams tab, which one that has told of an *experiment* decides.
    Lightning does so for modules with hyperparameters. TensorBoard takes the first experiment that it finds and no
    other, and makes a row of every session: told of in a folder of their own, too, ours would either take the place of
    the user's columns or add rows that are empty under them. So these stay what is shown there: beside them the arms
    that were compared are scalars alone, and no experiment is ever told of.
    """

    @override
    def text(self, name: str, markdown: str, step: int) -> None:
        self._logger.experiment.add_text(name, markdown, step)

    @override
    def figure(self, name: str, figure: Any, step: int) -> None:
        self._logger.experiment.add_image(name, pixels(figure), step, dataformats="HWC")

    @override
    def conclude(
        self, run: LoggedSession, compared: Sequence[LoggedSession], metrics: AbstractSet[str], step: int
    ) -> None:
        shows_hparams = run.settings and not self._logger.hparams
        with self._below("") as writer:
            writer.add_custom_scalars(_layout(metrics))
            if shows_hparams:
                self._add(writer, run, step)
        for session in compared:
            with self._below(f"arms/{_slug(session.name)}") as writer:
                if shows_hparams:
                    self._add(writer, session, step)
                else:
                    self._add_scalars(writer, session, step)

    def _add(self, writer: Any, session: LoggedSession, step: int) -> None:
        # Lightning's logger writes with either of two packages.
        package, _, _ = type(writer).__module__.rpartition(".")
        hparams: Any = import_module(f"{package}.summary").hparams
        for summary in hparams(session.settings, session.metrics)[1:]:  # the first one is the experiment
            writer.file_writer.add_summary(summary, step)
        self._add_scalars(writer, session, step)

    def _add_scalars(self, writer: Any, session: LoggedSession, step: int) -> None:
        for name, value in session.metrics.items():
            writer.add_scalar(name, value, step)

    def _below(self, folder: str) -> Any:
        """A writer of a run below the user's."""
        path = f"{self._logger.log_dir}/{FOLDER}/{folder}".rstrip("/")
        return type(self._logger.experiment)(log_dir=path)


class WeightsAndBiases(Board):
    """A table of text, images, config and summary."""

    @override
    def text(self, name: str, markdown: str, step: int) -> None:
        self._logger.log_text(name, columns=["markdown"], data=[[markdown]], step=step)

    @override
    def figure(self, name: str, figure: Any, step: int) -> None:
        self._logger.log_image(name, [figure], step=step)

    @override
    def conclude(
        self, run: LoggedSession, compared: Sequence[LoggedSession], metrics: AbstractSet[str], step: int
    ) -> None:
        self._logger.experiment.config.update(run.settings, allow_val_change=True)
        self._logger.experiment.summary.update(run.metrics)
        if compared:
            header, rows = _table(compared)
            self._logger.log_table(f"{PREFIX}arms", columns=header, data=rows, step=step)


class MLFlow(Board):
    """Artifacts in the folder ``accel``, params and metrics."""

    @override
    def text(self, name: str, markdown: str, step: int) -> None:
        self._logger.experiment.log_text(self._logger.run_id, markdown, f"{name}.md")

    @override
    def figure(self, name: str, figure: Any, step: int) -> None:
        self._logger.experiment.log_figure(self._logger.run_id, figure, f"{name}.png")

    @override
    def conclude(
        self, run: LoggedSession, compared: Sequence[LoggedSession], metrics: AbstractSet[str], step: int
    ) -> None:
        self._logger.log_hyperparams(run.settings)
        self._logger.log_metrics(run.metrics, step)
        arms = {session.name: {**session.settings, **session.metrics} for session in compared}
        if arms:
            self._logger.experiment.log_dict(self._logger.run_id, arms, f"{PREFIX}arms.json")


class Files(Board):
    """Files in the folder ``accel`` beside ``metrics.csv``; none in a folder that is not on this machine."""

    @override
    def text(self, name: str, markdown: str, step: int) -> None:
        if (path := self._path(f"{name}.md")) is not None:
            path.write_text(markdown, encoding="utf-8")

    @override
    def figure(self, name: str, figure: Any, step: int) -> None:
        if (path := self._path(f"{name}.svg")) is not None:
            figure.savefig(path)

    @override
    def conclude(
        self, run: LoggedSession, compared: Sequence[LoggedSession], metrics: AbstractSet[str], step: int
    ) -> None:
        path = self._path(f"{PREFIX}arms.csv")
        if compared and path is not None:
            with path.open("w", newline="", encoding="utf-8") as file:
                header, rows = _table(compared)
                csv.writer(file).writerows([header, *rows])

    def _path(self, name: str) -> Path | None:
        if "://" in self._logger.log_dir:
            return None
        path = Path(self._logger.log_dir) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


_BOARDS: dict[Any, Any] = {
    TensorBoardLogger: TensorBoard,
    WandbLogger: WeightsAndBiases,
    MLFlowLogger: MLFlow,
    CSVLogger: Files,
}


def _layout(metrics: AbstractSet[str]) -> dict[str, dict[str, Any]]:
    """As ``add_custom_scalars`` takes it, of those metrics that there are."""
    layout: dict[str, dict[str, Any]] = {}
    for group, charts in _LAYOUT.items():
        for chart, names in charts.items():
            # By regular expressions, as the logger may put a prefix before the names.
            if tags := [f".*{PREFIX}{name}$" for name in names if f"{PREFIX}{name}" in metrics]:
                layout.setdefault(group, {})[chart] = ["Multiline", tags]
    return layout


def _table(sessions: Iterable[LoggedSession]) -> tuple[list[str], list[list[Any]]]:
    """Header and rows; where a session has no such value, None."""
    rows = [{**session.settings, **session.metrics} for session in sessions]
    header = list(dict.fromkeys(name for row in rows for name in row))
    return header, [[row.get(name) for name in header] for row in rows]


def _slug(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", name)
