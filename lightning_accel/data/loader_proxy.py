"""What stands for a loader: its length, its attributes and, of a DataLoader, its class are the loader's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader
from typing_extensions import override


class StandIn:
    """In the place of a loader, for whoever asks it anything but to be iterated.

    All that it knows is under one name, ``_inner``, whose ``loader`` is stood for, whose ``begin()`` begins an epoch
    and whose ``close()`` lets go of everything; every other name is the loader's, to read and to write.
    """

    _own: ClassVar[frozenset[str]] = frozenset({"loader", "close", "_inner", "__class__"})
    """Names that are the stand-in's."""

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "_inner", inner)

    @property
    def loader(self) -> Any:
        """The loader itself."""
        return self._inner.loader

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The loader's, if a DataLoader's; not a list's, say: what takes lists apart would take this for one."""
        inner = self.__dict__.get("_inner")
        return inner.loader.__class__ if inner is not None and isinstance(inner.loader, DataLoader) else type(self)

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch."""
        epoch: Iterator[Any] = self._inner.begin()
        return epoch

    def close(self) -> None:
        """Lets go of everything. From then on iterating is the loader's own."""
        self._inner.close()

    def __len__(self) -> int:
        """The loader's length, in batches."""
        return len(self._inner.loader)

    def __bool__(self) -> bool:
        """As of the loader: one without a length is true."""
        return bool(self._inner.loader)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the loader has."""
        # Special methods are the class's: a loader's __deepcopy__, say, would make a copy of the loader alone.
        if name == "_inner" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner.loader, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            raise AttributeError(f"{name!r} of a {type(self).__name__} cannot be set: make a new one")
        setattr(self._inner.loader, name, value)

    @override
    def __delattr__(self, name: str) -> None:
        delattr(self._inner.loader, name)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is the user's loader: what stands for it is of this run."""
        return stood_for, (self.loader,)

    @override
    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._inner.loader)})


class LoaderWalk(Iterator[Any]):
    """The batches of a loader, once."""

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is at its end: Lightning copies loaders under way, and leaves out iterators of DataLoaders only."""
        return iter, ((),)


def stood_for(loader: Any) -> Any:
    """The user's own loader, of whatever stands for it."""
    while isinstance(loader, StandIn):
        loader = loader.loader
    return loader
