"""Reversible edits. Every change to a user's object is a `Patch`, which can be undone."""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

from typing_extensions import override

_MISSING = object()
_edits: WeakSet[Callable[..., Any]] = WeakSet()  # the functions inside methods made by patches


class Patch(ABC):
    """One reversible edit at one site. To apply or undo it twice has no further effect.

    Attributes:
        site: The qualified name of a module in the model; ``""`` for the model itself.
        change: What is changed, for the report: ``"forward → checkpointed"``.
        is_applied: Whether the edit is made.
        why_not: Why there is no edit at this site after all; empty if there is one.
        variants: What live trials may switch it to, besides ``"off"``. The first one holds after :meth:`apply`.
        settle: How many steps after a switch are slower because of it.
    """

    why_not = ""
    variants: tuple[str, ...] = ("on",)
    settle: int = 0

    def __init__(self, site: str, change: str) -> None:
        self.site = site
        self.change = change
        self.is_applied = False

    def apply(self) -> None:
        """Makes the edit. If it fails half way, nothing of it stays."""
        if not self.is_applied:
            try:
                self._apply()
            except BaseException:
                self._undo()
                raise
            self.is_applied = True

    def undo(self) -> None:
        """Restores what was there before the edit."""
        if self.is_applied:
            self._undo()
            self.is_applied = False

    def switch(self, variant: str) -> None:
        """Activates a variant, between two steps. Any other name undoes the edit."""
        (self.apply if variant in self.variants else self.undo)()

    @abstractmethod
    def _apply(self) -> None: ...

    @abstractmethod
    def _undo(self) -> None:
        """Must also work after an ``_apply`` that raised."""


class AttributePatch(Patch):
    """Sets an attribute of an object. Undoing restores its value, or its absence from the instance.

    If somebody has set the attribute again in the meantime, their value stays.
    """

    def __init__(self, site: str, change: str, target: Any, name: str, value: Any) -> None:
        super().__init__(site, change)
        self.target = target
        self.name = name
        self.value = value
        self._before: Any = _MISSING

    @override
    def _apply(self) -> None:
        self._before = vars(self.target).get(self.name, _MISSING)
        setattr(self.target, self.name, self.value)

    @override
    def _undo(self) -> None:
        if vars(self.target).get(self.name, _MISSING) is not self.value:
            return
        if self._before is _MISSING:
            del vars(self.target)[self.name]
        else:
            setattr(self.target, self.name, self._before)


class SwitchPatch(Patch):
    """Sets a process-wide switch. If somebody has set it again in the meantime, their value stays.

    Patches with the same ``read`` may be undone in any order: the last restores what was there before the first.
    """

    _in_force: ClassVar[list[SwitchPatch]] = []  # in the order in which they were applied

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> None:
        super().__init__("", "switched")
        self._read, self._write, self._value = read, write, value
        self._before = value

    @override
    def _apply(self) -> None:
        self._in_force.append(self)
        self._before = self._read()
        self._write(self._value)

    @override
    def _undo(self) -> None:
        if sys.is_finalizing():  # the switch may be gone with its module
            return
        later = self._in_force[self._in_force.index(self) + 1 :]
        self._in_force.remove(self)
        # One that has found our value is to restore what we have found.
        heirs = [one for one in later if one._read == self._read and one._before == self._value]
        if heirs:
            heirs[0]._before = self._before
        elif self._read() == self._value:
            self._write(self._before)


class MethodPatch(AttributePatch):
    """Replaces a method of one instance by ``wrap(original)``.

    The new method is a :class:`types.MethodType` over a plain function of ``self``. A deep copy of the object, as EMA
    and SWA make, binds it to the copy. Pickling the object leaves the edit out. The method wrapped is the one at the
    time of :meth:`apply`: techniques that patch the same ``forward`` are stacked in their order.

    Attributes:
        original: The previous method as a function of ``(self, *args, **kwargs)``. Exists after the first
            :meth:`apply`.

    Args:
        target: The object. Its class and other instances are not changed.
        name: The method's name, such as ``"forward"``.
        wrap: Takes the original and returns the new method, also a function of ``(self, *args, **kwargs)``.
    """

    def __init__(
        self, site: str, change: str, target: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        super().__init__(site, change, target, name, None)
        self._wrap = wrap

    @override
    def _apply(self) -> None:
        self.original = _unbound(self.target, self.name)
        function = self._wrap(self.original)
        function.__name__ = self.name  # pickle stores a bound method as (object, method name)
        function.__wrapped__ = self.original  # type: ignore[attr-defined]  # for its signature
        _edits.add(function)
        self.value = types.MethodType(function, self.target)
        super()._apply()


def _unbound(target: Any, name: str) -> Callable[..., Any]:
    """Returns the method as a function of ``(self, *args, **kwargs)``, wherever it is defined."""
    method = getattr(target, name)
    if isinstance(method, types.MethodType) and method.__self__ is target:
        return method.__func__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # static, a class method, or set on the instance
        return method(*args, **kwargs)

    return call


def is_edit(value: Any) -> bool:
    """Returns whether ``value`` is a method made by a :class:`MethodPatch`, of its object or of a copy."""
    function = value.__func__ if isinstance(value, types.MethodType) else None
    return isinstance(function, types.FunctionType) and function in _edits


class PatchSet:
    """The edits of one technique. They are undone in the reverse order."""

    def __init__(self, patches: Iterable[Patch] = ()) -> None:
        self._patches: dict[str, Patch] = {}
        for patch in patches:
            self.add(patch)

    def add(self, patch: Patch) -> None:
        """Adds ``patch``, which claims its site.

        Raises:
            ValueError: Another patch of this set has the site.
        """
        if patch.site in self._patches:
            raise ValueError(
                f"Site {patch.site!r} is claimed twice: {self._patches[patch.site].change!r} and {patch.change!r}."
            )
        self._patches[patch.site] = patch

    def __iter__(self) -> Iterator[Patch]:
        return iter(self._patches.values())

    def __len__(self) -> int:
        return len(self._patches)

    def __contains__(self, site: object) -> bool:
        return site in self._patches

    def apply(self) -> None:
        """Applies all edits. If one fails, those before it are undone."""
        try:
            for patch in self:
                patch.apply()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        for patch in reversed(list(self)):
            patch.undo()

    def drop(self, site: str) -> None:
        """Undoes the patch at ``site`` and forgets it."""
        self._patches.pop(site).undo()


@contextmanager
def applied(edits: Patch | PatchSet) -> Iterator[None]:
    """Makes the edits inside the context and undoes them at its end."""
    edits.apply()
    try:
        yield
    finally:
        edits.undo()


@contextmanager
def temporarily(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """Sets a process-wide switch to ``value`` inside the context, and restores it at the end."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)
