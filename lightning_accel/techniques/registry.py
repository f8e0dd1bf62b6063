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
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_accel.core.options import Options, hints, read
from lightning_accel.techniques.base import Technique

Exactness = Literal["exact", "rounding", "precision", "changes training"]
T = TypeVar("T", bound=type[Technique])

_declared: dict[str, Declaration] = {}  # in the order in which they are applied
_is_complete = False


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One technique, and how a plan sets it."""

    name: str  # of the setting, the section of the report, the key in checkpoints
    technique: type[Technique]
    options: Any  # the annotation of its value, or a class of options, whose switch is the value in short
    default: Any  # where a plan does not say
    off: Any  # what turns the technique off; False and "off" always do
    doc: str  # what its values mean
    after: tuple[str, ...]  # the techniques that are applied before this one, where a run has them
    before: tuple[str, ...]  # those that are applied after it
    exactness: Exactness  # what it does to the numbers of a run

    @property
    def has_options(self) -> bool:
        """Whether it takes a class of options."""
        return isinstance(self.options, type) and issubclass(self.options, Options)

    @functools.cached_property
    def switch_type(self) -> Any:
        """The annotation of what turns it on and off."""
        return hints(self.options)[self.options.switch()] if self.has_options else self.options

    def read(self, value: Any, name: str = "") -> Any:
        """The value or options that ``value`` stands for; ``name`` is that of the setting, for errors.

        Raises:
            ValueError: It is not among the allowed values; they, and the nearest, are named.
            TypeError: It has a type that the setting does not take.
        """
        value = self.off if value is False or (isinstance(value, str) and value == "off") else value
        return self.options.read(value, name) if self.has_options else read(name or self.name, value, self.options)

    def switch(self, value: Any) -> Any:
        """What turns the technique on and off, of a value that :meth:`read` gave."""
        return getattr(value, value.switch()) if self.has_options else value

    def is_off(self, value: Any) -> bool:
        return bool(self.switch(value) == self.off)


def register(
    name: str,
    *,
    options: Any,
    default: Any = None,
    off: Any = "off",
    doc: str = "",
    after: str | tuple[str, ...] = (),
    before: str | tuple[str, ...] = (),
    exactness: Exactness = "rounding",
) -> Callable[[T], T]:
    """Declares a technique, which plans then set by its name.

    ```python
    @register("fused_steps", options=Literal["off", "on"], default="off", after="precision", before="compile")
    class FusedStepsTechnique(Technique):
        ...
    ```

    Args:
        name: In plans, reports and checkpoints.
        options: The annotation of its value; or a class of :class:`~lightning_accel.techniques.Options`, which has its
            defaults and whose docstring says what they mean.
        default: The value where a plan does not say; not for a class of options.
        off: The value that turns it off.
        doc: What its values mean; not for a class of options.
        after: The techniques that are applied before this one, where a run has them.
        before: Those that are applied after it.
        exactness: What it does to the numbers of a run. What changes training is set by ``lossy``, all else by
            ``techniques``.

    Raises:
        ValueError: The name is taken by another class, or is no name; or what is declared to come before what goes
            round in a circle.
    """

    def declare(technique: T) -> T:
        global _declared
        if not name.isidentifier():
            raise ValueError(f"A technique cannot be called {name!r}. Allowed: a Python name.")
        known = _declared.get(name)
        if known is not None and known.technique.__qualname__ != technique.__qualname__:
            raise ValueError(
                f"There is a technique {name!r} already: {known.technique.__qualname__}. Give it another name."
            )
        technique.name = name
        has_options = isinstance(options, type) and issubclass(options, Options)
        declared = Declaration(
            name=name,
            technique=technique,
            options=options,
            default=options() if has_options else default,
            off=off,
            doc=doc or (documented(options).get(options.switch(), "") if has_options else ""),
            after=(after,) if isinstance(after, str) else after,
            before=(before,) if isinstance(before, str) else before,
            exactness=exactness,
        )
        _declared = _in_order({**_declared, name: declared})
        return technique

    return declare


def forget(name: str) -> None:
    """Takes a declaration back: for tests, and for notebooks in which a technique is written."""
    _declared.pop(name, None)


def declarations() -> dict[str, Declaration]:
    """Every technique by its name, in the order in which they are applied."""
    global _is_complete
    if not _is_complete:
        _is_complete = True
        for module in pkgutil.iter_modules([str(Path(__file__).parent)], "lightning_accel.techniques."):
            importlib.import_module(module.name)
        for entry in entry_points(group="lightning_accel.techniques"):
            _load(entry)
    return dict(_declared)


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
    # Not in the order of imports: the package's by their files, then others as they were declared.
    files = {name: one.technique.__module__ for name, one in declared.items()}
    own = sorted((name for name in declared if files[name].startswith(f"{__package__}.")), key=files.__getitem__)
    left = {name: declared[name] for name in (*own, *declared)}
    ordered: dict[str, Declaration] = {}
    while left:
        # Of those that may come now, the first: a new technique moves no other one.
        name = next((name for name in left if not waits_for[name] & left.keys()), None)
        if name is None:
            raise ValueError(f"Each of these techniques is declared to come after another of them: {', '.join(left)}.")
        ordered[name] = left.pop(name)
    return ordered


def plain(value: Any) -> Any:
    """A value of a plan as YAML has it: options as a mapping of what differs from their defaults."""
    if isinstance(value, Options):
        return {name: plain(one) for name, one in value.given().items()}
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple) else value


def documented(kind: Any) -> dict[str, str]:
    """What a docstring says under ``Attributes:`` or ``Args:``, by name."""
    text = inspect.getdoc(kind) or ""
    section = re.search(r"^(?:Attributes|Args):\n((?:(?:    .*)?\n?)*)", text, re.MULTILINE)
    entries = re.findall(r"^    (\w+): ((?:.*\n?)(?:     .*\n?)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}
