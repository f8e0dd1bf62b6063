"""Context variables that also work on autograd's own threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar, cast

from lightning_accel.core.torch_private.autograd import is_on_foreign_thread

T = TypeVar("T")

_UNSET = object()


class EngineVar(Generic[T]):
    """A :class:`~contextvars.ContextVar` whose value is also visible on autograd's threads.

    Autograd runs the backward pass of GPU work on its own threads, which have no Python context. Code that is
    recomputed there reads the value that was set last, by any thread.

    Args:
        name: For debugging.
        default: The value if nothing is set.
    """

    def __init__(self, name: str, default: T) -> None:
        self._default = default
        self._own: ContextVar[T | object] = ContextVar(name)
        self._all: dict[int, T] = {}

    def get(self) -> T:
        """Returns the current value."""
        value = self._own.get(_UNSET)  # some modules ask at every call, mostly with nothing set
        if value is not _UNSET:
            return cast(T, value)
        if self._all and is_on_foreign_thread():
            return next(reversed(self._all.values()), self._default)
        return self._default

    @contextmanager
    def being(self, value: T) -> Iterator[None]:
        """Sets the value inside the context."""
        token = self._own.set(value)
        self._all[id(token)] = value
        try:
            yield
        finally:
            del self._all[id(token)]
            self._own.reset(token)
