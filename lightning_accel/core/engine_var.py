"""Context variables for code that autograd calls, too, on threads of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar, cast

from lightning_accel.core.torch_private.autograd import is_on_foreign_thread

T = TypeVar("T")

_UNSET = object()


class EngineVar(Generic[T]):
    """A :class:`~contextvars.ContextVar` that holds on autograd's threads, too.

    The backward pass of what is on a GPU runs on a thread that autograd has made, with no context of Python's, and
    what is recomputed there asks the same questions. It sees what was set last, by whichever thread.

    Args:
        name: For debugging.
        default: The value where nothing is set.
    """

    def __init__(self, name: str, default: T) -> None:
        self._default = default
        self._own: ContextVar[T | object] = ContextVar(name)
        self._all: dict[int, T] = {}

    def get(self) -> T:
        """The value that is in force here."""
        value = self._own.get(_UNSET)  # asked at every call of some modules, where mostly nothing is set
        if value is not _UNSET:
            return cast(T, value)
        if self._all and is_on_foreign_thread():
            return next(reversed(self._all.values()), self._default)
        return self._default

    @contextmanager
    def being(self, value: T) -> Iterator[None]:
        """Has this value inside."""
        token = self._own.set(value)
        self._all[id(token)] = value
        try:
            yield
        finally:
            del self._all[id(token)]
            self._own.reset(token)
