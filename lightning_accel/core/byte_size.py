"""Amounts of memory as people write them: ``"12GiB"``, ``"500 MB"``, ``"60%"``."""

from __future__ import annotations

import re

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_WRITTEN = re.compile(r"\s*(-?(?:\d+(?:\.\d*)?|\.\d+))\s*([a-z]*|%)\s*", re.IGNORECASE)


def parse_bytes(name: str, value: object, *, fractions: bool = False) -> int | float:
    """The amount that ``value`` stands for.

    Args:
        name: The setting, for errors.
        value: An int of bytes, or text: a number and a unit (``B``, ``kB`` … ``TB`` in steps of 1000, ``KiB`` …
            ``TiB`` in steps of 1024).
        fractions: Whether a fraction of the device is allowed too: a float above 0 and up to 1, or text like ``"60%"``.

    Returns:
        An int of bytes, or a float: the fraction.

    Raises:
        ValueError: It is nothing of the kind, or not positive.
        TypeError: It is of another type.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}. {_allowed(fractions)}")
    amount = _parse(value) if isinstance(value, str) else value
    if amount is None or amount != amount:
        raise ValueError(f"{name}={value!r} is no amount of memory. {_allowed(fractions)}")
    if amount <= 0:
        raise ValueError(f"{name}={value!r} is not positive. {_allowed(fractions)}")
    if isinstance(amount, float) and not (fractions and amount <= 1):
        if fractions and isinstance(value, str) and "%" in value:
            raise ValueError(f"{name}={value!r} is more than the device has. {_allowed(fractions)}")
        hint = f" Did you mean '{amount:g}GiB'?" if 1 < amount < 1e6 else ""
        raise ValueError(f"{name}={value!r} has no unit.{hint} {_allowed(fractions)}")
    return amount


def _parse(text: str) -> int | float | None:
    """Bytes as an int, a fraction as a float, None for nonsense."""
    match = _WRITTEN.fullmatch(text)
    if match is None:
        return None
    number, unit = float(match[1]), match[2].lower()
    if unit in ("", "%"):
        return number / 100 if unit else number
    return round(number * _UNITS[unit]) if unit in _UNITS else None


def _allowed(fractions: bool) -> str:
    fraction = ", or a fraction of the device such as 0.6" if fractions else ""
    return f"Allowed: an int of bytes, text such as '12GiB' or '500MB'{fraction}."


def format_bytes(size: float) -> str:
    """``size`` in KiB, MiB from one of them on, or GiB from ten."""
    if abs(size) < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:,.1f} MiB" if abs(size) < 10 * 2**30 else f"{size / 2**30:.1f} GiB"
