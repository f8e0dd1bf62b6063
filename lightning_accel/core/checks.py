"""Checks of settings. Errors name the setting, its value, what is allowed and the nearest allowed value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


class SettingError(ValueError):
    """A setting asks for something that this model or machine lacks: an error of the user, not of a step."""


def check_names(given: Mapping[str, Any], *, allowed: Sequence[str], owner: str) -> None:
    """Raises a ``ValueError`` that names the nearest of ``allowed`` if ``given`` has any other key."""
    for name in given:
        if name not in allowed:
            raise ValueError(
                f"{owner} has no setting {name!r}{nearest(str(name), allowed) or '.'} Allowed: {', '.join(allowed)}."
            )


def nearest(name: str, allowed: Sequence[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the closest of ``allowed``, or ``""`` if none is close."""
    matches = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def check_choice(name: str, value: Any, allowed: Sequence[str], more: str = "") -> None:
    """Raises a ``ValueError`` unless ``value`` is one of ``allowed``; ``more`` says what else the setting takes."""
    if not isinstance(value, str) or value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed) + (f", {more}" if more else "")
        raise ValueError(f"{name}={value!r}{nearest(str(value), allowed) or '.'} Allowed: {choices}.")
