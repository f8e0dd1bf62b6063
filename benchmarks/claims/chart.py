"""The bar chart of claims, as SVG text: the same from the same record, with whatever is installed."""

from __future__ import annotations

import math
from html import escape

from lightning_accel.claims.claim import Figure
from lightning_accel.claims.machine import title
from lightning_accel.claims.page import number_text
from lightning_accel.claims.record import Record

GREY, GREEN, RED = "#c9ccd1", "#2e7d4f", "#c0392b"
_LEFT, _WIDTH, _RIGHT, _TOP, _LINE = 330, 300, 130, 64, 26
_DECADES = 1.0  # shown below and above what was claimed
_LEAST = 1e-9


def svg(record: Record) -> str:
    """Every judged figure: what was claimed in grey, what was measured in green where it meets that, red elsewhere."""
    bars = [(row.row, figure) for row in record.rows for figure in row.figures if figure.target is not None]
    height = _TOP + _LINE * len(bars) + 44
    width = _LEFT + _WIDTH + _RIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="10" fill="#444">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(12, 26, f"Claimed and measured on {title(record.machine)}", 'font-size="14" fill="#111"'),
        _text(12, 44, "as multiples of the claimed number, better to the right; logarithmic"),
    ]
    bottom = _TOP + _LINE * len(bars)
    for multiple in (0.1, 0.2, 0.5, 1, 2, 5, 10):
        x = _x(multiple)
        out.append(f'<path d="M{x} {_TOP}V{bottom}" stroke="{"#666" if multiple == 1 else "#e4e4e4"}"/>')
        out.append(_text(x, bottom + 18, f"{multiple:g}x", 'text-anchor="middle"'))
    for index, (row, figure) in enumerate(bars):
        out += _bar(row, figure, _TOP + _LINE * index)
    return "\n".join([*out, "</svg>"]) + "\n"


def _bar(row: int, figure: Figure, top: float) -> list[str]:
    assert figure.target is not None
    color = GREEN if figure.is_met else RED
    value, low, high = (multiple(number, figure) for number in (figure.value, figure.low, figure.high))
    middle = top + 17
    claimed = number_text(figure.target.number, figure.unit)
    return [
        _text(_LEFT - 8, top + 17, f"{row}  {_shortened(figure.condition)}", 'text-anchor="end" fill="#111"'),
        _rectangle(top + 5, 6, 1.0, GREY),
        _rectangle(top + 13, 8, value, color),
        f'<path d="M{_x(low)} {middle}H{_x(high)}" stroke="#111"/>',
        _text(_LEFT + _WIDTH + 8, top + 11, f"claimed {claimed}", 'fill="#777"'),
        _text(_LEFT + _WIDTH + 8, top + 22, number_text(figure.value, figure.unit), f'fill="{color}"'),
    ]


def multiple(number: float, figure: Figure) -> float:
    """How many times what was claimed ``number`` is; the other way round where less, or nearer, is better."""
    assert figure.target is not None
    number, claimed = max(number, _LEAST), max(figure.target.number, _LEAST)
    if figure.target.kind == "about":
        return min(claimed / number, number / claimed)
    return claimed / number if figure.target.kind == "at most" else number / claimed


def _x(multiple: float) -> float:
    """Where a multiple of the claimed number is drawn; what lies outside of the chart, at its end."""
    decades = min(max(math.log10(max(multiple, _LEAST)), -_DECADES), _DECADES)
    return round(_LEFT + _WIDTH * (decades + _DECADES) / (2 * _DECADES), 1)


def _rectangle(top: float, height: float, multiple: float, color: str) -> str:
    return f'<rect x="{_LEFT}" y="{top}" width="{_x(multiple) - _LEFT:.1f}" height="{height}" fill="{color}"/>'


def _text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{escape(words)}</text>'


def _shortened(words: str, most: int = 58) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"
