"""The tensors that autograd saves for its backward pass, and how several savers share the one place to catch them.

Autograd takes one pair of hooks at a time (:class:`torch.autograd.graph.saved_tensors_hooks`), the innermost. A
:class:`Saver` says what it would keep in a tensor's stead; :func:`saving` asks the savers around, outermost first, and
whatever none of them wants is kept as it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_accel.memory.functorch import standing_aside_for_functorch

V = TypeVar("V")


class Packed(Protocol):
    """What a saver keeps in a tensor's stead. It dies with the graph that holds it."""

    def unpack(self) -> Tensor:
        """A tensor with the original's values, dtype, shape, strides and device. May be called more than once."""
        ...


class Saver(Protocol):
    """Something that keeps saved tensors in another form, or elsewhere."""

    def pack(self, tensor: Tensor) -> Packed | None:
        """What to keep in the stead of ``tensor``; None to leave it to others.

        Args:
            tensor: Strided, of no subclass, neither a parameter nor a buffer nor a copy of one. It may have a
                ``grad_fn``: keep ``tensor.detach()``, or graph and tensor keep each other alive.
        """
        ...


_savers: ContextVar[tuple[Saver, ...]] = ContextVar("_savers", default=())
_own: ContextVar[OwnTensors | None] = ContextVar("_own", default=None)


@contextmanager
def saving(saver: Saver, model: nn.Module) -> Iterator[None]:
    """Inside, autograd offers what it saves to ``saver``, after the savers of the contexts around this one.

    Args:
        saver: Asked for every saved tensor that is not the model's own.
        model: Its parameters and buffers, views of them and their autocast copies stay where they are.
    """
    with _asking((*_savers.get(), saver), _own.get() or OwnTensors(model)):
        yield


@contextmanager
def sparing(saver: Saver) -> Iterator[None]:
    """Inside, ``saver`` is not asked, whoever is asking it around."""
    own = _own.get()
    if saver not in _savers.get() or own is None:
        yield
        return
    with _asking(tuple(s for s in _savers.get() if s is not saver), own):
        yield


@contextmanager
def _asking(savers: tuple[Saver, ...], own: OwnTensors) -> Iterator[None]:
    def pack(tensor: Tensor) -> _Guarded:
        packed: Packed | None = None
        if _is_ordinary(tensor) and tensor not in own:
            packed = next((p for p in (s.pack(tensor) for s in savers) if p is not None), None)
        if packed is None:
            kept = tensor.detach()
            return _Guarded(_Kept(kept), kept, tensor._version)
        return _Guarded(packed, counter_of(tensor), tensor._version)

    hooks: tuple[Any, Any] = pack, _Guarded.unpack
    if "torch._dynamo" in sys.modules:
        # Where compiled code falls back to eager, Dynamo looks at every function that is called, hooks included.
        hooks = tuple(map(torch.compiler.disable, hooks))
    hooks[0].stands_aside = True
    tokens = _savers.set(savers), _own.set(own)
    try:
        with standing_aside_for_functorch(), torch.autograd.graph.saved_tensors_hooks(*hooks):
            yield
    finally:
        _savers.reset(tokens[0])
        _own.reset(tokens[1])


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether it has memory of its own to look at: no subclass, none of functorch's, nor a zero that is only meant."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    tensor: Tensor

    def unpack(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Autograd leaves its check for in-place changes to whoever packs: here it is."""

    packed: Packed
    counter: Tensor
    version: int

    def unpack(self) -> Tensor:
        if self.counter._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" saved at version {self.version}, now at version {self.counter._version}."
            )
        return self.packed.unpack()


def counter_of(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter of ``tensor``, and none of its memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


class OwnTensors:
    """The parameters and buffers of a model, to tell views and autocast copies of them from activations."""

    _SEE_THROUGH = ("TBackward0", "ToCopyBackward0", "ViewBackward0", "TransposeBackward0", "PermuteBackward0")

    def __init__(self, model: nn.Module) -> None:
        tensors = [t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)]
        self._storages = {t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided}
        self._shapes = {t.shape for t in tensors} | {t.shape[::-1] for t in tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        # Those that FSDP gathers have memory of their own, which this has not seen.
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True
        if tensor.untyped_storage()._cdata in self._storages:
            return True
        # A frozen parameter's copy has no graph that leads to it. An activation of that very shape is passed over
        # with it, which costs memory and no correctness.
        is_low = tensor.dtype in (torch.float16, torch.bfloat16)
        if is_low and not tensor.requires_grad and tensor.shape in self._shapes:
            return True
        node = tensor.grad_fn
        while node is not None and node.name() in self._SEE_THROUGH:
            node = node.next_functions[0][0]
        return isinstance(getattr(node, "variable", None), nn.Parameter)


class ByStorage(Generic[V]):
    """A value a storage, forgotten when the storage is freed: its address may then be another's."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[torch.UntypedStorage], V]] = {}

    def get(self, tensor: Tensor) -> V | None:
        held = self._values.get(tensor.untyped_storage()._cdata)
        return None if held is None or held[0]() is None else held[1]

    def set(self, tensor: Tensor, value: V) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata

        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            held = self._values.get(key)
            if held is not None and held[0] is reference:
                del self._values[key]

        self._values[key] = (weakref.ref(storage, forget), value)

    def __len__(self) -> int:
        return len(self._values)


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages behind ``tensors``, each counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors if has_storage(tensor))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def has_storage(tensor: Tensor) -> bool:
    """Whether there is one storage behind it: not while it is lazy, nor where it is sparse."""
    return not is_lazy(tensor) and tensor.layout == torch.strided


def shares_counter(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors count changes together, as views of one another do.

    Not all that share a storage do: ``unsafe_chunk``, which recurrent layers use, gives each piece its own counter.
    """
    before = one._version
    _set_version(one, before + 1)
    try:
        return other._version == before + 1
    finally:
        _set_version(one, before)


def _set_version(tensor: Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
