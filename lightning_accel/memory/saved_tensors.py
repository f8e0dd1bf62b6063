"""The tensors that autograd saves for its backward pass, and how several savers share the one place to catch them.

Autograd takes one pair of hooks at a time (:class:`torch.autograd.graph.saved_tensors_hooks`), the innermost. A
:class:`Saver` says what it would keep in place of a tensor; :func:`saving` asks the savers around, outermost first, and
whatever none of them wants is kept as it is.
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
    """What a saver keeps in place of a tensor. It dies with the graph that holds it."""

    def unpack(self) -> Tensor:
        """A tensor with the original's values, dtype, shape, strides and device. May be called more than once."""
        ...


class Saver(Protocol):
    """Something that keeps saved tensors in another form, or elsewhere."""

    def pack(self, tensor: Tensor) -> Packed | None:
        """What to keep in place of ``tensor``; None to leave it to others.

        It is strided, of no subclass, neither a parameter nor a buffer nor a copy of one. It may have a ``grad_fn``:
        keep ``tensor.detach()``, or graph and tensor keep each other alive.
        """
        ...


# Who is asked here, and what nobody is asked for.
_asked: EngineVar[tuple[tuple[Saver, ...], OwnTensors] | None] = EngineVar("_asked", default=None)


@contextmanager
def saving(saver: Saver, model: nn.Module) -> Iterator[None]:
    """Inside, autograd offers what it saves to ``saver``, after the savers of the contexts around this one.

    The model's parameters and buffers, views of them and their autocast copies stay where they are.
    """
    savers, own = _asked.get() or ((), OwnTensors(model))
    with _asking((*savers, saver), own):
        yield


@contextmanager
def sparing(saver: Saver) -> Iterator[None]:
    """Inside, ``saver`` is not asked, whoever is asking it around."""
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
        # Where compiled code falls back to eager, Dynamo looks at every function that is called, hooks included.
        hooks = tuple(map(torch.compiler.disable, hooks))
    hooks[0].gives_way = True
    with _asked.being((savers, own)), _giving_way_to_functorch(), torch.autograd.graph.saved_tensors_hooks(*hooks):
        yield


@contextmanager
def _giving_way_to_functorch() -> Iterator[None]:
    """Inside, ``torch.func.grad`` and the like work though there are hooks, if these have ``gives_way`` on them.

    They refuse to run where saved tensors are caught, and switch the catching off within. Hooks of ours, on top, are
    taken off for that long: what such a transform saves for itself stays where it is.
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
    """Whether it has memory of its own to look at: no subclass, none of functorch's, nor a zero that is only meant."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_nested:
        return False
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False


@dataclass(frozen=True, slots=True)
class _Guarded:
    """Autograd leaves its check for in-place changes to whoever packs: here it is."""

    packed: Packed | None
    tensor: Tensor  # what is kept where nobody packs it; else one that shares its counter
    version: int

    def unpack(self) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" saved at version {self.version}, now at version {version_of(self.tensor)}."
            )
        return self.tensor if self.packed is None else self.packed.unpack()


def counter_of(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter of ``tensor``, and none of its memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def shares_counter(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors count changes together, as views of one another do.

    Not all that share a storage do: ``unsafe_chunk``, which recurrent layers use, gives each piece its own counter.
    """
    before = version_of(one)
    set_version(one, before + 1)
    try:
        return version_of(other) == before + 1
    finally:
        set_version(one, before)


class OwnTensors:
    """The parameters and buffers of a model, to tell views and autocast copies of them from activations."""

    _SEE_THROUGH = ("TBackward0", "ToCopyBackward0", "ViewBackward0", "TransposeBackward0", "PermuteBackward0")

    def __init__(self, model: nn.Module) -> None:
        tensors = [t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)]
        self._storages = storages_of(tensors)
        self._shapes = {t.shape for t in tensors} | {t.shape[::-1] for t in tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        # Those that FSDP gathers have memory of their own, which this has not seen.
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
            return True
        if storage_of(tensor) in self._storages:
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
