"""What a fit has come to, in the words and numbers that the console and loggers get."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_accel.callbacks._announcements import report_of, tuning_of
from lightning_accel.evidence.epoch_speed import PREFIX, EpochSpeed
from lightning_accel.evidence.figures import MEND, can_draw, share_bar
from lightning_accel.evidence.speed import Speed
from lightning_accel.evidence.step_breakdown import MemoryPeaked
from lightning_accel.experiment.pair_test import RatioInterval
from lightning_accel.lightning.packages import Trainer
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
        return None if tuning is None or tuning.whole is None or not tuning.choices else tuning.whole.interval

    @property
    def peak_memory_mib(self) -> float | None:
        return max((epoch.peak_memory_mib for epoch in self.epochs if epoch.peak_memory_mib is not None), default=None)

    def line(self) -> str:
        """All of it in a line, for the console."""
        parts = [str(self.speed) if self.speed is not None else "speed not measured: too few steps"]
        if self.ratio is not None:
            parts.append(f"{self.ratio} over plain")
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

    def charted(self) -> set[str]:
        """The metrics that were logged more than once."""
        return set(self.epochs[0].metrics()) if len(self.epochs) > 1 else set()

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
