"""``lightning-accel report RUN``: writes the report of a run from its record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from lightning_accel.evidence.peaks import Peaks
    from lightning_accel.evidence.record import Record


def report(run: Path, *, out: Annotated[Path, {"metavar": "FILE"}] = Path("report.html")) -> int:
    """Writes the report of a run from what it has left in the folder of its logger.

    Args:
        run: the folder of a run, or a record in it
        out: where to: .html, .md or .json (default: report.html)
    """
    from lightning_accel.evidence.record_reader import read_earlier, read_record  # late: --help without torch
    from lightning_accel.evidence.render import form_of, write
    from lightning_accel.evidence.report_model import page_of

    record = read_record(run)
    form_of(out)
    page = page_of(record, read_earlier(record), _peaks_of(record))
    write(page, out)
    print(page.headline)
    print(page.verdict)
    for one in page.findings[:1]:
        gain = f" (predicted: {one.speedup:.2f}x)" if one.speedup and one.speedup > 1 else ""
        print(f"Next: {one.action}{gain}")
        if one.python:
            print(f"  {one.python}")
    print(f"All of it: {out}")
    return 0


def _peaks_of(record: Record) -> Peaks | None:
    """Returns the peak performance of the machine if the run was on this one; otherwise None."""
    from lightning_accel.core.host import Host
    from lightning_accel.evidence.peaks import measure_peaks

    host = Host.detect()
    if host.described != record.header.machine or host.device_type not in ("cpu", "cuda"):
        return None
    import torch

    return measure_peaks(torch.device(host.device_type))
