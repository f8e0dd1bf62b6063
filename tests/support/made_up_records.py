"""Records of runs that never were: of so many steps, all alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_accel.evidence.diagnosis import Finding, diagnose
from lightning_accel.evidence.events import RunStarted, StepMeasured
from lightning_accel.evidence.peaks import Peaks
from lightning_accel.evidence.phase_names import BACKWARD, DATA, FORWARD
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.step_breakdown import Anatomy, MemoryPeaked, ModuleCost

STEPS = 192
PIECES = 32
PEAKS = Peaks(float32_flops=1e11, bfloat16_flops=4e11, bytes_per_sec=1e10)


def header(**values: Any) -> RunStarted:
    plain: dict[str, Any] = {
        "started": "2026-11-23T12:00:00+00:00",
        "command": ["train.py"],
        "model": "mine.Model",
        "parameters": 1000,
        "settings": None,
        "precision": "32-true",
        "strategy": "SingleDeviceStrategy",
        "machine": "a CPU (cpu)",
        "cores": 4,
        "threads": 1,
        "world_size": 1,
        "versions": {"torch": "2.13.0"},
        "log_every_n_steps": 50,
        "loaders": [{"batch_size": 32, "num_workers": 0}],
    }
    return RunStarted(**plain | values)


def record(
    parts_ms: dict[str, float] | None = None,
    *,
    anatomy: Anatomy | None = None,
    memory: MemoryPeaked | None = None,
    held_mib: list[float] | None = None,
    captured: int = 0,
    compiling_ms: float = 0.0,
    loading_cpu_ms: float = 0.0,
    samples_ms: float = 0.0,
    capturing: int = 0,
    capturing_ms: float = 0.0,
    **of_header: Any,
) -> Record:
    """Of a run whose steps all take what their parts do; ``loading_cpu_ms`` and ``samples_ms`` are of one step."""
    each = {DATA: 1.0, FORWARD: 40.0, BACKWARD: 59.0} if parts_ms is None else parts_ms
    looked_at = STEPS // 16
    some = StepMeasured(
        first=1,
        last=STEPS,
        timed=STEPS,
        cycle_ms=[sum(each.values())] * PIECES,
        wait_ms=[each.get(DATA, 0.0)] * PIECES,
        samples=32 * STEPS,
        losses=[],
        looked_at=looked_at,
        parts_ms={part: looked_at * ms for part, ms in each.items()},
        held_mib=[] if held_mib is None else held_mib,
        captured=captured,
        compiling_ms=compiling_ms,
        loading_cpu_ms=looked_at * loading_cpu_ms,
        samples_ms=looked_at * samples_ms,
        capturing=capturing,
        capturing_ms=capturing_ms,
    )
    seen = {"anatomy": anatomy, "memory": memory}
    return Record(path=Path("run.jsonl"), header=header(**of_header), steps=[some], status="finished", **seen)


def anatomy(**values: Any) -> Anatomy:
    """Of a step of 100 ms that computes in float32, all the time, on much."""
    cost = ModuleCost(module="net", kind="Linear", forward_ms=40.0, backward_ms=59.0, flops=10**10, moved_bytes=10**8)
    plain: dict[str, Any] = {"modules": [cost], "operations": 100, "operations_ms": 99.0, "work_ms": 99.0}
    return Anatomy(**plain | values)


def found(run: Record, name: str) -> Finding:
    (one,) = [one for one in diagnose(run, PEAKS) if one.name == name]
    return one


def names(run: Record) -> set[str]:
    return {one.name for one in diagnose(run, PEAKS)}
