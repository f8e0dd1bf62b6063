"""Figures of where time and memory go, for loggers that show pictures. matplotlib draws them, where it is installed.

They stand on white whatever is around them, and so read alike in light and dark. The colours are those of Okabe and
Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers tell apart; every one is named with its value, too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from lightning_accel.evidence.amounts import duration, share, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Unit = Literal["ms", "bytes"]

MEND = "Figures need matplotlib: pip install 'lightning-accel[report]'."

# In an order in which neighbours differ in lightness, too.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#F0E442", "#D55E00", "#56B4E9", "#CC79A7", "#5A5A5A")
_ARE_DARK = ("#0072B2", "#009E73", "#D55E00", "#5A5A5A")  # on which white reads better than black
_BLACK = "#0A0A0A"  # on a colour, whatever becomes of the letters beside it
_LEAST_LABELLED = 0.08  # of the bar's length: in less, no number has room
_FORMS: dict[Unit, Callable[[float], str]] = {"ms": duration, "bytes": size}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def share_bar(values: Mapping[str, float], unit: Unit, title: str) -> Figure:
    """One bar of parts that add up to a whole, in their order, each named with its value and its share.

    Args:
        values: Part → its size, in ``unit``, none of them negative; at least one above zero.
        unit: Of the values.
        title: What the whole is.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: There is nothing to be shown.
    """
    from matplotlib.figure import Figure  # late: not everybody has it; without pyplot, which keeps what it draws

    total = sum(values.values())
    if not total > 0 or min(values.values()) < 0:
        raise ValueError(f"values has no parts of a whole: {dict(values)}. Give sizes above zero.")
    form = _FORMS[unit]
    labels = [textwrap.fill(f"{name}: {form(value)} ({share(value / total)})", 56) for name, value in values.items()]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(5.4, 1.4 + 0.22 * lines), dpi=120, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    left = 0.0
    for index, (value, label) in enumerate(zip(values.values(), labels, strict=True)):
        color = _COLORS[index % len(_COLORS)]
        hatch = "//" if index >= len(_COLORS) else None
        axes.barh(0, value, left=left, color=color, hatch=hatch, edgecolor="white", linewidth=1.5, label=label)
        if value >= _LEAST_LABELLED * total:
            ink = "white" if color in _ARE_DARK else _BLACK
            axes.text(left + value / 2, 0, f"{value / total:.0%}", ha="center", va="center", color=ink, fontsize=10)
        left += value
    axes.set_title(f"{title}: {form(total)}", loc="left", fontsize=11)
    axes.set_xlim(0, total)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside lower left", frameon=False, fontsize=10)
    return figure


def pixels(figure: Figure) -> Any:
    """What a figure looks like, as an array ``(H, W, 3)`` of bytes."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
