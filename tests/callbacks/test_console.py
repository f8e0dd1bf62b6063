"""What a run says on the console: a line where it settles, one at its end, and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.callbacks._outcome import FitOutcome
from support import measured_runs
from support.console import heard
from support.live_runs import Speed, Timed, fit, simulated
from support.measured_runs import Model
from support.simulated_machine import SimulatedRun


@pytest.mark.medium
def test_a_run_says_where_it_settles_and_what_has_come_of_it(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with heard() as lines, simulated(1.5) as time:
        fit(Timed(time), logger=logger, callbacks=[SpeedMemoryLogger()])
    settled, end = lines
    assert settled.startswith("lightning-accel: from step ")
    assert "over plain, on" in settled
    for words in ("samples/s", "x [", "over plain", "peak", "MiB", "with speed"):
        assert words in end
    assert end.endswith(f"lightning-accel report {logger.log_dir}")


def test_a_run_that_is_too_short_to_settle_says_one_line() -> None:
    with heard() as lines:
        measured_runs.fit(Model(), plugins=[AccelPlugin(precision="32-true")])
    (line,) = (line for line in lines if "waiting for data" not in line)  # advice, which hangs on the machine
    assert "samples/s, peak" in line
    assert "Record" not in line  # there is no logger with a folder for one


def test_what_nothing_was_faster_than_is_as_the_user_wrote_it(tmp_path: Path) -> None:
    with heard() as lines, simulated(0.8) as time:
        fit(Timed(time), logger=CSVLogger(tmp_path), callbacks=[SpeedMemoryLogger()])
    settled, end = lines
    assert "none of the options on trial was measurably faster" in settled
    assert "over plain" not in end
    assert "as the user wrote it" in end


class Wanes(Timed):
    """What makes its steps faster makes them slower later on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 150:
            Speed.speedup = 0.6
        return super().training_step(batch, batch_idx)


@pytest.mark.medium
def test_what_is_found_on_the_way_is_in_the_report_and_not_on_the_console() -> None:
    with heard() as lines, simulated(1.5) as time:
        plugin = fit(Wanes(time), 700)
        notes = plugin.report.notes
    assert ["over plain" in line for line in lines] == [True, False]  # where it settles, and settles otherwise
    assert "a step takes longer than it did: what holds is tried against the plain run again" in notes
    assert any("speed is taken back" in note for note in notes)


def test_a_run_that_is_interrupted_says_what_has_come_of_it_so_far() -> None:
    def interrupt(module: Model, batch_idx: int) -> None:
        if module.current_epoch == 1:
            raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    try:
        with heard() as lines, pytest.raises(SystemExit):
            measured_runs.fit(Model(interrupt), max_epochs=2)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    assert "samples/s, peak" in lines[-1]


@pytest.mark.parametrize(("is_earlier", "whose"), [(False, ""), (True, " in an earlier run")])
def test_the_last_line_says_which_run_has_measured_the_speed_over_plain(
    make_trainer: Callable[..., Any], is_earlier: bool, whose: str
) -> None:
    trainer = make_trainer()
    tuning = replace(SimulatedRun({"attention": 1.31}, 100).run(), is_earlier=is_earlier)
    trainer.precision_plugin.tuning = tuning  # as AccelPlugin has it
    assert tuning.whole is not None
    line = FitOutcome(trainer=trainer, epochs=[], speed=None).line()
    assert f", {tuning.whole.interval} over plain{whose}, " in line
