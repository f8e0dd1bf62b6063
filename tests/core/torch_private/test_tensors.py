"""What breaks when a torch drops one of the private names of tensors, in plain words: a test a name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.torch_private.tensors import (
    base_of,
    handles_on_storage,
    handles_on_tensor,
    set_version,
    version_of,
    wrapper_tensor,
)


def test_handles_on_a_tensor_are_counted() -> None:
    """Else in-place activations say that references could not be counted, and do nothing."""
    tensor = torch.ones(2, requires_grad=True) * 2
    before = handles_on_tensor(tensor)
    saved = tensor * tensor

    assert handles_on_tensor(tensor) > before
    assert saved.requires_grad


def test_handles_on_memory_are_counted() -> None:
    """As for the tensor."""
    tensor = torch.ones(2)
    before = handles_on_storage(tensor.untyped_storage())
    view = tensor[:1]

    assert handles_on_storage(tensor.untyped_storage()) == before + 1
    assert view.shape == (1,)


def test_a_tensor_tells_how_often_it_was_written_to() -> None:
    """Else a trial and an offloader would give a backward pass a tensor that was overwritten since."""
    x = torch.zeros(2)
    x.add_(1)
    assert version_of(x) == 1
    assert version_of(x[:1]) == 1


def test_the_count_of_writes_can_be_set() -> None:
    """Else nothing tells which pieces of a storage change together, and recurrent layers could not be offloaded."""
    x = torch.zeros(2)
    view = x[:1]
    set_version(x, 7)
    assert version_of(view) == 7


def test_a_tensor_of_a_subclass_can_be_without_memory() -> None:
    """Else ``loss`` raises at the first call of a head, and Lightning's steps are repeated without edits."""

    class Nothing(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("no operation is asked for")

    like = torch.empty(1 << 40, 3, dtype=torch.float16, device="meta").mT
    made = wrapper_tensor(Nothing, like, torch.device("cpu"))
    assert type(made) is Nothing
    assert (made.shape, made.stride(), made.dtype, made.device.type) == (like.shape, (1, 3), torch.float16, "cpu")


def test_a_view_tells_what_it_is_a_view_of() -> None:
    """Else views of parameters that FSDP gathers would be offloaded, and fetched back, as if they were activations."""
    weight = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    assert base_of(weight.t()) is weight
    assert base_of(torch.zeros(2)) is None
