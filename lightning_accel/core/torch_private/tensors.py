"""Private names of torch's tensors, and of the memory that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

import torch
from torch import _C, Tensor

handles_on_tensor: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 0)
"""How many hold a tensor from C++: ``_use_count``, since torch 2.1; nothing else shows what autograd or DLPack holds.

Where it is missing, 0 of every tensor, by which nobody can be told to hold one: then activations are never in place.
"""


def handles_on_storage(storage: torch.UntypedStorage) -> int:
    """How many tensors and others hold memory: ``_storage_Use_Count``, since torch 2.1, of ``_cdata``.

    Where it is missing, the AttributeError goes to the caller, who then leaves the memory alone.
    """
    return _C._storage_Use_Count(storage._cdata)


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place: ``_version``, since torch 0.4.

Autograd compares it for what it saves, and so must whoever saves in its stead. Without it nothing is offloaded.
"""


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """The same of several, for every step to ask: without a call for each."""
    return [tensor._version for tensor in tensors]


def set_version(tensor: Tensor, version: int) -> None:
    """Sets what :func:`version_of` counts: ``_unsafe_set_version_counter``, a tuple of tensors since torch 2.6.

    Nothing else tells whether two tensors share a counter but to move one and put it back.
    """
    _C._autograd._unsafe_set_version_counter((tensor,), (version,))


def base_of(tensor: Tensor) -> Tensor | None:
    """What ``tensor`` is a view of: ``_base``, since torch 0.4. It tells the views of parameters that FSDP gathers."""
    return tensor._base


def wrapper_tensor(kind: type[Tensor], like: Tensor, device: torch.device) -> Tensor:
    """A tensor of a subclass that has a shape, strides, a dtype and a device, and no memory.

    ``_make_wrapper_subclass``, since torch 1.10, of a class with ``__torch_dispatch__``; there is no public way.
    Without it a step with a large head raises, and under Lightning is repeated without edits.
    """
    return Tensor._make_wrapper_subclass(kind, like.shape, like.stride(), dtype=like.dtype, device=device)
