"""Saved tensors are caught in one place, whoever wants them: in order, never the model's own, and guarded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accel.core.tree import storage_of, unique_bytes
from lightning_accel.memory.saved_tensors import OwnTensors, saving, shares_counter, sparing

pytestmark = pytest.mark.numbers


class Doubled:
    """What :class:`Halving` keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def unpack(self) -> Tensor:
        return self.tensor * 2


class Halving:
    """A saver that keeps half of every tensor's values, and remembers what it was offered."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.offered: list[tuple[int, ...]] = []

    def pack(self, tensor: Tensor) -> Doubled | None:
        self.offered.append(tuple(tensor.shape))
        return Doubled(tensor.detach() / 2) if self.takes else None


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 2))


X = (3, 6)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def test_a_saver_is_offered_what_is_saved_and_gives_it_back(model: nn.Module) -> None:
    x = torch.randn(X)
    expected = gradients(model, x)
    saver = Halving()
    with saving(saver, model):
        found = gradients(model, x)
    assert saver.offered == [X, (3, 4), (3, 4), (3, 2)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)  # halving and doubling are exact


def test_the_outer_saver_is_asked_first_and_the_inner_one_gets_the_rest(model: nn.Module) -> None:
    outer, inner = Halving(takes=False), Halving()
    with saving(outer, model), saving(inner, model):
        gradients(model, torch.randn(X))
    assert outer.offered == inner.offered
    outer, inner = Halving(), Halving()
    with saving(outer, model), saving(inner, model):
        gradients(model, torch.randn(X))
    assert inner.offered == []


def test_one_saver_can_be_spared_in_between(model: nn.Module) -> None:
    spared, other = Halving(), Halving(takes=False)
    with saving(other, model), saving(spared, model):
        with sparing(spared):
            gradients(model, torch.randn(X))
        assert spared.offered == []
        assert len(other.offered) == 4
        gradients(model, torch.randn(X))
    assert len(spared.offered) == 4


def test_sparing_one_that_nobody_asks_is_no_matter(model: nn.Module) -> None:
    with sparing(Halving()):
        gradients(model, torch.randn(X))


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_their_views_and_their_autocast_copies_are_not_offered(frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    model[1].requires_grad_(not frozen)
    saver = Halving(takes=False)
    with saving(saver, model), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        model(torch.randn(7, 6)).float().sum().backward()
    assert not {(6, 5), (5, 6), (5, 4), (4, 5)} & set(saver.offered)
    assert (7, 6) in saver.offered


def test_buffers_are_the_models_own() -> None:
    norm = nn.BatchNorm1d(4).eval()
    own = OwnTensors(norm)
    assert norm.running_mean in own
    assert norm.weight.view(2, 2) in own
    assert torch.randn(4) not in own


def test_a_tensor_changed_in_place_after_it_was_saved_is_an_error_as_without_savers() -> None:
    x = torch.randn(3, requires_grad=True)
    for saver in (Halving(), Halving(takes=False)):
        with saving(saver, nn.Identity()):
            y = x.exp()
            y.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_a_graph_and_what_it_saved_do_not_keep_each_other_alive() -> None:
    with saving(Halving(takes=False), nn.Identity()):
        y = torch.randn(3, requires_grad=True).exp().relu()
        storage = weakref.ref(y.untyped_storage())
    gc.disable()
    try:
        del y
        assert storage() is None
    finally:
        gc.enable()


def test_an_exception_inside_leaves_no_hooks(model: nn.Module) -> None:
    saver = Halving()

    def crash() -> None:
        with saving(saver, model):
            raise KeyError("user's bug")

    with pytest.raises(KeyError):
        crash()
    gradients(model, torch.randn(X))
    assert saver.offered == []


def test_it_goes_together_with_checkpointing(model: nn.Module) -> None:
    """Inside, checkpoint() saves nothing but its arguments, which are offered as any other tensor."""
    x = torch.randn(X, requires_grad=True)
    expected = gradients(model, x)
    saver = Halving()
    with saving(saver, model):
        loss = checkpoint(model, x * 1, use_reentrant=False).square().sum()
    torch.testing.assert_close(list(torch.autograd.grad(loss, list(model.parameters()))), expected, rtol=0, atol=0)
    # In torch 2.11 checkpoint() saves an empty one, too.
    assert [shape for shape in saver.offered if 0 not in shape] == [X, (3, 2)]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_parts_are_caught_too(fresh_dynamo: None) -> None:
    """Where Dynamo gives a frame up and runs it eagerly, it looks at hooks as at any function that is called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.GELU()), nn.Linear(4, 2))
    x = torch.randn(X)
    expected = gradients(model, x)
    model[0].compile(backend="aot_eager")
    saver = Halving()
    with saving(saver, model):
        found = gradients(model, x)
    torch.testing.assert_close(found, expected)
    assert saver.offered


def test_a_storage_is_one_object_for_all_its_tensors_and_dies_with_them() -> None:
    """What is noted by storage rests on it: who holds what, what was packed already."""
    noted: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
    tensor = torch.randn(4)
    noted[tensor.untyped_storage()] = "kept"
    assert noted.get(tensor[2:].untyped_storage()) == "kept"
    assert torch.randn(4).untyped_storage() not in noted
    view = tensor.view(2, 2)
    del tensor
    assert noted.get(view.untyped_storage()) == "kept"
    del view
    assert len(noted) == 0


def test_what_has_no_storage_has_none() -> None:
    sparse, lazy = torch.eye(3).to_sparse(), nn.LazyLinear(3).weight
    assert storage_of(sparse) is None
    assert storage_of(lazy) is None
    found = []
    torch.func.vmap(lambda x: found.append(storage_of(x)) or x)(torch.ones(2, 3))  # type: ignore[func-returns-value]
    assert found == [None]


def test_bytes_are_counted_once_a_storage() -> None:
    tensor = torch.zeros(10)
    assert unique_bytes([tensor, tensor[:2], tensor.view(2, 5), torch.zeros(1)]) == 44


@pytest.mark.parametrize("transform", ["grad", "vjp", "vmap", "jacrev"])
def test_transforms_of_torch_func_work_inside(transform: str) -> None:
    """Left alone, they refuse to run where saved tensors are caught; what they save for themselves is not caught."""
    weight = torch.randn(4, 4, requires_grad=True)

    def energy(x: Tensor) -> Tensor:
        return (x @ weight).sin().sum()

    def forward(x: Tensor) -> Tensor:
        if transform == "vmap":
            return torch.func.vmap(energy)(x).sum()
        if transform == "vjp":
            return torch.func.vjp(energy, x)[1](torch.ones(()))[0].square().sum()
        return getattr(torch.func, transform)(energy)(x).square().sum()

    x = torch.randn(3, 4)
    (expected,) = torch.autograd.grad(forward(x), weight)
    saver = Halving()
    with saving(saver, nn.Identity()):
        inside = forward(x * 2.0)
        found = forward(x)
        weight.exp()
    assert torch.equal(torch.autograd.grad(found, weight)[0], expected)
    assert (4, 4) in saver.offered
    assert inside.requires_grad


def test_a_user_who_forbids_hooks_is_heeded() -> None:
    forbidden = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with forbidden, pytest.raises(RuntimeError, match="not here"), saving(Halving(), nn.Identity()):
        pass


def test_lazy_parameters_are_nobodys_yet() -> None:
    assert torch.randn(3) not in OwnTensors(nn.LazyLinear(4))
    assert unique_bytes(nn.LazyLinear(4).parameters()) == 0


def test_views_share_a_counter_and_cut_pieces_do_not() -> None:
    whole = torch.zeros(6)
    first, second = whole.unsafe_chunk(2)
    assert shares_counter(whole, whole.view(2, 3))
    assert shares_counter(whole, whole.detach())
    assert not shares_counter(first, second)
    assert whole._version == 0
