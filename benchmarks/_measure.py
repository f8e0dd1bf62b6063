"""What the benchmarks share: interleaved medians, the allocator's peak of a step, a table and a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_accel.host import Host


def interleaved_ms(sides: Mapping[str, Callable[[], Any]], *, rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Milliseconds of every side in every round; the sides take turns, so that the machine's mood hits all alike."""
    names = list(sides)
    spent: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(warm_up + rounds):
        for name in names if round_ % 2 == 0 else reversed(names):
            start = time.perf_counter()
            sides[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_ >= warm_up:
                spent[name].append(1e3 * (time.perf_counter() - start))
    return spent


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of the ratios of paired rounds."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def peak_step_bytes(step: Callable[[], Any]) -> int:
    """The most bytes that ``step`` had allocated at one time beyond what it started with.

    Summed over the profiler's allocation events on the CPU, the allocator's own peak on a GPU.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "device": Host.detect().device_name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def publish(
    name: str, command: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], details: Any = None
) -> None:
    """Prints a table and, with ``--json FOLDER``, writes ``FOLDER/name.json``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", type=Path)
    folder = parser.parse_known_args()[0].json
    about = machine()
    print(f"\n{name} on {about['device']}, {about['cores']} cores, torch {about['torch']}  ({command})")
    texts = [[str(cell) for cell in row] for row in [columns, *rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        record = {"machine": about, "command": command, "columns": columns, "rows": rows, "details": details}
        (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
