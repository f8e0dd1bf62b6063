"""What a fit has come to, in the words and numbers that the console and loggers get.

Loggers are told more than metrics: a text, figures, settings with what came of them, an arrangement. Each gets what it
can show, by one function. Nothing of the user's own is touched: what TensorBoard keeps once for each run, as its
HParams tab and the arrangement of charts, is kept in a run of its own below the user's, ``<run>/accel``.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_accel.callbacks._announcements import is_held, report_of, tuning_of
from lightning_accel.evidence.epoch_speed import PREFIX, EpochSpeed
from lightning_accel.evidence.figures import MEND, can_draw, pixels, share_bar
from lightning_accel.evidence.record import FOLDER
from lightning_accel.evidence.speed import Speed
from lightning_accel.evidence.step_breakdown import MemoryPeaked
from lightning_accel.experiment.pair_test import RatioInterval
from lightning_accel.lightning.packages import CSVLogger, MLFlowLogger, TensorBoardLogger, Trainer, WandbLogger
from lightning_accel.settings import Plan
from lightning_accel.techniques.registry import declarations

_RUN = f"{PREFIX}run/"  # not the names of an epoch's metrics, with which they would share a chart
_BOUNDS = (f"{_RUN}speed_ratio", f"{_RUN}speed_ratio_low", f"{_RUN}speed_ratio_high")


@dataclass(frozen=True, kw_only=True)
class FitOutcome:
    """What is known of a fit where it has settled, or at its end: what loggers and console are told."""

    trainer: Trainer
    epochs: Sequence[EpochSpeed]  # those that have ended
    speed: Speed | None  # how fast it is; None: too few steps to tell
    is_end: bool = False  # whether settings, numbers and figures are to be told, too
    record: Path | None = None  # of the run, at its end; None: there is none
    parts_ms: Mapping[str, float] = field(default_factory=dict)  # what a step's time goes to, where it is to be drawn
    memory: MemoryPeaked | None = None  # at the peak of a step that was taken apart, likewise

    @property
    def step(self) -> int:
        """The optimizer's last."""
        return self.trainer.global_step

    @property
    def ratio(self) -> RatioInterval | None:
        """How many times as fast as plain it runs; None where that is not known, and where it runs as plain."""
        tuning = tuning_of(self.trainer)
        if tuning is None or tuning.whole is None or not tuning.choices:
            return None
        return tuning.whole.interval if is_held(tuning, report_of(self.trainer)) else None

    @property
    def peak_memory_mib(self) -> float | None:
        return max((epoch.peak_memory_mib for epoch in self.epochs if epoch.peak_memory_mib is not None), default=None)

    def line(self) -> str:
        """All of it in a line, for the console."""
        parts = [str(self.speed) if self.speed is not None else "speed not measured: too few steps"]
        tuning = tuning_of(self.trainer)
        if tuning is not None and self.ratio is not None:
            parts.append(f"{self.ratio} over plain{' in an earlier run' * tuning.is_earlier}")
        if self.peak_memory_mib is not None:
            parts.append(f"peak {self.peak_memory_mib:,.0f} MiB")
        if self.epochs and (stragglers := self.epochs[-1].stragglers) is not None:
            parts.append(stragglers.line())
        report = report_of(self.trainer)
        techniques = {} if report is None else report.techniques
        in_force = [name for name, one in techniques.items() if one.acts and name != "tuning"]
        parts.append(f"with {', '.join(in_force)}" if in_force else "as the user wrote it")
        return ", ".join(parts)

    @functools.cached_property
    def markdown(self) -> str:
        """For loggers that show text; of a run that has left a record, its report."""
        from lightning_accel.evidence.render import to_markdown
        from lightning_accel.evidence.report_model import page_on  # late: nobody asks during a run

        lines, report = [f"**{self.line()}**"], report_of(self.trainer)
        if self.record is not None:
            done = None if report is None else report.to_dict()
            lines.append(to_markdown(page_on(self.record, status="finished", report=done)))
        elif report is not None:
            lines.append(f"```\n{report.to_text()}\n```")
        if not can_draw():
            lines.append(MEND)
        return "\n\n".join(lines) + "\n"

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """Figures of matplotlib's, where it is installed, by name."""
        found = {}
        if sum(self.parts_ms.values()) > 0 and can_draw():
            found[f"{PREFIX}step_time"] = share_bar(self.parts_ms, "ms", "Where a step's time goes")
        if self.memory is not None and can_draw():
            found[f"{PREFIX}memory"] = share_bar(self.memory.parts, "bytes", "All tensors at the peak of a step")
        return found

    def settings(self) -> dict[str, Any]:
        """What is on, of which TensorBoard shows a few columns at first."""
        plan = getattr(self.trainer.precision_plugin, "plan", None)
        given = plan.settings() if isinstance(plan, Plan) else {}
        values = {name: declarations()[name].switch(value) for name, value in given.items()}
        return {f"{PREFIX}{name}": _plain(value) for name, value in values.items() if value and value != "off"}

    def compared(self) -> dict[str, dict[str, Any]]:
        """By name everything that its live trials compared."""
        tuning = tuning_of(self.trainer)
        return {
            name: {
                **{f"{PREFIX}compared": name, f"{PREFIX}verdict": result.verdict},
                **dict.fromkeys(_BOUNDS),  # so that all have the same names
                **_of(result.interval),
                f"{_RUN}turns": float(result.turns),
            }
            for name, result in ({} if tuning is None else tuning.results).items()
        }

    def metrics(self) -> dict[str, float]:
        """The run in numbers."""
        found = {} if self.ratio is None else _of(self.ratio)
        if self.speed is not None:
            name = "samples_per_sec" if self.speed.unit == "samples" else "steps_per_sec"
            found[f"{_RUN}{name}"] = self.speed.per_second
        if self.peak_memory_mib is not None:
            found[f"{_RUN}peak_memory_mib"] = self.peak_memory_mib
        return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)


def _of(interval: RatioInterval) -> dict[str, float]:
    bounds = zip(_BOUNDS, (interval.ratio, interval.low, interval.high), strict=True)
    return {name: value for name, value in bounds if math.isfinite(value)}


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
        # Of metrics that were logged more than once.
        if len(told.epochs) > 1 and (layout := _layout(set(told.epochs[0].metrics()))):
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


_ADAPTERS: dict[Any, Callable[[Any, FitOutcome], None]] = {
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
