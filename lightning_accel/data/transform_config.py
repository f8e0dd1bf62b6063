"""Transforms as plain values, for YAML and checkpoints, and back: ``{class_path: …, init_args: {…}}``."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from lightning_accel import data
from lightning_accel.core.checks import check_names, nearest
from lightning_accel.data.chain import checked
from lightning_accel.data.transform import Transform

_FORM = "{class_path: Normalize, init_args: {mean: 0.5, std: 0.25}}"
_PACKAGE = "lightning_accel.data."


def read_transforms(value: Any) -> tuple[Transform, ...]:
    """The transforms that a plan names: objects, or mappings of ``class_path`` and ``init_args`` as in YAML.

    Raises:
        TypeError: It is no list, or one of its entries is neither.
        ValueError: A transform or one of its settings is not known, or wrong.
    """
    if value is None:
        return ()
    return checked([_read(one) for one in value] if isinstance(value, list | tuple) else value)


def written(transform: Transform) -> dict[str, Any]:
    """A transform as :func:`read_transforms` takes it, of plain values alone.

    Raises:
        ValueError: It holds a function that cannot be imported by its name.
    """
    kind = type(transform)
    is_ours = _known().get(kind.__name__) is kind
    class_path = f"{_PACKAGE}{kind.__name__}" if is_ours else _import_path(kind, repr(kind))
    return {"class_path": class_path, "init_args": {name: _plain(value) for name, value in transform.given().items()}}


def _read(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value  # whether it is a transform is checked with the whole chain
    if "class_path" not in value:
        raise ValueError(f"preprocess: {dict(value)!r} names no transform. Write it as {_FORM}.")
    check_names(value, allowed=["class_path", "init_args"], owner="an entry of preprocess")
    kind, settings = _kind(str(value["class_path"])), value.get("init_args") or {}
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"preprocess: init_args of {kind.__name__} are {settings!r}: write a mapping, {{size: 32}} say."
        )
    settings = dict(settings)
    check_names(settings, allowed=[one.name for one in fields(kind)], owner=kind.__name__)
    for setting in ("key", "label_key"):
        if isinstance(settings.get(setting), list):
            settings[setting] = tuple(settings[setting])
    if isinstance(settings.get("fn"), str):
        settings["fn"] = _imported("Map(fn)", settings["fn"])
    try:
        return kind(**settings)
    except TypeError as error:
        raise TypeError(f"preprocess: {kind.__name__}: {error}") from None


def _known() -> dict[str, type[Transform]]:
    """The transforms of this package, by name."""
    kinds = {name: getattr(data, name) for name in data.__all__}
    return {name: kind for name, kind in kinds.items() if issubclass(kind, Transform) and kind is not Transform}


def _kind(class_path: str) -> type[Transform]:
    """The class of that name: one of ours, also without its module, or the user's own."""
    known, name = _known(), class_path.removeprefix(_PACKAGE)
    if name in known:
        return known[name]
    if "." in name:
        own = _imported("class_path", class_path)
        if isinstance(own, type) and issubclass(own, Transform) and own is not Transform:
            return own
    hint = nearest(name, [*known]) or "."
    raise ValueError(f"preprocess: there is no transform {class_path!r}{hint} Allowed: {', '.join(sorted(known))}.")


def _imported(setting: str, path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(
            f"preprocess: {setting}={path!r} cannot be imported ({error}). Write package.module.name."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return _import_path(value, f"Map(fn={value!r})") if callable(value) else value


def _import_path(value: Any, what: str) -> str:
    path = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', '')}"
    found = None
    with suppress(ImportError, ValueError, AttributeError):
        found = pkgutil.resolve_name(path)
    if found is not value:
        raise ValueError(
            f"preprocess: {what} cannot be written down: it has no name to import it by."
            " Use a function or class defined at the top of a module."
        )
    return path
