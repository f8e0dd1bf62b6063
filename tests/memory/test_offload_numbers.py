"""Offloaded tensors come back as they were: runs, gradients and single tensors, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.memory.offload import Offloader
from lightning_accel.memory.saved_tensors import saving
from support.memory.offloaders import NO_MODEL, PLACES, Make, make, one_core, packed_away, wave
from support.models import TASKS, Task

pytestmark = pytest.mark.numbers

__all__ = ["make", "one_core"]


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_training_ends_with_the_very_same_weights(task: Task, to: str, make: Make) -> None:
    def trained(offloader: Offloader | None) -> dict[str, Tensor]:
        model = task.model()
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(3)
        for step in range(4):
            inputs, targets = task.batch(step)
            with saving(offloader, model) if offloader else nullcontext():
                loss = task.loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return model.state_dict()

    offloader = make(to)
    torch.testing.assert_close(trained(offloader), trained(None), rtol=0, atol=0)
    assert offloader.stats.bytes_in > 0


TENSORS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.randn(30, 40),
    "bfloat16 with NaN": lambda: torch.randn(30, 40).log().bfloat16(),
    "float16": lambda: torch.randn(30, 40).half(),
    "float64": lambda: torch.randn(30, 40, dtype=torch.float64),
    "complex64": lambda: torch.randn(30, 40, dtype=torch.complex64),
    "bool": lambda: torch.randn(30, 40) > 0,
    "int64": lambda: torch.randint(-9, 9, (30, 40)),
    "float8": lambda: torch.randn(30, 40).to(torch.float8_e4m3fn),
    "a scalar": lambda: torch.tensor(3.5),
    "transposed": lambda: torch.randn(30, 40).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(30, 40)[::2, 1:30:3],
    "expanded": lambda: torch.randn(30, 1).expand(30, 40),
    "most of a storage": lambda: torch.randn(30, 40)[5:],
    "little of a storage": lambda: torch.randn(300, 40)[17:23],
    "the end of a storage": lambda: torch.randn(30_001)[-1:],
    "little of it, with gaps, in another order": lambda: torch.randn(300, 4, 10)[101:107, ::2].permute(2, 0, 1),
    "queries of an attention": lambda: torch.randn(4, 6, 48).chunk(3, dim=-1)[1].unflatten(-1, (2, 8)).transpose(1, 2),
}


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("tensor_of", TENSORS.values(), ids=TENSORS)
def test_every_tensor_comes_back_to_the_bit(tensor_of: Callable[[], Tensor], to: str, make: Make) -> None:
    torch.manual_seed(0)
    expected = tensor_of()
    torch.manual_seed(0)
    offloader = make(to)
    packed = packed_away(offloader, tensor_of)
    for _ in range(2):
        found = packed.unpack()
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
        raw = [t.contiguous().view(torch.uint8 if t.dim() else t.dtype) for t in (found, expected)]
        assert torch.equal(*raw)
    assert offloader.stats.bytes_in > 0


def test_what_the_forward_pass_goes_on_using_is_untouched(make: Make) -> None:
    x = torch.randn(1000, requires_grad=True)
    with saving(make(), NO_MODEL):
        h = x * 2
        first = wave(h)
        assert torch.equal(h, x * 2)
        (first * h).sum().backward()
    plain = x.detach().clone().requires_grad_()
    (wave(plain * 2) * (plain * 2)).sum().backward()
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("depth", [1, 8])
def test_branches_may_be_walked_in_the_order_in_which_they_were_built(depth: int, make: Make) -> None:
    offloader = make()
    offloader.prefetch_depth = depth
    x = torch.randn(1000, requires_grad=True)
    with saving(offloader, NO_MODEL):
        branches = [wave(x * k) for k in range(1, 4)]
    found = [torch.autograd.grad(branch.sum(), x)[0] for branch in branches]
    expected = [torch.autograd.grad(wave(x * k).sum(), x)[0] for k in range(1, 4)]
    assert all(map(torch.equal, found, expected))
    assert offloader.stats.live_bytes == 0


@pytest.mark.parametrize("to", PLACES)
def test_a_graph_that_is_kept_can_be_walked_again(to: str, make: Make) -> None:
    x = torch.randn(1000, requires_grad=True)
    offloader = make(to)
    with saving(offloader, NO_MODEL):
        y = wave(x).sum()
    found = [torch.autograd.grad(y, x, retain_graph=again < 2)[0] for again in range(3)]
    assert torch.equal(found[0], torch.autograd.grad(wave(x).sum(), x)[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert offloader.stats.live_bytes == 0


def test_second_derivatives_pass_through(make: Make) -> None:
    def twice(x: Tensor, offloader: Offloader | None) -> Tensor:
        with saving(offloader, NO_MODEL) if offloader else nullcontext():
            y = wave(x, 3).sum()
        with saving(offloader, NO_MODEL) if offloader else nullcontext():
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    x = torch.randn(1000, requires_grad=True)
    assert torch.equal(twice(x, make()), twice(x, None))


def test_an_activation_that_was_overwritten_is_an_error_as_ever(make: Make) -> None:
    x = torch.randn(1000, requires_grad=True)
    with saving(make(), NO_MODEL):
        h = x * 2
        y = h.sin()
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- pieces of one storage -----------------------------------------------------------------------------------------


def test_pieces_that_count_their_changes_apart_are_told_apart(make: Make) -> None:
    """Both are saved at version 2, the second one after it was changed: as recurrent layers on a CPU do it."""
    x, weight = torch.randn(3, 3000, requires_grad=True), torch.randn(3, 1000)

    def loss() -> Tensor:
        a, b, _ = (x * 1.0).unsafe_chunk(3, 1)
        a = a.add_(weight).sigmoid_()
        total = (a * weight).sum()
        b = b.add_(weight).sigmoid_()
        return (a * b).sum() + total

    (expected,) = torch.autograd.grad(loss(), x)
    offloader = make("host")
    with saving(offloader, nn.Identity()):
        found = loss()
        offloader.drain()
    assert torch.equal(torch.autograd.grad(found, x)[0], expected)


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_get_the_very_same_gradients(kind: type[nn.Module], to: str, make: Make) -> None:
    torch.manual_seed(0)
    layer, x = kind(16, 32, batch_first=True), torch.randn(8, 12, 16, requires_grad=True)
    wanted = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x)[0].square().sum(), wanted)
    offloader = make(to)
    for _ in range(3):
        with saving(offloader, layer):
            loss = layer(x)[0].square().sum()
        for found, want in zip(torch.autograd.grad(loss, wanted), expected, strict=True):
            assert torch.equal(found, want)


def test_a_zero_without_memory_stays(make: Make) -> None:
    zero, weight = torch._efficientzerotensor((64, 64)), torch.randn(64, 64, requires_grad=True)
    with saving(make("host"), nn.Identity()):
        loss = (weight * zero).sum() + weight.sum()
    assert torch.equal(torch.autograd.grad(loss, weight)[0], torch.ones(64, 64))
