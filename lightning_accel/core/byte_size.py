"""Amounts of memory as people write them: ``"12GiB"``, ``"500 MB"``, ``"60%"``."""

from __future__ import annotations

import re

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_LEAST_BARE = 2**10  # a smaller number was not meant in bytes
_WRITTEN = re.compile(r"\s*(-?(?:\d+(?:\.\d*)?|\.\d+))\s*([a-z]*|%)\s*", re.IGNORECASE)


def parse_bytes(name: str, value: object, *, fractions: bool = False) -> int | float:
    """The amount that ``value`` stands for.

    Args:
        name: The setting, for errors.
        value: An int of bytes, or text: a number and a unit (``B``, ``kB`` … ``TB`` in steps of 1000, ``KiB`` …
            ``TiB`` in steps of 1024).
        fractions: Whether a share of the device is allowed too, ``"60%"``. A small number is then asked for its unit.

    Returns:
        An int of bytes, or a float: the fraction.

    Raises:
        ValueError: It is nothing of the kind, or not positive.
        TypeError: It is of another type.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}. {_allowed(fractions)}")
    is_bytes = isinstance(value, int) and not (fractions and value < _LEAST_BARE)
    match = _WRITTEN.fullmatch(f"{value}B" if is_bytes else str(value))
    number, unit = (float(match[1]), match[2].lower()) if match else (0.0, None)
    if unit is None or (unit and unit not in _UNITS and not (unit == "%" and fractions)):
        raise ValueError(f"{name}={value!r} is no amount of memory. {_allowed(fractions)}")
    if number <= 0:
        raise ValueError(f"{name}={value!r} is not positive. {_allowed(fractions)}")
    if not unit:
        share = f" or '{number * (100 if number <= 1 else 1):g}%'" if fractions and number <= 100 else ""
        raise ValueError(f"{name}={value!r}: {number:g} what? '{number:g}GiB'{share}.")
    if unit == "%" and number > 100:
        raise ValueError(f"{name}={value!r} is more than the device has. {_allowed(fractions)}")
    return number / 100 if unit == "%" else round(number * _UNITS[unit])


def _allowed(fractions: bool) -> str:
    share = ", or a share of the device such as '40%'" if fractions else ""
    return f"Allowed: an int of bytes, text such as '12GiB' or '500MB'{share}."


def format_bytes(size: float) -> str:
    """``size`` in KiB, MiB from one of them on, or GiB from ten."""
    if abs(size) < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:,.1f} MiB" if abs(size) < 10 * 2**30 else f"{size / 2**30:.1f} GiB"
