"""Amounts of memory as people write them: ``"12GiB"``, ``"500 MB"``, ``"60%"``."""

from __future__ import annotations

import re

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_LEAST_BARE = 2**10  # a smaller number without a unit does not mean bytes
_WRITTEN = re.compile(r"\s*(-?(?:\d+(?:\.\d*)?|\.\d+))\s*([a-z]*|%)\s*", re.IGNORECASE)


def parse_bytes(name: str, value: object, *, fractions: bool = False) -> int | float:
    """Returns the bytes, or the fraction of the device, that ``value`` stands for.

    Args:
        name: The setting, for errors.
        value: An int of bytes, or text: a number and a unit (``B``, ``kB`` … ``TB`` in steps of 1000, ``KiB`` … ``TiB``
            in steps of 1024).
        fractions: Whether a share of the device, ``"60%"``, is allowed too. A small number then needs a unit.

    Returns:
        The bytes as an int, or the fraction as a float.

    Raises:
        ValueError: ``value`` is not an amount of memory, or not positive.
        TypeError: ``value`` has another type.
    """
    or_share = ", or a share of the device such as '40%'" if fractions else ""
    allowed = f"Allowed: an int of bytes, text such as '12GiB' or '500MB'{or_share}."
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}. {allowed}")
    is_bytes = isinstance(value, int) and not (fractions and value < _LEAST_BARE)
    match = _WRITTEN.fullmatch(f"{value}B" if is_bytes else str(value))
    number, unit = (float(match[1]), match[2].lower()) if match else (0.0, None)
    if unit is None or (unit and unit not in _UNITS and not (unit == "%" and fractions)):
        raise ValueError(f"{name}={value!r} is no amount of memory. {allowed}")
    if number <= 0:
        raise ValueError(f"{name}={value!r} is not positive. {allowed}")
    if not unit:
        share = f" or '{number * (100 if number <= 1 else 1):g}%'" if fractions and number <= 100 else ""
        raise ValueError(f"{name}={value!r}: {number:g} what? '{number:g}GiB'{share}.")
    if unit == "%" and number > 100:
        raise ValueError(f"{name}={value!r} is more than the device has. {allowed}")
    return number / 100 if unit == "%" else round(number * _UNITS[unit])


def format_bytes(size: float) -> str:
    """Formats ``size`` in KiB below 1 MiB, in MiB below 10 GiB, and otherwise in GiB."""
    if abs(size) < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:,.1f} MiB" if abs(size) < 10 * 2**30 else f"{size / 2**30:.1f} GiB"
