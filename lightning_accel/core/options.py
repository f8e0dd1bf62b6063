"""Options that check themselves: the annotation of a field says which values are allowed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from typing_extensions import Self

from lightning_accel.core.checks import check_names, nearest

_MISFIT = object()


@dataclass(frozen=True)
class Rule:
    """A condition on a type: ``Annotated[int, Rule("a number from 1 on", lambda name, value: value >= 1)]``.

    Attributes:
        words: What is allowed, as errors say it.
        holds: Called with the setting's name and a value. Returns false if the value is not allowed, or raises a
            ``ValueError`` that says why.
    """

    words: str
    holds: Callable[[str, Any], object]


@dataclass(frozen=True, kw_only=True, repr=False)
class Options:
    """The base class of options: a frozen dataclass that checks each value by its annotation at creation.

    An annotation is made of ``Literal``, ``bool``, ``int``, ``str``, ``tuple[str, ...]``, other options, ``None``, and
    ``Annotated`` with a :class:`Rule`. ``False`` is read as ``"off"`` and ``True`` as ``"on"``, or as the first choice
    that is not ``"off"``, because YAML 1.1 reads a bare ``off`` or ``on`` as a bool. The first field is the *switch*: a
    plan accepts its value in place of the options.

    Raises:
        ValueError: A value is not allowed. The error names the nearest allowed value.
        TypeError: A value has a type that the field does not accept.
    """

    owner: ClassVar[str] = ""  # the setting's name in errors

    def __init_subclass__(cls, owner: str = "") -> None:
        cls.owner = owner or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Options")).lower()

    def __post_init__(self) -> None:
        for name, kind in hints(type(self)).items():
            value = read(f"{self.owner}.{name}", getattr(self, name), kind)
            object.__setattr__(self, name, value.short() if isinstance(value, Options) else value)

    @classmethod
    def switch(cls) -> str:
        """Returns the name of the first field."""
        return fields(cls)[0].name

    @classmethod
    def read(cls, value: Any, name: str = "") -> Self:
        """Returns the options for a value of the setting ``name``: options, a mapping, or a value of the switch."""
        if isinstance(value, cls):
            return value
        name, names = name or cls.owner, [field.name for field in fields(cls)]
        if isinstance(value, Mapping):
            check_names(value, allowed=names, owner=name)
            return cls(**value)
        more = f"{cls.__name__}({'=, '.join(names)}=)" if len(names) > 1 else ""
        return cls(**{names[0]: read(name, value, hints(cls)[names[0]], more)})

    def given(self) -> dict[str, Any]:
        """Returns the values that differ from the defaults."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}

    def short(self) -> Any:
        """Returns the switch's value if all other values are defaults, otherwise these options."""
        return self if self.given().keys() - {self.switch()} else getattr(self, self.switch())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"


def _hints(kind: Any) -> dict[str, Any]:
    """Returns the annotations of a class's fields, including the content of ``Annotated``."""
    found = get_type_hints(kind, include_extras=True)
    return {field.name: found[field.name] for field in fields(kind)}


hints: Callable[[Any], dict[str, Any]] = functools.cache(_hints)


def read(name: str, value: Any, kind: Any, more: str = "") -> Any:
    """Returns ``value`` as the annotation ``kind`` accepts it. ``more`` is added to what errors list as allowed.

    Raises:
        ValueError: The value is not allowed. The error names the allowed values and the nearest.
        TypeError: The value has a type that the annotation does not accept.
    """
    kinds = _alternatives(kind)
    if isinstance(value, bool) and bool not in kinds:
        switched = switch_of(value, choices_of(kind))
        value = value if switched is None else switched
    for one in kinds:
        if (found := _fit(name, value, one)) is not _MISFIT:
            return found
    choices = choices_of(kind)
    words = [repr(choice) for choice in choices] + [said for one in kinds if (said := _said(one))]
    allowed = ", ".join([*words, *filter(None, [more])])
    takes = {type(choice) for choice in choices}
    takes |= {get_args(one)[0] if get_origin(one) is Annotated else one for one in kinds}
    error = ValueError if type(value) in takes else TypeError
    raise error(f"{name}={value!r}{nearest(str(value), [*map(str, choices)]) or '.'} Allowed: {allowed}.")


def choices_of(kind: Any) -> list[Any]:
    """Returns the values that the ``Literal`` of an annotation lists."""
    return [choice for one in _alternatives(kind) if get_origin(one) is Literal for choice in get_args(one)]


def switch_of(value: bool, choices: list[Any]) -> Any:
    """Returns the choice that a bool stands for; None if there is none."""
    if not value:
        return "off" if "off" in choices else None
    return "on" if "on" in choices else next((choice for choice in choices if choice != "off"), None)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) not in (Union, UnionType):
        return (kind,)
    return tuple(each for one in get_args(kind) for each in _alternatives(one))


def _fit(name: str, value: Any, kind: Any) -> Any:
    """Returns the value as one alternative accepts it, or ``_MISFIT``."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin is Literal:
        return value if any(value == one and type(value) is type(one) for one in get_args(kind)) else _MISFIT
    if origin is Annotated:
        inner, rule = get_args(kind)
        fits = any(_fit(name, value, one) is not _MISFIT for one in _alternatives(inner))
        return value if fits and rule.holds(name, value) else _MISFIT
    if origin is tuple:
        is_names = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
        return tuple(value) if is_names else _MISFIT
    if isinstance(kind, type) and issubclass(kind, Options):
        return kind.read(value, name) if isinstance(value, kind | Mapping) else _MISFIT
    return value if type(value) is kind else _MISFIT


def _said(kind: Any) -> str:
    """Returns what an alternative allows, in words; empty if its choices say it."""
    if get_origin(kind) is Annotated:
        return str(get_args(kind)[1].words)
    if get_origin(kind) is tuple:
        return "a list of class names or module paths, such as ['TransformerBlock', 'encoder.layers.0']"
    if isinstance(kind, type) and issubclass(kind, Options):
        return f"{kind.__name__}({'=, '.join(field.name for field in fields(kind))}=)"
    return {bool: "True, False", int: "a number", str: "text", NoneType: "None"}.get(kind, "")
