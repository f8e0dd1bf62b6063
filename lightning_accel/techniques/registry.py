"""Which techniques there are: each is declared once, where it is written, and everything else follows from that.

Those of the package are found in its folder, others by the entry point ``lightning_accel.techniques`` of whoever
installs them, or by :func:`register` in a program of one's own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lightning_accel.core.checks import check_choice, check_names
from lightning_accel.techniques.base import Technique

Exactness = Literal["exact", "rounding", "precision", "changes training"]
T = TypeVar("T", bound=type[Technique])

_declared: dict[str, Declaration] = {}
_in_their_order: dict[str, Declaration] | None = None  # until another one is declared
_listeners: list[Callable[[], None]] = []
_is_complete = False


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One technique, and how a plan sets it.

    Its settings are a frozen dataclass whose first field, the *switch*, is what a plan takes in short:
    ``flash_attention="sdpa"`` for ``flash_attention={"backend": "sdpa"}``. Their docstring documents the setting.
    """

    name: str  # of the setting, the section of the report, the key in checkpoints
    technique: type[Technique]
    settings: type[Any]
    default: Any  # the switch where a plan does not say
    off: Any  # the switch that turns the technique off; False and "off" always do
    on: Any  # what True means; None: nothing
    after: tuple[str, ...]  # the techniques that are applied before this one, where a run has them
    before: tuple[str, ...]  # those that are applied after it
    exactness: Exactness  # what it does to the numbers of a run
    shown: tuple[Any, ...]  # values, beside the default, that docs/hosts.md and the tests of all techniques go through
    in_plain_loops_only: bool  # whether Lightning's own part does it in a Lightning run
    write: Callable[[Any], Any]  # turns what a plan holds into the plain values that `read` takes
    elsewhere: tuple[str, ...]  # settings that may have been meant where a wrong value is given, as errors name them

    @functools.cached_property
    def switch(self) -> str:
        """The name of the settings' first field."""
        return fields(self.settings)[0].name

    @functools.cached_property
    def more(self) -> list[str]:
        """The names of the other fields."""
        return [field.name for field in fields(self.settings)[1:]]

    @functools.cached_property
    def switch_type(self) -> Any:
        return get_type_hints(self.settings)[self.switch]

    @functools.cached_property
    def annotation(self) -> Any:
        """The type of the argument of `Plan` and `AccelPlugin`."""
        kinds: Any = self.switch_type
        if self.more:
            kinds = kinds | self.settings | dict[str, Any]
        return kinds | bool if self.on is not None or self.off == "off" else kinds

    @functools.cached_property
    def doc(self) -> str:
        """The description of that argument."""
        text = documented(self.settings)[self.switch]
        if not self.more:
            return text
        keys = ", ".join(f"``{name}``" for name in (self.switch, *self.more))
        return f"{text} Or a :class:`{self.settings.__name__}`, in YAML a mapping of {keys}."

    def read(self, value: Any) -> Any:
        """What a plan holds for ``value``: the switch, or settings where more than the switch was given.

        Raises:
            ValueError: It is not among the allowed values; they, and the nearest, are named.
            TypeError: It has a type that the setting does not take.
        """
        if isinstance(value, self.settings):
            return value
        if isinstance(value, Mapping) and self.more:
            check_names(value, allowed=[self.switch, *self.more], owner=self.name)
            return self.settings(**{key: self._spelled(of) if key == self.switch else of for key, of in value.items()})
        value = self._spelled(value)
        if get_origin(self.switch_type) is Literal:
            more = [f"a mapping of {', '.join((self.switch, *self.more))}"] if self.more else []
            check_choice(self.name, value, get_args(self.switch_type), more=", ".join([*more, *self.elsewhere]))
        return getattr(self.settings(**{self.switch: value}), self.switch)

    def settings_of(self, value: Any) -> Any:
        """The settings, whole, of a value that :meth:`read` gave."""
        return value if isinstance(value, self.settings) else self.settings(**{self.switch: value})

    def is_off(self, value: Any) -> bool:
        return bool(getattr(self.settings_of(value), self.switch) == self.off)

    def is_default(self, value: Any) -> bool:
        return bool(self.settings_of(value) == self.settings(**{self.switch: self.default}))

    def _spelled(self, value: Any) -> Any:
        if value is False or value == "off":
            return self.off
        return self.on if value is True and self.on is not None else value


def register(
    name: str,
    *,
    settings: type[Any],
    default: Any,
    off: Any = "off",
    on: Any = None,
    after: str | tuple[str, ...] = (),
    before: str | tuple[str, ...] = (),
    exactness: Exactness = "rounding",
    shown: tuple[Any, ...] = (),
    in_plain_loops_only: bool = False,
    write: Callable[[Any], Any] | None = None,
    elsewhere: tuple[str, ...] = (),
) -> Callable[[T], T]:
    """Declares a technique; the arguments are those of :class:`Declaration`.

    ```python
    @register("fused_steps", settings=FusedSteps, default="auto", after="precision", before="compile")
    class FusedStepsTechnique(Technique):
        ...
    ```

    Raises:
        ValueError: The name is taken by another class, or is no name.
    """

    def declare(technique: T) -> T:
        if not name.isidentifier() or name in RUN_SETTINGS:
            raise ValueError(
                f"A technique cannot be called {name!r}. Allowed: a Python name other than {', '.join(RUN_SETTINGS)}."
            )
        known = _declared.get(name)
        if known is not None and known.technique.__qualname__ != technique.__qualname__:
            raise ValueError(
                f"There is a technique {name!r} already: {known.technique.__qualname__}. Give it another name."
            )
        technique.name = name
        _declared[name] = Declaration(
            name=name,
            technique=technique,
            settings=settings,
            default=default,
            off=off,
            on=on,
            after=(after,) if isinstance(after, str) else after,
            before=(before,) if isinstance(before, str) else before,
            exactness=exactness,
            shown=shown,
            in_plain_loops_only=in_plain_loops_only,
            write=write or plain,
            elsewhere=elsewhere,
        )
        try:
            _in_order(_declared)
        except ValueError:
            if known is None:
                del _declared[name]
            else:
                _declared[name] = known
            raise
        _changed()
        return technique

    return declare


RUN_SETTINGS = ("tune", "out_of_memory", "report", "log", "strict", "verify")
"""The settings of a plan that belong to no technique."""


def forget(name: str) -> None:
    """Takes a declaration back: for tests, and for notebooks in which a technique is written."""
    _declared.pop(name, None)
    _changed()


def _changed() -> None:
    global _in_their_order
    _in_their_order = None
    for listener in _listeners:
        listener()


def on_change(listener: Callable[[], None]) -> None:
    """Has ``listener`` called whenever a technique is declared from now on."""
    _listeners.append(listener)


def declarations() -> dict[str, Declaration]:
    """Every technique by its name, in the order in which they are applied.

    Raises:
        ValueError: What is declared to come before what goes round in a circle.
    """
    global _is_complete, _in_their_order
    if not _is_complete:
        _is_complete = True
        for module in pkgutil.iter_modules([str(Path(__file__).parent)], "lightning_accel.techniques."):
            importlib.import_module(module.name)
        for entry in entry_points(group="lightning_accel.techniques"):
            _load(entry)
    if _in_their_order is None:
        _in_their_order = _in_order(_declared)
    return dict(_in_their_order)


def _load(entry: Any) -> None:
    try:
        entry.load()
    except Exception as error:
        warnings.warn(
            f"The technique {entry.name!r} of {entry.value} could not be loaded: {type(error).__name__}: {error}."
            " The run goes on without it. Update or uninstall the package that brings it.",
            UserWarning,
            stacklevel=2,
        )


def _in_order(declared: Mapping[str, Declaration]) -> dict[str, Declaration]:
    waits_for = {
        name: {*one.after, *(other.name for other in declared.values() if name in other.before)}
        for name, one in declared.items()
    }
    left = dict(declared)
    ordered: dict[str, Declaration] = {}
    while left:
        # Of those that may come now, the first that was declared: a new technique moves no other one.
        name = next((name for name in left if not waits_for[name] & left.keys()), None)
        if name is None:
            raise ValueError(f"Each of these techniques is declared to come after another of them: {', '.join(left)}.")
        ordered[name] = left.pop(name)
    return ordered


def plain(value: Any) -> Any:
    """Settings as YAML has them: a dataclass as a mapping, with what differs from its defaults."""
    if is_dataclass(value):
        switch, *more = fields(value)
        given = [switch, *(field for field in more if getattr(value, field.name) != field.default)]
        return {field.name: plain(getattr(value, field.name)) for field in given}
    return [plain(one) for one in value] if isinstance(value, tuple) else value


def documented(kind: type[Any]) -> dict[str, str]:
    """What the docstring of ``kind`` says under ``Attributes:``, by attribute."""
    text = inspect.getdoc(kind) or ""
    section = re.search(r"^Attributes:\n((?:(?:    .*)?\n?)*)", text, re.MULTILINE)
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:     .*\n?)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}
