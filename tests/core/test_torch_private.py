"""What breaks when a torch drops one of the private names that the library uses, in plain words: a test a name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy
from torch.profiler import profile

from lightning_accel.core import torch_private

# -- saved tensors ---------------------------------------------------------------------------------------------------


def test_a_tensor_tells_how_often_it_was_written_to() -> None:
    """Else a trial and an offloader would give a backward pass a tensor that was overwritten since."""
    x = torch.zeros(2)
    x.add_(1)
    assert torch_private.version_of(x) == 1
    assert torch_private.version_of(x[:1]) == 1


def test_the_count_of_writes_can_be_set() -> None:
    """Else nothing tells which pieces of a storage change together, and recurrent layers could not be offloaded."""
    x = torch.zeros(2)
    view = x[:1]
    torch_private.set_version(x, 7)
    assert torch_private.version_of(view) == 7


def test_a_view_tells_what_it_is_a_view_of() -> None:
    """Else views of parameters that FSDP gathers would be offloaded, and fetched back, as if they were activations."""
    weight = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    assert torch_private.base_of(weight.t()) is weight
    assert torch_private.base_of(torch.zeros(2)) is None


def test_hooks_on_saved_tensors_can_be_seen() -> None:
    """Else torch.func would refuse to run wherever activations are offloaded or packed."""

    def same(tensor: Tensor) -> Tensor:
        return tensor

    assert torch_private.saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(same, same):
        assert torch_private.saved_tensors_hooks() == (same, same)


def test_a_backward_pass_can_be_told_from_a_forward_pass() -> None:
    """Else calls that a recomputation makes would be counted as calls of the step."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch_private.is_in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not torch_private.is_in_backward()


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    """Else the nodes of one block could not be told from those before, and no memory budget could be planned."""
    first = torch.ones(2, requires_grad=True).exp()
    second = first.sin()
    assert torch_private.sequence_number(first.grad_fn) < torch_private.sequence_number(second.grad_fn)


def test_a_result_that_is_about_to_be_saved_is_not_saved_yet() -> None:
    """Else what a ReLU saves could not be kept as one bit an element, half of what sparse activations save."""
    found = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(torch_private.has_saved_result(tensor.grad_fn))
        return tensor.detach()

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = x.relu()
        z = y.square()
    assert found == [False, True]  # by the ReLU itself, and by the square after it
    z.sum().backward()
    assert torch_private.has_saved_result(y.grad_fn)  # freed: nothing can be said


def test_of_a_node_that_says_nothing_no_result_is_about_to_be_saved() -> None:
    assert torch_private.has_saved_result(object())


# -- the profiler of allocations -------------------------------------------------------------------------------------


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """Those of a profiler that is running, once the test has ended it."""
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        profiler_legacy.profile(profile_memory=True).__enter__()
    yield found
    if not found:
        torch_private.stop_legacy_profiler()


def test_a_profiler_tells_allocations_in_their_order(events: list[Any]) -> None:
    """Else what a block needs on a CPU could not be measured, and no memory budget could be planned there."""
    del [torch.empty(4096, dtype=torch.uint8)][:]
    events += [event for thread in torch_private.stop_legacy_profiler() for event in thread]
    sizes = [event.cpu_memory_usage() for event in events if str(event.kind()) == "memory_alloc"]
    assert sizes == [4096, -4096]


def test_a_profiler_is_seen_before_it_starts() -> None:
    """Else a user's profiler would raise in the steps that are metered for a memory budget."""
    told: list[str] = []
    restore = torch_private.before_profilers(lambda: told.append("one starts"))
    with profile(acc_events=True):  # or torch 2.11 warns that it would not
        assert told == ["one starts"]
    restore()
    with profile(acc_events=True):
        assert told == ["one starts"]


# -- compilation -----------------------------------------------------------------------------------------------------

# Torch's, of itself, when the compiler is imported.
OWN_DEPRECATION = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")


def test_a_compiled_module_says_so() -> None:
    """Else a technique would edit a module that runs compiled code, which does not see the edit."""
    module = nn.Linear(2, 2)
    assert torch_private.compiled_call(module) is None
    module.compile(backend="eager")
    assert torch_private.compiled_call(module) is not None


def test_a_modules_call_can_be_replaced_and_given_back() -> None:
    """Else blocks of torch's own classes could not be compiled: module.compile() compiles nothing for them."""
    module = nn.Linear(2, 2)
    torch_private.set_compiled_call(module, lambda x: "compiled")
    assert module(torch.ones(1, 2)) == "compiled"
    torch_private.set_compiled_call(module, None)
    assert module(torch.ones(1, 2)).shape == (1, 2)


def test_a_compiled_modules_call_can_be_made_eagerly() -> None:
    """Else a compiled block could not be compared with what it is compiled from."""
    module = nn.Linear(2, 2)
    torch_private.set_compiled_call(module, lambda x: "compiled")
    assert torch_private.eager_call(module)(torch.ones(1, 2)).shape == (1, 2)


@OWN_DEPRECATION
def test_a_module_that_lightning_unwrapped_is_known() -> None:
    """Else a LightningModule given as torch.compile(module) would be taken for one that runs eagerly."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.utilities.compile import from_compiled

    module = LightningModule()
    assert not torch_private.was_compiled_by_lightning(module)
    assert torch_private.was_compiled_by_lightning(from_compiled(torch.compile(module)))


@OWN_DEPRECATION
def test_the_compiler_takes_an_edited_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else blocks are compiled without their fused attention, or not at all."""
    import torch._inductor.compile_fx as inductor

    monkeypatch.setattr(inductor, "compile_fx", lambda graph, inputs, config_patches: (graph, config_patches))
    graph = torch.fx.symbolic_trace(nn.ReLU())
    assert torch_private.compile_with_inductor(graph, [], {"debug": False}) == (graph, {"debug": False})
