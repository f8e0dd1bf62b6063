"""Numbers, amounts of memory and shares as people write them: no exponents, nothing of a MiB that is a few bytes."""

from __future__ import annotations

from lightning_accel.core.byte_size import format_bytes


def figure(value: float | None, digits: int = 4) -> str:
    """A number as people write it: ``1,360``, ``18.42``, ``2.3×10⁻⁷``; no number is the empty text."""
    if value is None:
        return ""
    if value == int(value) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if abs(value) >= 1e-3:
        return f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}×10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def size(value: float) -> str:
    """An amount of memory, to the byte below one KiB."""
    return f"{value:,.0f} B" if abs(value) < 1024 else format_bytes(round(value))


def share(value: float) -> str:
    return "<0.1%" if 0 < value < 5e-4 else f"{value:.1%}"


def rate(value: float) -> str:
    """A rate as people write it: ``1,085``, ``246.6``, ``0.31``."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def duration(ms: float) -> str:
    """A time as people write it: ``7.2 min``, ``10.9 s``, ``246 ms``, ``0.31 ms``."""
    if ms >= 3e5:
        return f"{ms / 6e4:,.1f} min"
    return f"{ms / 1e3:,.1f} s" if ms >= 9999.5 else f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
