"""A report's charts, as SVG within the page, drawn by matplotlib where it is installed.

Lines and letters have the colour of the text around them, so that they read in light and in dark; colours are those of
Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers tell apart.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from typing import TYPE_CHECKING, Any

from lightning_accel.evidence.figures import can_draw, share_bar
from lightning_accel.evidence.module_tree import Node
from lightning_accel.evidence.peaks import Peaks
from lightning_accel.evidence.report_model import Page
from lightning_accel.evidence.served import Served

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK = "#010203"  # stands for the colour of the text
_LINE = "#0072B2"
_MARK = "#D55E00"  # where live trials had settled
_NAMED = 6  # modules under the roof that are named
_LONGEST = 24  # letters of a name
_WIDTH = 5.4  # inches: letters can be read on a screen of 390 pixels, too
_DOT = 260  # the area of the largest form, in points


def of(page: Page) -> dict[str, str]:
    """Every chart by its name; empty are those that there is nothing to show in, and all where nothing can draw."""
    found = dict.fromkeys(("parts", "memory", "curves", "roofline", "served"), "")
    if not can_draw():
        return found
    if page.parts_ms:
        found["parts"] = _svg(share_bar(page.parts_ms, "ms", "A step"), "Where a step's time goes")
    if page.memory.parts:
        drawn = share_bar(page.memory.parts, "bytes", "All tensors at the peak of a step")
        found["memory"] = _svg(drawn, "What the memory at the peak consists of")
    if any(len(points) > 1 for points in page.curves.values()):
        found["curves"] = _svg(_curves(page), f"Over the run: {'; '.join(page.curves)}")
    if page.peaks is not None and page.modules is not None and (points := _points(page.modules)):
        found["roofline"] = _svg(_roofline(points, page.peaks), "Achieved FLOP/s of modules by FLOPs a byte")
    if page.served is not None:
        found["served"] = _svg(_served(page.served), "Latency of served forms against what they lose")
    return found


def _curves(page: Page) -> Figure:
    from matplotlib.figure import Figure

    shown = {name: points for name, points in page.curves.items() if len(points) > 1}
    figure = Figure(figsize=(_WIDTH, 1.4 * len(shown)), layout="constrained")
    all_axes: Any = figure.subplots(len(shown), 1, squeeze=False)
    for axes, (name, points) in zip(all_axes[:, 0], shown.items(), strict=True):
        axes.plot(*zip(*points, strict=True), color=_LINE, linewidth=1.4)
        if page.settled_step is not None:
            axes.axvline(page.settled_step, color=_MARK, linewidth=1.2, linestyle="--")
        axes.set_title(name, loc="left", fontsize=10)
        axes.grid(visible=True, alpha=0.25)
        axes.tick_params(labelsize=9)
        axes.spines[["right", "top"]].set_visible(False)
    return figure


def _points(model: Node) -> list[tuple[str, float, float]]:
    """Modules without parts that have FLOPs: their FLOPs a byte, and FLOPs a second; the most time first."""
    leaves = sorted(model.leaves(), key=lambda pair: -pair[1].ms)
    found = [(path, one.flops_per_byte, one.gflops_per_sec) for path, one in leaves]
    return [(path, at, 1e9 * speed) for path, at, speed in found if at is not None and speed is not None]


def _roofline(points: list[tuple[str, float, float]], peaks: Peaks) -> Figure:
    figure, axes = _with_axes()
    reached = [x for _, x, _ in points]
    knees = {"float32": peaks.float32_flops, "bfloat16": peaks.bfloat16_flops}
    edge = max(knees.values()) / peaks.bytes_per_sec
    left, right = min(*reached, edge) / 3, max(*reached, edge) * 3
    for (name, peak), style in zip(knees.items(), ("-", "--"), strict=True):
        knee = peak / peaks.bytes_per_sec
        axes.plot([left, knee, right], [left * peaks.bytes_per_sec, peak, peak], style, color=_INK, label=name)
    axes.scatter(reached, [y for _, _, y in points], color=_LINE, s=24, zorder=3)
    for path, x, y in points[:_NAMED]:
        name = path if len(path) <= _LONGEST else f"…{path[1 - _LONGEST :]}"
        note = axes.annotate(name, (x, y), fontsize=9, xytext=(4, 3), textcoords="offset points", parse_math=False)
        note.set_in_layout(False)  # else a name at the edge would take the room of the chart
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte that is read or written", ylabel="FLOP/s")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _served(served: Served) -> Figure:
    figure, axes = _with_axes()
    shown = [form for form in served.forms if math.isfinite(served.lost(form))]
    best = [form for form in served.frontier() if form in shown]
    axes.plot([form.p50_ms for form in best], [served.lost(form) for form in best], color=_LINE, linewidth=1.2)
    largest = max((form.disk_bytes for form in shown), default=0) or 1
    for form in shown:
        x, y = form.p50_ms, served.lost(form)
        area = _DOT * max(form.disk_bytes / largest, 0.05)
        axes.scatter(x, y, s=area, color=_MARK if form.is_worse else _LINE, alpha=0.55, zorder=3)
        is_chosen = form.name == served.recommended
        note = axes.annotate(form.name, (x, y), fontsize=9, xytext=(6, 5), textcoords="offset points", parse_math=False)
        note.set_fontweight("bold" if is_chosen else "normal")
        note.set_in_layout(False)
    lost = f"{served.metric} lost" if served.metric else "error, as a share of the norm"
    axes.set(xlabel="p50 of a call at batch 1, ms", ylabel=lost)
    axes.margins(x=0.25, y=0.15)  # names stand to the right of their dots
    return figure


def _with_axes() -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(visible=True, alpha=0.25)
    return figure, axes


def _svg(figure: Figure, label: str) -> str:
    import matplotlib

    target = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # from its own fonts: letters are the browser's
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    text = target.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor").replace("#000000", "currentColor")
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # which other charts of the page have, too; nothing refers to them
    described = f'<svg role="img" aria-label="{label}" style="fill: currentColor"'
    return text.replace("<svg", described, 1)
