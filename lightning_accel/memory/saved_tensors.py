"""The tensors that autograd saves for the backward pass, and how several savers share the hooks on them.

Autograd uses only the innermost pair of hooks (:class:`torch.autograd.graph.saved_tensors_hooks`). A :class:`Saver`
returns what it would keep in place of a tensor. :func:`saving` asks the surrounding savers, outermost first; a tensor
that none of them takes is kept as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_accel.core.engine_var import EngineVar
from lightning_accel.core.torch_private.autograd import saved_tensors_hooks
from lightning_accel.core.torch_private.compilation import dynamo_is_loaded
from lightning_accel.core.torch_private.tensors import base_of, set_version, version_of
from lightning_accel.core.tree import storage_of, storages_of


class Packed(Protocol):
    """What a saver keeps in place of a tensor. It is freed with its graph."""

    def unpack(self) -> Tensor:
        """Returns a tensor with the original's values, dtype, shape, strides and device. May be called repeatedly."""
        ...


class Saver(Protocol):
    """An object that keeps saved tensors in another form or place."""

    def pack(self, tensor: Tensor) -> Packed | None:
        """Returns what to keep in place of ``tensor``; None to leave the tensor to others.

        The tensor is strided, of no subclass, and neither a parameter nor a buffer nor a copy of one. It may have a
        ``grad_fn``: keep ``tensor.detach()``, or graph and tensor keep each other alive.
        """
        ...


# The active savers, and the tensors that are never offered.
_asked: EngineVar[tuple[tuple[Saver, ...], OwnTensors] | None] = EngineVar("_asked", default=None)


@contextmanager
def saving(saver: Saver, model: nn.Module) -> Iterator[None]:
    """Offers the tensors that autograd saves to ``saver``, after the savers of the surrounding contexts.

    The model's parameters and buffers, views of them and their autocast copies are not offered.
    """
    savers, own = _asked.get() or ((), OwnTensors(model))
    with _asking((*savers, saver), own):
        yield


@contextmanager
def sparing(saver: Saver) -> Iterator[None]:
    """Excludes ``saver`` inside the context, even if a surrounding context uses it."""
    asked = _asked.get()
    if asked is None or saver not in asked[0]:
        yield
        return
    with _asking(tuple(s for s in asked[0] if s is not saver), asked[1]):
        yield


@contextmanager
def _asking(savers: tuple[Saver, ...], own: OwnTensors) -> Iterator[None]:
    def pack(tensor: Tensor) -> _Guarded:
        packed: Packed | None = None
        if _is_ordinary(tensor) and tensor not in own:
            packed = next((packed for saver in savers if (packed := saver.pack(tensor)) is not None), None)
        return _Guarded(packed, tensor.detach() if packed is None else counter_of(tensor), version_of(tensor))

    hooks: tuple[Any, Any] = pack, _Guarded.unpack
    if dynamo_is_loaded():
        # If compiled code falls back to eager, Dynamo examines every called function, hooks included.
        hooks = tuple(map(torch.compiler.disable, hooks))
    hooks[0].gives_way = True
    with _asked.being((savers, own)), _giving_way_to_functorch(), torch.autograd.graph.saved_tensors_hooks(*hooks):
        yield


@contextmanager
def _giving_way_to_functorch() -> Iterator[None]:
    """Lets ``torch.func.grad`` and the like run inside, despite hooks, if these have the attribute ``gives_way``.

    Such transforms refuse to run under saved-tensor hooks. Ours, on top, are removed meanwhile: what a transform saves
    for itself is not packed.
    """
    graph: Any = torch.autograd.graph
    refusing = graph.disable_saved_tensors_hooks
    if hasattr(refusing, "gives_way"):
        yield
        return

    @contextmanager
    def disable_saved_tensors_hooks(message: str) -> Iterator[None]:
        with ExitStack() as stack:
            while (top := saved_tensors_hooks()) is not None and hasattr(top[0], "gives_way"):
                hooks = graph.saved_tensors_hooks(*top)
                hooks.__exit__()
                stack.callback(hooks.__enter__)
            stack.enter_context(refusing(message))
            yield

    disable_saved_tensors_hooks.gives_way = True  # type: ignore[attr-defined]
    graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = refusing


def _is_ordinary(tensor: Tensor) -> bool:
    """Returns whether a tensor has its own readable memory: no subclass, no functorch tensor, no symbolic zero."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_nested:
        return False
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Checks for in-place changes, which autograd leaves to the hooks."""

    packed: Packed | None
    tensor: Tensor  # the kept tensor if nobody packs it; otherwise one that shares its counter
    version: int

    def unpack(self) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" saved at version {self.version}, now at version {version_of(self.tensor)}."
            )
        return self.tensor if self.packed is None else self.packed.unpack()


def counter_of(tensor: Tensor) -> Tensor:
    """Returns a tensor that shares the version counter of ``tensor`` but none of its memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def shares_counter(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors share a version counter, as a tensor and its view do.

    Sharing a storage is not enough: ``unsafe_chunk``, which recurrent layers use, gives each piece its own counter.
    """
    before = version_of(one)
    set_version(one, before + 1)
    try:
        return version_of(other) == before + 1
    finally:
        set_version(one, before)


class OwnTensors:
    """The parameters and buffers of a model. Distinguishes their views and autocast copies from activations."""

    _SEE_THROUGH = ("TBackward0", "ToCopyBackward0", "ViewBackward0", "TransposeBackward0", "PermuteBackward0")

    def __init__(self, model: nn.Module) -> None:
        tensors = [t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)]
        self._storages = storages_of(tensors)
        self._shapes = {t.shape for t in tensors} | {t.shape[::-1] for t in tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        # Gathered parameters of FSDP have other memory.
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
            return True
        if storage_of(tensor) in self._storages:
            return True
        # The copy of a frozen parameter has no graph. An activation of the same shape is skipped too, which costs
        # memory but not correctness.
        is_low = tensor.dtype in (torch.float16, torch.bfloat16)
        if is_low and not tensor.requires_grad and tensor.shape in self._shapes:
            return True
        node = tensor.grad_fn
        while node is not None and node.name() in self._SEE_THROUGH:
            node = node.next_functions[0][0]
        return isinstance(getattr(node, "variable", None), nn.Parameter)
