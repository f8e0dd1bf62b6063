"""Tells the loggers of a fit more than metrics: a text, figures, settings with what came of them, an arrangement.

Each gets what it can show, by one function. Nothing of the user's own is touched: what TensorBoard keeps once for each
run, as its HParams tab and the arrangement of charts, is kept in a run of its own below the user's, ``<run>/accel``.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_accel.callbacks._outcome import LoggedSession
from lightning_accel.evidence.epoch_speed import PREFIX
from lightning_accel.evidence.figures import pixels
from lightning_accel.evidence.record import FOLDER
from lightning_accel.lightning.packages import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

_LAYOUT: dict[str, dict[str, tuple[str, ...]]] = {
    "accel: speed": {
        "samples per second": ("samples_per_sec",),
        "steps per second": ("steps_per_sec",),
        "TFLOP/s": ("tflops",),
        "share of what the device could do": ("mfu",),
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

_TEXT = f"{PREFIX}summary"


@dataclass(frozen=True, kw_only=True)
class Told:
    """What there is to tell a logger. Where live trials settle it is a text, at the end of a fit all the rest, too."""

    step: int  # the optimizer's last
    markdown: str
    figures: Mapping[str, Any] = field(default_factory=dict)  # name → a figure of matplotlib's
    run: LoggedSession | None = None  # the settings of the run, and what came of them
    compared: Sequence[LoggedSession] = ()  # what its live trials compared
    charted: frozenset[str] = frozenset()  # the metrics that were logged more than once


Adapter = Callable[[Any, Told], None]


def adapters_of(loggers: Iterable[Any]) -> list[Callable[[Told], None]]:
    """What tells those of the loggers that can be told more than metrics."""
    return [
        lambda told, tell=tell, logger=logger: tell(logger, told)  # type: ignore[misc]
        for logger in loggers
        for kind, tell in _ADAPTERS.items()
        if isinstance(logger, kind)
    ]


def _tensorboard(logger: Any, told: Told) -> None:
    """Text, Images, HParams and Custom Scalars.

    All runs below a folder share the columns of its HParams tab, which the first *experiment* that TensorBoard finds
    decides. Lightning tells of one for modules with hyperparameters: these stay what is shown, and no experiment is
    told of here. What a run has come to is among its settings and in the text, as a scalar would be a chart of one
    point.
    """
    logger.experiment.add_text(_TEXT, told.markdown, told.step)
    for name, figure in told.figures.items():
        logger.experiment.add_image(name, pixels(figure), told.step, dataformats="HWC")
    if told.run is None:
        return
    with type(logger.experiment)(log_dir=f"{logger.log_dir}/{FOLDER}") as writer:
        if layout := _layout(told.charted):
            writer.add_custom_scalars(layout)
        if told.run.settings and not logger.hparams:
            # Lightning's logger writes with either of two packages.
            package, _, _ = type(writer).__module__.rpartition(".")
            hparams: Any = import_module(f"{package}.summary").hparams
            for summary in hparams({**told.run.settings, **told.run.metrics}, {})[
                1:
            ]:  # the first one is the experiment
                writer.file_writer.add_summary(summary, told.step)


def _weights_and_biases(logger: Any, told: Told) -> None:
    """A table of text, images, config and summary."""
    logger.log_text(_TEXT, columns=["markdown"], data=[[told.markdown]], step=told.step)
    for name, figure in told.figures.items():
        logger.log_image(name, [figure], step=told.step)
    if told.run is not None:
        logger.experiment.config.update(told.run.settings, allow_val_change=True)
        logger.experiment.summary.update(told.run.metrics)
    if told.compared:
        header, rows = _table(told.compared)
        logger.log_table(f"{PREFIX}arms", columns=header, data=rows, step=told.step)


def _mlflow(logger: Any, told: Told) -> None:
    """Artifacts in the folder ``accel``, params and metrics."""
    logger.experiment.log_text(logger.run_id, told.markdown, f"{_TEXT}.md")
    for name, figure in told.figures.items():
        logger.experiment.log_figure(logger.run_id, figure, f"{name}.png")
    if told.run is not None:
        logger.log_hyperparams(told.run.settings)
        logger.log_metrics(told.run.metrics, told.step)
    if told.compared:
        arms = {session.name: {**session.settings, **session.metrics} for session in told.compared}
        logger.experiment.log_dict(logger.run_id, arms, f"{PREFIX}arms.json")


def _files(logger: Any, told: Told) -> None:
    """Files in the folder ``accel`` beside ``metrics.csv``; none in a folder that is not on this machine."""
    if "://" in logger.log_dir:
        return
    folder = Path(logger.log_dir)
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / f"{_TEXT}.md").write_text(told.markdown, encoding="utf-8")
    for name, figure in told.figures.items():
        figure.savefig(folder / f"{name}.svg")
    if told.compared:
        with (folder / f"{PREFIX}arms.csv").open("w", newline="", encoding="utf-8") as file:
            header, rows = _table(told.compared)
            csv.writer(file).writerows([header, *rows])


_ADAPTERS: dict[Any, Adapter] = {
    TensorBoardLogger: _tensorboard,
    WandbLogger: _weights_and_biases,
    MLFlowLogger: _mlflow,
    CSVLogger: _files,
}


def _layout(metrics: frozenset[str]) -> dict[str, dict[str, Any]]:
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
