"""Checks of settings, with errors that name the setting, the value, what is allowed and the nearest of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


class SettingError(ValueError):
    """A setting asks for what this model or machine cannot give: a message to the user, not a failure of a step."""


def check_names(given: Mapping[str, Any], *, allowed: Sequence[str], owner: str) -> None:
    """Raises a ``ValueError`` that names the nearest of ``allowed`` when ``given`` has a key beyond them."""
    for name in given:
        if name not in allowed:
            raise ValueError(
                f"{owner} has no setting {name!r}{nearest(str(name), allowed) or '.'} Allowed: {', '.join(allowed)}."
            )


def nearest(name: str, allowed: Sequence[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest of ``allowed``, or nothing when none is close."""
    matches = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def check_choice(name: str, value: Any, allowed: Sequence[str], more: str = "") -> None:
    """Raises a ``ValueError`` unless ``value`` is one of ``allowed``; ``more`` says what else the setting takes."""
    if not isinstance(value, str) or value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed) + (f", {more}" if more else "")
        raise ValueError(f"{name}={value!r}{nearest(str(value), allowed) or '.'} Allowed: {choices}.")


def check_ending(name: str, value: Any, endings: Sequence[str]) -> None:
    """Raises a ``ValueError`` unless ``value`` is ``"off"`` or the path of a file that ends in one of ``endings``."""
    if value != "off" and not (isinstance(value, str) and value.endswith(tuple(endings))):
        raise ValueError(f"{name}={value!r}. Allowed: 'off', and a file that ends in {', '.join(endings)}.")


def check_bool(name: str, value: Any) -> None:
    """Raises a ``TypeError`` unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}. Allowed: True, False.")


def switch(value: Any, *, on: str) -> Any:
    """``value``, or what a bool in its place means: YAML 1.1 reads a bare ``off`` or ``on`` as one."""
    return {True: on, False: "off"}[value] if isinstance(value, bool) else value


def names_given(setting: str, value: Any) -> tuple[str, ...]:
    """``value`` as a tuple of names; a ``TypeError`` unless it is a list of them."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise TypeError(
            f"{setting}={value!r}: give a list of class names or module paths,"
            " such as ['TransformerBlock', 'encoder.layers.0']."
        )
    return tuple(value)
