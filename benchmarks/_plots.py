"""The plots of docs/results, as SVG text: the same from the same figures, with whatever is installed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "docs" / "results"
RED, BLUE = "#c0392b", "#1f6fb2"


def _details(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["details"]


def _text(at_x: float | str, at_y: float | str, words: str, more: str = "") -> str:
    return f'<text x="{at_x}" y="{at_y}"{more}>{words}</text>'


def _begun(left: float, title: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" font-family="sans-serif" font-size="12"'
        ' fill="#444">',
        f'<rect width="680" height="{height}" fill="#fff"/>',
        _text(left, 28, title, ' font-size="14" fill="#111"'),
    ]


def attention_memory_svg() -> str:
    """What attention keeps against the length: the plot of `attention_memory.json`."""
    details = _details("attention_memory")
    lengths, kept = details["lengths"], details["saved_bytes"]["causal mask"]
    points = {
        name: [(n, size / 2**20) for n, size in zip(lengths, kept[name], strict=True) if size is not None]
        for name in ("plain", "fused")
    }
    sizes = [size for line in points.values() for _, size in line]
    decades = range(math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes))) + 1)
    left, top, width, height = 76, 52, 464, 292

    def x(n: float) -> str:
        return f"{left + width * math.log2(n / lengths[0]) / math.log2(lengths[-1] / lengths[0]):.1f}"

    def y(size: float) -> str:
        return f"{top + height * (decades[-1] - math.log10(size)) / (decades[-1] - decades[0]):.1f}"

    bottom, right = top + height, left + width
    out = _begun(left, "Kept for the backward pass by hand-written causal attention, MiB", height=400)
    for decade in decades:
        at = y(10.0**decade)
        label = f"{10**decade:,}" if decade >= 0 else f"{10.0**decade:g}"
        out.append(f'<path d="M{left} {at}H{right}" stroke="#ddd"/>')
        out.append(_text(left - 8, at, label, ' text-anchor="end" dominant-baseline="middle"'))
    for n in lengths:
        out.append(f'<path d="M{x(n)} {bottom}v5" stroke="#888"/>')
        out.append(_text(x(n), bottom + 20, f"{n:,}", ' text-anchor="middle"'))
    out.append(f'<path d="M{left} {bottom}H{right}" stroke="#888"/>')
    out.append(_text(left + width / 2, bottom + 42, "tokens", ' text-anchor="middle"'))
    for (name, line), color in zip(points.items(), ("#c0392b", "#1f6fb2"), strict=True):
        path = " ".join(f"{x(n)},{y(size)}" for n, size in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        out += [f'<circle cx="{x(n)}" cy="{y(size)}" r="3.5" fill="{color}"/>' for n, size in line]
        end_x, end_y = float(x(line[-1][0])), y(line[-1][1])
        label = f' fill="{color}" font-weight="bold" dominant-baseline="middle"'
        last = line[-1][1]
        out.append(_text(f"{end_x + 10:.1f}", end_y, f"{name}, {last:,.{0 if last >= 10 else 1}f} MiB", label))
    return "\n".join([*out, "</svg>"]) + "\n"


def memory_modes_svg() -> str:
    """Time against peak, to the plain step: the plot of `memory_modes.json`, a panel a model."""
    details = _details("memory_modes")
    width, height, top = 560, 250, 60
    left, gap = 70, 90
    out = _begun(left, "Ways to save memory: step time against peak of the activations, both to plain", height=740)
    for panel, (model, modes) in enumerate(details.items()):
        upper = top + panel * (height + gap)
        slowest = max(1.5, math.ceil(10 * max(m["time"] for m in modes.values())) / 10)

        def x(peak: float) -> str:
            return f"{left + width * peak / 1.1:.1f}"

        def y(time: float, upper: float = upper, slowest: float = slowest) -> str:
            return f"{upper + height * (slowest - time) / (slowest - 0.9):.1f}"

        out.append(_text(left, upper - 8, model, ' font-weight="bold"'))
        for tick in range(0, 11, 2):
            at = x(tick / 10)
            out.append(f'<path d="M{at} {upper}V{upper + height}" stroke="#eee"/>')
            out.append(_text(at, upper + height + 18, f"{tick / 10:.1f}x", ' text-anchor="middle"'))
        for tick in range(10, round(10 * slowest) + 1, max(1, round(10 * (slowest - 1) / 5))):
            at = y(tick / 10)
            out.append(f'<path d="M{left} {at}H{left + width}" stroke="#ddd"/>')
            out.append(_text(left - 8, at, f"{tick / 10:.1f}x", ' text-anchor="end" dominant-baseline="middle"'))
        out.append(_text(left + width / 2, upper + height + 36, "peak", ' text-anchor="middle"'))
        frontier = _pareto({name: (m["peak"], m["time"]) for name, m in modes.items()})
        line = " ".join(f"{x(modes[name]['peak'])},{y(modes[name]['time'])}" for name in frontier)
        out.append(f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-dasharray="4 3"/>')
        for name, m in modes.items():
            color = BLUE if name in frontier else RED
            out.append(f'<circle cx="{x(m["peak"])}" cy="{y(m["time"])}" r="4" fill="{color}"/>')
            out.append(_text(x(m["peak"]), f"{float(y(m['time'])) - 8:.1f}", name, f' fill="{color}"'))
    return "\n".join([*out, "</svg>"]) + "\n"


def device_pipeline_svg() -> str:
    """What ran when on which thread, without and with the pipeline: the plot of `device_pipeline.json`."""
    spans = _details("device_pipeline")["spans"]
    left, width, row = 150, 500, 30
    last_ms = max(span["end_ms"] for how in spans.values() for span in how)
    out = _begun(20, "Six steps without and with the device pipeline: a trace of two threads, ms", height=300)

    def x(ms: float) -> float:
        return left + width * min(max(ms, 0.0), last_ms) / last_ms

    top = 60
    for how, lanes in (("inline", ["training"]), ("pipeline", ["training", "pipeline"])):
        out.append(_text(20, top - 8, {"inline": "at the transfer", "pipeline": "prepared ahead"}[how], ' fill="#111"'))
        for lane, thread in enumerate(lanes):
            upper = top + lane * (row + 6)
            out.append(_text(20, upper + 19, f"{thread} thread"))
            for span in spans[how]:
                begin, end = x(span["begin_ms"]), x(span["end_ms"])
                if span["thread"] == thread and end > begin:
                    color = BLUE if span["what"] == "step" else RED
                    shape = f'x="{begin:.1f}" y="{upper}" width="{end - begin:.1f}" height="{row}"'
                    out.append(f'<rect {shape} fill="{color}" stroke="#fff"/>')
        top += len(lanes) * (row + 6) + 34
    for tick in range(0, int(last_ms) + 1, max(10, 10 * round(last_ms / 60))):
        out.append(f'<path d="M{x(tick):.1f} 50V{top - 26}" stroke="#888" stroke-opacity="0.3"/>')
        out.append(_text(f"{x(tick):.1f}", top - 10, str(tick), ' text-anchor="middle"'))
    for at, (color, words) in enumerate([(BLUE, "training step"), (RED, "preprocessing of a batch")]):
        out.append(f'<rect x="{left + 190 * at}" y="{top + 8}" width="14" height="14" fill="{color}"/>')
        out.append(_text(left + 190 * at + 20, top + 20, words))
    return "\n".join([*out, "</svg>"]) + "\n"


def _pareto(points: dict[str, tuple[float, float]]) -> list[str]:
    """Those that nothing else beats in both, from the smallest peak on."""
    found: list[str] = []
    for name in sorted(points, key=lambda name: points[name]):
        if not found or points[name][1] < points[found[-1]][1]:
            found.append(name)
    return found
