"""Where a fit's record and report go. A report is left where one was asked for, and if memory ran out."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_accel.callbacks._announcements import say, say_of_rank
from lightning_accel.core.report import one_line
from lightning_accel.evidence.record import FOLDER, RECORD_VARIABLE
from lightning_accel.evidence.record_reader import read_earlier, read_record
from lightning_accel.lightning.packages import Trainer, TrainerFn
from lightning_accel.settings import Plan


def report_path(trainer: Trainer) -> Path | None:
    """The path at which the plan of a fit wants its report; None if it wants none.

    An evaluation is not to overwrite a training's, nor one rank another's.
    """
    if trainer.state.fn != TrainerFn.FITTING or not trainer.is_global_zero:
        return None
    plan = getattr(trainer.precision_plugin, "plan", None)
    return Path(plan.report) if isinstance(plan, Plan) and isinstance(plan.report, str) else None


def leave_report(trainer: Trainer, record: Path, *, is_asked_by_memory: bool) -> None:
    """Writes it, if there is to be one. It never fails a run: what cannot be written is said.

    One of a fit that died of a lack of memory is left beside its record, at least.
    """
    wanted = report_path(trainer)
    if wanted is None and not is_asked_by_memory:
        return
    beside = record.with_suffix(".html" if wanted is None else wanted.suffix)
    try:
        from lightning_accel.evidence.peaks import measure_peaks
        from lightning_accel.evidence.render import write
        from lightning_accel.evidence.report_model import page_of  # late: few runs are asked for one

        found = read_record(record)
        # A device without memory, or that has failed, is not to be asked for more; under XLA a clock times recording.
        device = trainer.strategy.root_device
        can_be_timed = found.status == "finished" and device.type != "xla"
        peaks = measure_peaks(device) if can_be_timed else None
        page = page_of(found, read_earlier(found), peaks)
        try:
            write(page, wanted or beside)
        except OSError as error:
            if wanted is None:
                raise
            write(page, beside)
            say(trainer, f"report={str(wanted)!r} cannot be written ({one_line(error)}); the report is in {beside}")
        else:
            say_of_rank(trainer, f"the report is in {wanted or beside}")
    except Exception as error:  # whatever it is: the run is worth more than its report
        say(trainer, f"this run's report could not be written: {one_line(error)}")


def shown_in_notebooks(record: Path) -> str:
    """The page on a run; empty if its record is not there any more."""
    from lightning_accel.evidence.render import to_html
    from lightning_accel.evidence.report_model import page_on  # late: few are asked for

    with suppress(OSError, ValueError):
        return to_html(page_on(record))
    return ""


def record_folder(trainer: Trainer) -> Path | None:
    """The folder in which this rank keeps a fit's record; None if the run has no folder, or is a rehearsal."""
    if not trainer.is_global_zero or trainer.fast_dev_run or trainer.barebones:  # type: ignore[attr-defined]
        return None
    asked_for = os.environ.get(RECORD_VARIABLE)
    folder = Path(asked_for) if asked_for else next(filter(None, map(folder_of, trainer.loggers)), None)
    if folder is None and (report := report_path(trainer)) is not None:
        folder = report.parent
        try:
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError:
            folder = Path(trainer.default_root_dir)
    return None if folder is None else folder / FOLDER


def folder_of(logger: Any) -> Path | None:
    """As TensorBoard's and CSV's have; others have one for all runs, or none."""
    try:
        folder = getattr(logger, "log_dir", None)
    except Exception:  # somebody else's property: no reason to end the run
        return None
    return Path(folder) if isinstance(folder, str | Path) and "://" not in str(folder) else None
