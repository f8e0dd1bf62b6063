"""Figures of where time and memory go, for loggers that show pictures. matplotlib draws them, where it is installed.

They stand on white whatever is around them, and so read alike in light and dark. The colours are those of Okabe and
Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers tell apart; every one is named with its value, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEND = "Figures need matplotlib: pip install 'lightning-accel[report]'."

# In an order in which neighbours differ in lightness, too.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#F0E442", "#D55E00", "#56B4E9", "#CC79A7", "#5A5A5A")
_ARE_DARK = ("#0072B2", "#009E73", "#D55E00", "#5A5A5A")  # on which white reads better than black
_BLACK = "#0A0A0A"  # on a colour, whatever becomes of the letters beside it
_LEAST_LABELLED = 0.06  # of the bar's length: in less, no number has room


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def share_bar(values: Mapping[str, float], unit: str, title: str) -> Figure:
    """One bar of parts that add up to a whole, in their order, each named with its value and its share.

    Args:
        values: Part → its size, in ``unit``, none of them negative; at least one above zero.
        unit: ``"ms"``, say.
        title: What the whole is.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: There is nothing to be shown.
    """
    from matplotlib.figure import Figure  # late: not everybody has it; without pyplot, which keeps what it draws

    total = sum(values.values())
    if not total > 0 or min(values.values()) < 0:
        raise ValueError(f"values has no parts of a whole: {dict(values)}. Give sizes above zero.")
    figure = Figure(figsize=(6.0, 1.7 + 0.22 * len(values)), dpi=120, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    left = 0.0
    for index, (name, value) in enumerate(values.items()):
        color = _COLORS[index % len(_COLORS)]
        hatch = "//" if index >= len(_COLORS) else None
        label = f"{name}: {value:,.3g} {unit} ({value / total:.0%})"
        axes.barh(0, value, left=left, color=color, hatch=hatch, edgecolor="white", linewidth=1.5, label=label)
        if value >= _LEAST_LABELLED * total:
            ink = "white" if color in _ARE_DARK else _BLACK
            axes.text(left + value / 2, 0, f"{value / total:.0%}", ha="center", va="center", color=ink, fontsize=10)
        left += value
    axes.set_title(f"{title}: {total:,.4g} {unit}", loc="left", fontsize=11)
    axes.set_xlim(0, total)
    axes.set_xlabel(unit)
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)
    figure.legend(loc="outside lower left", frameon=False, fontsize=10)
    return figure


def pixels(figure: Figure) -> Any:
    """What a figure looks like, as an array ``(H, W, 3)`` of bytes."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
