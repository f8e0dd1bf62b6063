"""Tells the loggers of a fit more than metrics: a text, figures, settings with what came of them, an arrangement.

Each gets what it can show, by one function. Nothing of the user's own is touched: what TensorBoard keeps once for each
run, as its HParams tab and the arrangement of charts, is kept in a run of its own below the user's, ``<run>/accel``.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_accel.callbacks._outcome import FitOutcome
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


Adapter = Callable[[Any, FitOutcome], None]


def adapters_of(loggers: Iterable[Any]) -> list[Callable[[FitOutcome], None]]:
    """What tells those of the loggers that can be told more than metrics."""
    return [
        lambda told, tell=tell, logger=logger: tell(logger, told)  # type: ignore[misc]
        for logger in loggers
        for kind, tell in _ADAPTERS.items()
        if isinstance(logger, kind)
    ]


def _tensorboard(logger: Any, told: FitOutcome) -> None:
    """Text, Images, HParams and Custom Scalars.

    All runs below a folder share the columns of its HParams tab, which the first *experiment* that TensorBoard finds
    decides. Lightning tells of one for modules with hyperparameters: these stay what is shown, and no experiment is
    told of here. What a run has come to is among its settings and in the text, as a scalar would be a chart of one
    point.
    """
    logger.experiment.add_text(_TEXT, told.markdown, told.step)
    for name, figure in told.figures.items():
        logger.experiment.add_image(name, pixels(figure), told.step, dataformats="HWC")
    if not told.is_end:
        return
    with type(logger.experiment)(log_dir=f"{logger.log_dir}/{FOLDER}") as writer:
        if layout := _layout(told.charted()):
            writer.add_custom_scalars(layout)
        if told.settings() and not logger.hparams:
            # Lightning's logger writes with either of two packages.
            package, _, _ = type(writer).__module__.rpartition(".")
            hparams: Any = import_module(f"{package}.summary").hparams
            for summary in hparams({**told.settings(), **told.metrics()}, {})[1:]:  # the first one is the experiment
                writer.file_writer.add_summary(summary, told.step)


def _weights_and_biases(logger: Any, told: FitOutcome) -> None:
    """A table of text, images, config and summary."""
    logger.log_text(_TEXT, columns=["markdown"], data=[[told.markdown]], step=told.step)
    for name, figure in told.figures.items():
        logger.log_image(name, [figure], step=told.step)
    if told.is_end:
        logger.experiment.config.update(told.settings(), allow_val_change=True)
        logger.experiment.summary.update(told.metrics())
    if arms := list(told.compared().values()):
        logger.log_table(
            f"{PREFIX}arms", columns=list(arms[0]), data=[list(arm.values()) for arm in arms], step=told.step
        )


def _mlflow(logger: Any, told: FitOutcome) -> None:
    """Artifacts in the folder ``accel``, params and metrics."""
    logger.experiment.log_text(logger.run_id, told.markdown, f"{_TEXT}.md")
    for name, figure in told.figures.items():
        logger.experiment.log_figure(logger.run_id, figure, f"{name}.png")
    if told.is_end:
        logger.log_hyperparams(told.settings())
        logger.log_metrics(told.metrics(), told.step)
    if told.is_end and told.compared():
        logger.experiment.log_dict(logger.run_id, told.compared(), f"{PREFIX}arms.json")


def _files(logger: Any, told: FitOutcome) -> None:
    """Files in the folder ``accel`` beside ``metrics.csv``; none in a folder that is not on this machine."""
    if "://" in logger.log_dir:
        return
    folder = Path(logger.log_dir)
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / f"{_TEXT}.md").write_text(told.markdown, encoding="utf-8")
    for name, figure in told.figures.items():
        figure.savefig(folder / f"{name}.svg")
    if told.is_end and (arms := [*told.compared().values()]):
        with (folder / f"{PREFIX}arms.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*arms[0]])
            writer.writeheader()
            writer.writerows(arms)


_ADAPTERS: dict[Any, Adapter] = {
    TensorBoardLogger: _tensorboard,
    WandbLogger: _weights_and_biases,
    MLFlowLogger: _mlflow,
    CSVLogger: _files,
}


def _layout(metrics: set[str]) -> dict[str, dict[str, Any]]:
    """As ``add_custom_scalars`` takes it, of those metrics that there are."""
    layout: dict[str, dict[str, Any]] = {}
    for group, charts in _LAYOUT.items():
        for chart, names in charts.items():
            # By regular expressions, as the logger may put a prefix before the names.
            if tags := [f".*{PREFIX}{name}$" for name in names if f"{PREFIX}{name}" in metrics]:
                layout.setdefault(group, {})[chart] = ["Multiline", tags]
    return layout
