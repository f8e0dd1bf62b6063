"""A report's charts, as SVG within the page, drawn by matplotlib where it is installed.

Lines and letters have the colour of the text around them, so that they read in light and in dark; colours are those of
Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers tell apart.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from lightning_accel.evidence.figures import can_draw, share_bar
from lightning_accel.evidence.page import Node, Page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK = "#010203"  # stands for the colour of the text
_LINE = "#0072B2"
_NAMED = 8  # modules under the roof that are named


def of(page: Page) -> dict[str, str]:
    """The charts that there is something to show in, by name; empty where nothing can draw them."""
    names = ("parts", "memory", "curves", "roofline")
    if not can_draw():
        return dict.fromkeys(names, "")
    found = dict.fromkeys(names, "")
    if page.parts_ms:
        found["parts"] = _svg(share_bar(page.parts_ms, "ms", "A step"), "What a step's time goes to")
    if page.memory:
        sizes = {name: size / 2**20 for name, size in page.memory.items()}
        found["memory"] = _svg(share_bar(sizes, "MiB", "At the peak"), "What the memory at the peak consists of")
    if any(len(points) > 1 for points in page.curves.values()):
        found["curves"] = _svg(_curves(page), "Step time, waiting, memory and loss over the run")
    if page.peaks is not None and page.modules is not None:
        found["roofline"] = _svg(_roofline(page), "Achieved FLOP/s of modules by FLOPs a byte")
    return found


def _curves(page: Page) -> Figure:
    from matplotlib.figure import Figure

    shown = {name: points for name, points in page.curves.items() if len(points) > 1}
    figure = Figure(figsize=(8.0, 1.5 * len(shown)), layout="constrained")
    all_axes: Any = figure.subplots(len(shown), 1, squeeze=False)
    for axes, (name, points) in zip(all_axes[:, 0], shown.items(), strict=True):
        axes.plot(*zip(*points, strict=True), color=_LINE, linewidth=1.4)
        axes.set_title(name, loc="left", fontsize=9)
        axes.grid(visible=True, alpha=0.25)
        axes.tick_params(labelsize=8)
        axes.spines[["right", "top"]].set_visible(False)
    return figure


def _roofline(page: Page) -> Figure:
    from matplotlib.figure import Figure

    assert page.peaks is not None
    assert page.modules is not None
    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    modules = sorted(_leaves(page.modules), key=lambda one: -one[1].ms)
    points = [(path, node.flops / node.moved_bytes, node.flops / node.ms * 1e3) for path, node in modules]
    reached = [x for _, x, _ in points] or [1.0]
    flat = max(page.peaks.float32_flops, page.peaks.bfloat16_flops)
    edge = flat / page.peaks.bytes_per_sec
    left, right = min(*reached, edge) / 3, max(*reached, edge) * 3
    for name, peak, style in (
        ("float32", page.peaks.float32_flops, "-"),
        ("bfloat16", page.peaks.bfloat16_flops, "--"),
    ):
        knee = peak / page.peaks.bytes_per_sec
        axes.plot([left, knee, right], [left * page.peaks.bytes_per_sec, peak, peak], style, color=_INK, label=name)
    axes.scatter(reached, [y for _, _, y in points], color=_LINE, s=24, zorder=3)
    for path, x, y in points[:_NAMED]:
        axes.annotate(path, (x, y), fontsize=7, xytext=(4, 3), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte that is read or written", ylabel="FLOP/s")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(visible=True, alpha=0.25)
    return figure


def _leaves(node: Node, path: str = "") -> list[tuple[str, Node]]:
    """Modules without parts that have FLOPs."""
    if not node.parts:
        return [(path or node.name, node)] if node.flops and node.ms > 0 and node.moved_bytes else []
    return [leaf for part in node.parts for leaf in _leaves(part, f"{path}.{part.name}".lstrip("."))]


def _svg(figure: Figure, label: str) -> str:
    import matplotlib

    target = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-accel"}):
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    text = target.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor").replace("#000000", "currentColor")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg[^>]*?)', lambda found: found[0], text, count=1)
    described = f'<svg role="img" aria-label="{label}" style="fill: currentColor"'
    return text.replace("<svg", described, 1)
