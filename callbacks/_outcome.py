"""What a fit has come to, in the words and numbers that the console and loggers get."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_accel.callbacks._announcements import report_of
from lightning_accel.core.report import Report
from lightning_accel.evidence.epoch_speed import PREFIX, EpochSpeed
from lightning_accel.evidence.figures import MEND, Unit, can_draw
from lightning_accel.evidence.record_reader import read_earlier, read_record
from lightning_accel.evidence.speed import Speed
from lightning_accel.evidence.step_breakdown import MemoryPeak
from lightning_accel.lightning.packages import Trainer
from lightning_accel.settings import Plan
from lightning_accel.tuning.pairs import RatioInterval
from lightning_accel.tuning.tuning_result import Tuning

_RUN = f"{PREFIX}run/"  # not the names of an epoch's metrics, with which they would share a chart


@dataclass(frozen=True)
class LoggedSession:
    """Settings, and what came of them."""

    name: str  # of what was tried in live trials; empty: the run itself
    settings: dict[str, Any]  # name → value
    metrics: dict[str, float]  # name → value


@dataclass(frozen=True, kw_only=True)
class FitOutcome:
    """What is known of a fit at its end, or where it has settled."""

    epochs: Sequence[EpochSpeed]  # those that have ended
    speed: Speed | None  # how fast it is; None: too few steps to tell
    parts_ms: Mapping[str, float]  # what a step's time goes to; empty where none was looked at
    report: Report | None  # what the plugin did; None without it
    tuning: Tuning | None  # what live trials have come to; None without them
    settings: Mapping[str, Any] | None  # of the plan; None without the plugin
    memory: MemoryPeak | None  # at the peak of a step that was taken apart; None: none was

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        epochs: Sequence[EpochSpeed],
        speed: Speed | None,
        parts_ms: Mapping[str, float],
        memory: MemoryPeak | None = None,
    ) -> FitOutcome:
        """Of a fit as it stands."""
        tuning, plan = (getattr(trainer.precision_plugin, name, None) for name in ("tuning", "plan"))
        return cls(
            epochs=epochs,
            speed=speed,
            parts_ms=parts_ms,
            report=report_of(trainer),
            tuning=tuning if isinstance(tuning, Tuning) else None,
            settings=plan.to_dict() if isinstance(plan, Plan) else None,
            memory=memory,
        )

    @property
    def ratio(self) -> RatioInterval | None:
        """How many times as fast as plain it runs; None where that is not known, and where it runs as plain."""
        tuning = self.tuning
        return None if tuning is None or tuning.whole is None or not tuning.choices else tuning.whole.interval

    @property
    def peak_memory_mib(self) -> float | None:
        return max((epoch.peak_memory_mib for epoch in self.epochs if epoch.peak_memory_mib is not None), default=None)

    def line(self, record: Path | None = None) -> str:
        """All of it in a line, for the console."""
        parts = [str(self.speed) if self.speed is not None else "speed not measured: too few steps"]
        if self.ratio is not None:
            parts.append(f"{self.ratio} over plain")
        if self.peak_memory_mib is not None:
            parts.append(f"peak {self.peak_memory_mib:,.0f} MiB")
        if self.epochs and (stragglers := self.epochs[-1].stragglers) is not None:
            parts.append(stragglers.line())
        techniques = {} if self.report is None else self.report.techniques
        in_force = [name for name, one in techniques.items() if one.acts and name != "tuning"]
        parts.append(f"with {', '.join(in_force)}" if in_force else "as the user wrote it")
        line = ", ".join(parts)
        if record is None:
            return line
        return f"{line}. Where its time went, and what to do next: lightning-accel report {record.parent.parent}"

    def markdown(self, record: Path | None = None) -> str:
        """For loggers that show text; with a record, at the run's end, that of a report."""
        lines = [f"**{self.line()}**"]
        if record is not None:
            lines.append(self._report_on(record))
        elif self.report is not None:
            lines.append(f"```\n{self.report.to_text()}\n```")
        if not can_draw():
            lines.append(MEND)
        return "\n\n".join(lines) + "\n"

    def _report_on(self, record: Path) -> str:
        from lightning_accel.evidence.render import to_markdown
        from lightning_accel.evidence.report_model import page_of  # late: nobody asks during a run

        found = read_record(record)
        done = None if self.report is None else self.report.to_dict()
        return to_markdown(page_of(replace(found, status="finished", report=done), read_earlier(found)))

    def pictures(self) -> Iterator[tuple[str, tuple[Mapping[str, float], Unit, str]]]:
        """By name what :func:`~lightning_accel.evidence.figures.share_bar` is to draw."""
        if sum(self.parts_ms.values()) > 0:
            yield f"{PREFIX}step_time", (self.parts_ms, "ms", "Where a step's time goes")
        if self.memory is not None:
            yield f"{PREFIX}memory", (self.memory.parts, "bytes", "All tensors at the peak of a step")

    def sessions(self) -> Iterator[LoggedSession]:
        """The run, and everything that its live trials compared."""
        # Without what is off, of which there is much: TensorBoard shows a few columns at first.
        on = {name: value for name, value in (self.settings or {}).items() if value and value != "off"}
        settings = {f"{PREFIX}{name}": _plain(value) for name, value in on.items()}
        yield LoggedSession("", settings, dict(self._metrics()))
        for name, result in ({} if self.tuning is None else self.tuning.results).items():
            settings = {f"{PREFIX}compared": name, f"{PREFIX}verdict": result.verdict}
            yield LoggedSession(name, settings, {**_of(result.interval), f"{_RUN}turns": float(result.turns)})

    def _metrics(self) -> Iterator[tuple[str, float]]:
        if self.ratio is not None:
            yield from _of(self.ratio).items()
        if self.speed is not None:
            name = "samples_per_sec" if self.speed.unit == "samples" else "steps_per_sec"
            yield f"{_RUN}{name}", self.speed.per_second
        if self.peak_memory_mib is not None:
            yield f"{_RUN}peak_memory_mib", self.peak_memory_mib


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)


def _of(interval: RatioInterval) -> dict[str, float]:
    bounds = {"speed_ratio": interval.ratio, "speed_ratio_low": interval.low, "speed_ratio_high": interval.high}
    return {f"{_RUN}{name}": value for name, value in bounds.items() if math.isfinite(value)}
