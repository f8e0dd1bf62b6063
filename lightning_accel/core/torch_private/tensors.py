"""Private names of torch's tensors and of their memory."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
from torch import _C, Tensor

handles_on_tensor: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 0)
"""Returns how many C++ references a tensor has, as autograd or DLPack hold them: ``_use_count``, since torch 2.1.

Nothing else shows them. Without the name it returns 0: then activations are never changed in place.
"""


def handles_on_storage(storage: torch.UntypedStorage) -> int:
    """Returns how many tensors and others reference a storage: ``_storage_Use_Count`` of ``_cdata``, since torch 2.1.

    Without the name, the AttributeError reaches the caller, who then leaves the memory alone.
    """
    return _C._storage_Use_Count(storage._cdata)


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Returns how often a tensor was changed in place: ``_version``, since torch 0.4.

Autograd checks it for the tensors it saves; whoever saves tensors instead must do the same. Without it nothing is
offloaded.
"""


def set_version(tensor: Tensor, version: int) -> None:
    """Sets the counter of :func:`version_of`: ``_unsafe_set_version_counter``, a tuple of tensors since torch 2.6.

    Whether two tensors share a counter can only be found by changing one and changing it back.
    """
    _C._autograd._unsafe_set_version_counter((tensor,), (version,))


def base_of(tensor: Tensor) -> Tensor | None:
    """Returns the base of a view: ``_base``, since torch 0.4. It tells views of parameters that FSDP gathers."""
    return tensor._base


def wrapper_tensor(kind: type[Tensor], like: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of a subclass with shape, strides, dtype and device, but without memory.

    ``_make_wrapper_subclass``, since torch 1.10, for a class with ``__torch_dispatch__``; there is no public way.
    Without it a step with a large head raises, and under Lightning is repeated without edits.
    """
    return Tensor._make_wrapper_subclass(kind, like.shape, like.stride(), dtype=like.dtype, device=device)
