"""Reversible edits. Whatever the package changes in a user's object is a `Patch`, and can be taken back."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from typing_extensions import override

_MISSING = object()
_edits: WeakSet[Callable[..., Any]] = WeakSet()  # the functions of methods that patches have rebound


class Patch(ABC):
    """One reversible edit at one site. Applying twice is applying once; so is undoing.

    Attributes:
        site: Where: the qualified name of a module in the model, ``""`` for the model itself.
        change: What, for the report: ``"forward → checkpointed"``.
        is_applied: Whether it is made.
        why_not: Why there is no edit at this site after all; empty if there is one.
        variants: What live trials may switch it to, beside ``"off"``; the first holds once it is applied.
        settle: Steps after a switch that are slower for it.
    """

    why_not = ""
    variants: tuple[str, ...] = ("on",)
    settle: int = 0

    def __init__(self, site: str, change: str) -> None:
        self.site = site
        self.change = change
        self.is_applied = False

    def apply(self) -> None:
        """Makes the edit. When it fails half way, nothing of it stays."""
        if not self.is_applied:
            try:
                self._apply()
            except BaseException:
                self._undo()
                raise
            self.is_applied = True

    def undo(self) -> None:
        """Restores what was there before."""
        if self.is_applied:
            self._undo()
            self.is_applied = False

    def switch(self, variant: str) -> None:
        """Puts a variant in force, between two steps. What is none of its variants is the user's own way."""
        (self.apply if variant in self.variants else self.undo)()

    @abstractmethod
    def _apply(self) -> None: ...

    @abstractmethod
    def _undo(self) -> None:
        """Also right after an ``_apply`` that raised."""


class AttributePatch(Patch):
    """Sets an attribute of an object, and restores it: value, or absence from the instance.

    Where somebody has set it anew in the meantime, what they set stays.
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


class MethodPatch(AttributePatch):
    """Rebinds a method on one instance to ``wrap(original)``.

    The new method is a :class:`types.MethodType` over plain functions of ``self``: a deep copy of the object, as
    EMA and SWA make, binds it to the copy, and pickling the object leaves the edit behind. What it wraps is the
    method as it is when the patch is applied: techniques that rebind the same ``forward`` stack up in their order.

    Attributes:
        original: The method before, as a function of ``(self, *args, **kwargs)``; there once the patch was applied.

    Args:
        target: The object; its class, and other instances of it, stay as they are.
        name: The method's name, ``"forward"`` say.
        wrap: Takes the original, returns the new method, likewise a function of ``(self, *args, **kwargs)``.
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
        function.__wrapped__ = self.original  # type: ignore[attr-defined]  # whose signature is the method's
        _edits.add(function)
        self.value = types.MethodType(function, self.target)
        super()._apply()


def _unbound(target: Any, name: str) -> Callable[..., Any]:
    """The method as a function of ``(self, *args, **kwargs)``, wherever it was defined."""
    method = getattr(target, name)
    if isinstance(method, types.MethodType) and method.__self__ is target:
        return method.__func__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # static, of the class, or put on the instance
        return method(*args, **kwargs)

    return call


def is_edit(value: Any) -> bool:
    """Whether ``value`` is the method that a :class:`MethodPatch` has made, of its object or of a copy of that."""
    function = value.__func__ if isinstance(value, types.MethodType) else None
    return isinstance(function, types.FunctionType) and function in _edits


class PatchSet:
    """The edits of one technique, undone in the reverse of the order in which they were applied."""

    def __init__(self, patches: Iterable[Patch] = ()) -> None:
        self._patches: dict[str, Patch] = {}
        for patch in patches:
            self.add(patch)

    def add(self, patch: Patch) -> None:
        """Claims ``patch.site``.

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
        """Applies all; when one fails, those before it are undone."""
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
    """Inside, the edits are made."""
    edits.apply()
    try:
        yield
    finally:
        edits.undo()


@contextmanager
def temporarily(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """A switch of the whole process, set to ``value`` inside, and afterwards to what it was."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)
