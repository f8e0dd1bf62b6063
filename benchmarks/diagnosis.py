"""Eight planted faults: which are found, what mending them is predicted to bring, and what it brings.

    python benchmarks/diagnosis.py [--pairs 3] [--rounds 6] [--scale 0.5] [--faults loader,leak] [--healthy cnn]
                                   [--json docs/results]

Each is a small training with a fault, and the same with the fault mended as the finding says. Both train at the same
time, in processes of their own, in turns of an epoch of a second or so, so that a busy minute of the machine hits both;
while it is not its turn a process sleeps. Then the record of the one with the fault is diagnosed, and the samples a
second of each turn are set beside those of its neighbour: the median of these ratios is what came of it. A process is
faster or slower than another one of the same program from its first step to its last, by a fifth here: so there are
several such pairs, and of the predictions of their records the median counts. Healthy runs
are diagnosed, too: what is found in them is false. Where TraceML is installed, each fault is trained under it once
more. Of what is not measured, the rows that this machine has already are kept, so that it can be done in parts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _traceml
import torch
from _faults import FAULTS, HEALTHY, TRAININGS, Fault
from _measure import publish

from lightning_accel.claims.machine import machine, slug
from lightning_accel.claims.measure import median_interval
from lightning_accel.core.host import Host
from lightning_accel.evidence.compare import RunComparison, compare_runs
from lightning_accel.evidence.diagnosis import Finding, diagnose
from lightning_accel.evidence.peaks import Peaks, measure_peaks
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.experiment.pair_test import RatioInterval

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from _turns import Job, Run

COLUMNS = (
    *("fault", "found", "predicted", "measured", "measured by predicted", "predicted MiB", "measured MiB"),
    *("also found", "TraceML"),
)
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).parent / "_fault_runs.py"


@dataclass(frozen=True)
class Outcome:
    """What came of one fault.

    Attributes:
        findings: In the run that has it, the most promising first; of several runs, that with the median prediction.
        came: The mended run beside that.
        speed: How many times as fast that is: the median over the turns of all pairs, each beside its neighbour.
        predictions: Of the fault's finding, pair by pair; of those in which it was found.
        traceml: What TraceML found in it; None: it is not installed.
    """

    fault: Fault
    findings: list[Finding]
    came: RunComparison
    speed: RatioInterval
    predictions: list[float]
    traceml: list[str] | None

    @property
    def place(self) -> int:
        """Of the fault among the findings, from 1; 0: it was not found."""
        names = [one.name for one in self.findings]
        return names.index(self.fault.finding) + 1 if self.fault.finding in names else 0


def records(name: str, modes: tuple[str, ...], options: argparse.Namespace, folder: Path) -> list[Record]:
    """Of runs of one training that took turns, one for each mode."""
    jobs = [
        Job(
            name=name,
            mode=mode,
            accelerator="cpu",
            log_dir=folder,
            worker="_fault_runs",
            has_children=True,
            options={"rounds": options.rounds, "scale": options.scale},
        )
        for mode in modes
    ]
    with ExitStack() as stack:
        runs = [stack.enter_context(closing(Run(job))) for job in jobs]
        for run in runs:
            run.wait_for_gate()
        for number in range(options.rounds):
            for run in runs if number % 2 == 0 else reversed(runs):
                run.take_turn()
        for run in runs:
            run.outcome()
    return [read_record(job.folder) for job in jobs]


def measured(name: str, peaks: Peaks, options: argparse.Namespace, folder: Path) -> Outcome:
    fault, pairs, ratios = FAULTS[name], [], []
    for number in range(options.pairs):
        faulty, mended = records(name, ("faulty", "mended"), options, folder / str(number))
        ratios += [b / a for a, b in zip(*map(_rates, (faulty, mended)), strict=True)][1:]
        findings = diagnose(faulty, peaks)
        found_it = next((one for one in findings if one.name == fault.finding), None)
        predicted = (0.0, 0) if found_it is None else (found_it.speedup or 0.0, found_it.freed_bytes)
        pairs.append((predicted, findings, compare_runs(faulty, mended)))
    found = None
    if _traceml.installed():
        steps = max(2, round(options.scale * fault.steps * options.rounds))
        found = _traceml.findings(SCRIPT, [name, str(folder / "traceml_logs"), str(steps)], folder / "traceml", name)
    pairs.sort(key=lambda pair: pair[0])
    _, findings, came = pairs[len(pairs) // 2]
    predictions = [speedup for (speedup, _), _, _ in pairs if speedup]
    return Outcome(fault, findings, came, RatioInterval(*median_interval(ratios)), predictions, found)


def _rates(record: Record) -> list[float]:
    """Samples a second, turn by turn."""
    return [epoch["samples_per_sec"] for epoch in record.epochs]


def row(outcome: Outcome) -> list[str]:
    fault, place = outcome.fault, outcome.place
    finding = outcome.findings[place - 1] if place else None
    speedup = None if finding is None else finding.speedup
    ratio = outcome.speed.ratio
    memory = outcome.came.memory_mib
    is_of_memory = finding is not None and finding.freed_bytes > 0
    return [
        fault.title,
        {0: "no", 1: "first"}.get(place, f"as number {place}"),
        "" if speedup is None else f"{speedup:.2f}x",
        str(outcome.speed),
        "" if speedup is None else f"{ratio / speedup:.2f}",
        f"{finding.freed_bytes / 2**20:,.0f}" if finding is not None and is_of_memory else "",
        f"{memory[0] - memory[1]:,.0f}" if memory is not None and is_of_memory else "",
        _said([one for one in outcome.findings if one is not finding]),
        _verdict(fault, outcome.traceml),
    ]


def _said(findings: list[Finding]) -> str:
    return ", ".join(one.name + (f" ({one.speedup:.2f}x)" if one.speedup else "") for one in findings)


def _verdict(fault: Fault, found: list[str] | None) -> str:
    if found is None:
        return "not installed"
    names = ", ".join(name.replace("_", " ").lower() for name in found) or "nothing"
    return f"{'found' if set(found) & set(fault.traceml) else 'not found'}: {names}"


def healthy_row(name: str, peaks: Peaks, options: argparse.Namespace, folder: Path) -> list[str]:
    (record,) = records(name, ("healthy",), options, folder)
    found = diagnose(record, peaks)
    return [HEALTHY[name].title, f"{len(found)} findings" if found else "nothing", *[""] * 5, _said(found), ""]


def details(outcome: Outcome) -> dict[str, Any]:
    return {
        "fault": outcome.fault.title,
        "findings": [
            {"name": one.name, "says": one.says.replace(f"{ROOT}/", ""), "speedup": one.speedup}
            for one in outcome.findings
        ],
        "comparison": outcome.came.to_dict(),
        "speed": asdict(outcome.speed),
        "predictions": outcome.predictions,
        "traceml": outcome.traceml,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="of processes for each fault")
    parser.add_argument("--rounds", type=int, default=6, help="of each pair")
    parser.add_argument("--scale", type=float, default=0.5, help="of the steps of a turn")
    parser.add_argument("--faults", type=_names, default=[*FAULTS], metavar=",".join(FAULTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--healthy", type=_names, default=[*HEALTHY], metavar=",".join(HEALTHY))
    options, _ = parser.parse_known_args()
    print(f"TraceML {_traceml.installed()}" if _traceml.installed() else _traceml.MISSING)
    peaks, native = measure_peaks(torch.device("cpu")), Host.detect("cpu").native_bf16
    rows, outcomes = _measured_before(options.json)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.faults:
            if FAULTS[name].is_of_bfloat16 and not native:
                rows[name] = [FAULTS[name].title, "no fault here: bfloat16 is not native", *[""] * 7]
            else:
                outcome = measured(name, peaks, options, Path(folder))
                rows[name], outcomes[name] = row(outcome), details(outcome)
            print(" | ".join(rows[name]), flush=True)
        for name in options.healthy:
            rows[name] = healthy_row(name, peaks, options, Path(folder))
            print(" | ".join(rows[name]), flush=True)
    in_order = [rows[name] for name in TRAININGS if name in rows]
    more = {
        "traceml": _traceml.installed() or None,
        "pairs": options.pairs,
        "rounds": options.rounds,
        "outcomes": outcomes,
    }
    publish("diagnosis", "python benchmarks/diagnosis.py", COLUMNS, in_order, more, by_machine=True)


def _measured_before(folder: Path | None) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """The rows and the details of this machine's file, by the names of the trainings."""
    path = None if folder is None else folder / "diagnosis" / f"{slug(machine())}.json"
    if path is None or not path.exists():
        return {}, {}
    found = json.loads(path.read_text(encoding="utf-8"))
    names = {training.title: name for name, training in TRAININGS.items()}
    return {names[cells[0]]: cells for cells in found["rows"] if cells[0] in names}, found["details"]["outcomes"]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    main()
