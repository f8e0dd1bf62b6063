"""What breaks when a torch drops one of the private names that the library uses, in plain words: a test a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.core import torch_private
from lightning_accel.core.torch_private import coo_parts

# -- sparse tensors ----------------------------------------------------------------------------------------------------


def test_the_memory_of_a_sparse_tensor_that_is_not_coalesced_can_be_reached() -> None:
    """``_indices``, ``_values``. Without, the pipeline cannot hand such a tensor from its stream to the consumer's."""
    indices, values = torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0])
    twice = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    assert [part.tolist() for part in coo_parts(twice)] == [[[1, 1]], [2.0, 3.0]]
    assert coo_parts(twice)[1].data_ptr() == values.data_ptr()
    assert [part.tolist() for part in coo_parts(twice.coalesce())] == [[[1]], [5.0]]


# -- attention by hand -----------------------------------------------------------------------------------------------


class Sees(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class SeesKernels(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Sees, SeesKernels])
def test_modes_that_see_every_operation_are_noticed(mode: type[Sees | SeesKernels]) -> None:
    """Else TorchDynamo gives attention under a FLOP counter or selective checkpointing up for good."""
    assert not torch_private.has_modes()
    with mode():
        assert torch_private.has_modes()


def test_function_modes_step_aside_and_come_back_in_their_order() -> None:
    """Else what is captured inside them is captured anew at every call, or the modes see it no more."""
    ones = torch.ones(2)
    with Sees() as outer, Sees() as inner:
        with torch_private.without_function_modes() as modes:
            assert modes == [outer, inner]
            ones.abs()
        assert not inner.seen
        ones.abs()
    assert len(inner.seen) == len(outer.seen) == 1
    assert not torch_private.has_modes()


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_on_all_modules_are_found(register: Any) -> None:
    """Else whoever watches all modules sees the parts of a captured attention no more."""

    def hook(*args: Any) -> None: ...

    handle = register(hook)
    assert torch_private.hooks_on_all_modules() == [hook]
    handle.remove()
    assert not torch_private.hooks_on_all_modules()


def test_it_shows_that_dynamo_was_told_to_capture_nothing() -> None:
    """Else what was captured runs as it was written, and modes, which were taken away for the capture, miss it."""
    assert not torch_private.dynamo_is_off()
    with torch.compiler.set_stance("force_eager"):
        assert torch_private.dynamo_is_off()
    with torch._dynamo.config.patch(disable=True):
        assert torch_private.dynamo_is_off()


def test_inside_a_forward_pass_of_ddp_dynamo_does_not_know_of_it() -> None:
    """Else graphs are cut by DDP's buckets, and attention across a cut is left alone."""
    DistributedDataParallel._active_ddp_module = wrapped = nn.Linear(1, 1)
    try:
        with torch_private.outside_of_ddp():
            assert DistributedDataParallel._get_active_ddp_module() is None
        assert DistributedDataParallel._get_active_ddp_module() is wrapped
    finally:
        DistributedDataParallel._active_ddp_module = None
