"""Which saved tensors are packed, and what that frees."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_accel.memory.packer import ALIVE, STRANGE, Packer
from lightning_accel.memory.packing_budget import DENSE, TRIALS
from support.packing_steps import BITS, BYTES, SIZE, Allocations, held_bytes, patient, sparse, step

pytestmark = pytest.mark.numbers

# -- what is kept ------------------------------------------------------------------------------------------------------


def test_a_sparse_tensor_is_kept_packed_and_its_memory_is_free() -> None:
    x, w = sparse(density=0.05), torch.randn(SIZE, requires_grad=True)

    def forward(packer: Packer | None) -> Tensor:
        with step(packer) if packer else nullcontext():
            return ((x * 2) * w).sum()

    packer = patient()
    forward(packer)  # the first time makes small tensors that stay
    freed = held_bytes(lambda: forward(None)) - held_bytes(lambda: forward(packer))
    assert freed > 0.8 * BYTES
    assert packer.report().before_bytes - packer.report().after_bytes == pytest.approx(freed, abs=1000)


RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": F.relu,
    "torch": torch.relu,
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "method in place": lambda x: x.relu_(),
}


@pytest.mark.parametrize("relu", RELUS.values(), ids=RELUS)
def test_of_its_own_result_a_relu_keeps_one_bit(relu: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    with step(packer):
        loss = relu(x + 0).sum()
    report = packer.report()
    assert (report.before_bytes, report.after_bytes, report.packed) == (BYTES, BITS, 1)
    loss.backward()
    assert torch.equal(x.grad, (x > 0).float())


@pytest.mark.parametrize("relu", RELUS.values(), ids=RELUS)
def test_whoever_else_saves_the_result_of_a_relu_gets_its_values(relu: Callable[[Tensor], Tensor]) -> None:
    x, w = torch.randn(SIZE, requires_grad=True), torch.randn(SIZE, requires_grad=True)
    packer = patient()
    with step(packer):
        loss = (relu(x + 0) * w).sum()
    loss.backward()
    assert torch.equal(w.grad, x.detach().relu())
    assert torch.equal(x.grad, w.detach() * (x > 0))
    values = int((x > 0).sum())
    # The bits are kept once for both, and w itself, a leaf that the caller holds, is dense.
    assert packer.report().after_bytes == BITS + 4 * values
    assert packer.report().packed == 1


def test_a_relu_that_ran_before_the_step_is_not_taken_for_one_that_saves_itself() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    w = torch.randn(SIZE, requires_grad=True)
    y = x.relu()
    with step(patient()):
        loss = (y * w).sum()
    loss.backward()
    assert torch.equal(w.grad, y)


def test_a_relu_whose_graph_is_gone_is_not_taken_for_one_that_saves_itself() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    w = torch.randn(SIZE, requires_grad=True)
    y = x.relu()
    y.sum().backward()
    with step(patient()):
        loss = checkpoint(torch.mul, y, w, use_reentrant=False).sum()
    (grad,) = torch.autograd.grad(loss, w)
    assert torch.equal(grad, y)


@pytest.mark.parametrize("consumer", ["product", "checkpoint"])
def test_a_checkpointed_block_that_ends_in_a_relu_is_not_recomputed_to_ask_about_it(consumer: str) -> None:
    calls = []
    x = torch.randn(SIZE, requires_grad=True)
    w = torch.randn(SIZE, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        calls.append(1)
        return (2 * x).relu()

    with step(patient()):
        y = checkpoint(block, x, use_reentrant=False)
        loss = (y * w if consumer == "product" else checkpoint(torch.mul, y, w, use_reentrant=False)).sum()
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2
    assert torch.equal(w.grad, (2 * x).relu())
    assert torch.equal(x.grad, 2 * w.detach() * (x > 0))


def test_gradients_at_nan_and_negative_zero_are_torchs() -> None:
    x = torch.randn(SIZE)
    x[0, :5] = torch.tensor([float("nan"), -0.0, float("-inf"), float("inf"), -float("nan")])
    grads = []
    for packer in (None, patient()):
        leaf = x.clone().requires_grad_()
        with step(packer) if packer else nullcontext():
            loss = leaf.relu().sum()
        loss.backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])


def test_dropout_on_a_cpu_keeps_one_bit_of_its_noise() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    with step(packer):
        y = F.dropout(x, 0.3)
    assert packer.report().after_bytes == BITS
    y.sum().backward()
    assert torch.equal(x.grad * x, y)


def test_masks_keep_one_bit() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    packer = Packer(min_bytes=1024, max_time_share=float("inf"))
    with step(packer):
        y = x.masked_fill(torch.rand(SIZE) < 0.5, 0.0)
    assert packer.report().before_bytes == 64 * 1024
    assert packer.report().after_bytes == BITS
    y.sum().backward()
    assert torch.equal(x.grad, (y != 0).float())


def test_a_noise_that_changes_its_value_is_still_exact() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    for p in (0.3, 0.5, 0.5, 0.5):
        with step(packer):
            y = F.dropout(x, p)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad * x, y)


def test_a_tensor_saved_three_times_is_packed_once_and_unpacked_once() -> None:
    x = sparse()
    layers = nn.ModuleList(nn.Linear(1024, 4) for _ in range(3))
    packer = patient()
    with step(packer, layers):
        hidden = x * 2
        loss = sum(layer(hidden).sum() for layer in layers)
        del hidden
    assert packer.report().packed == 1
    for _ in range(2):
        with Allocations() as made:
            loss.backward(retain_graph=True)
        assert made.count == 1


def test_small_dense_and_strange_tensors_are_left_alone() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    with step(packer):
        torch.exp(x)  # dense
        x[:1].relu()  # small
        x[:, ::2] * sparse()[:, ::2]  # with gaps
    assert packer.report().left_alone == {DENSE: 1, STRANGE: 1}
    assert packer.report().packed == 0


def test_parameters_are_left_alone() -> None:
    layer = nn.Linear(1024, 64)
    with torch.no_grad():
        layer.weight.zero_()
    packer = patient()
    x = torch.randn(4, 1024, requires_grad=True)
    with step(packer, layer):
        layer(x)
    assert packer.report().packed == 0


# -- memory that is not freed ------------------------------------------------------------------------------------------


def test_what_the_model_itself_holds_is_left_alone_from_the_second_step() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    kept = []
    for _ in range(2):
        with step(packer):
            y = x.relu()
            kept.append(y)
            loss = (y * 2).sum()
            del y
        loss.backward()
    report = packer.report()
    assert report.packed == 0
    assert report.left_alone == {ALIVE: 1}
    with step(packer), Allocations() as made:
        loss = x.relu().sum()
    loss.backward()
    assert made.count == 0


def test_a_relu_whose_result_another_layer_keeps_whole_is_left_alone() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    w = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    for _ in range(2):
        with step(packer):
            y = x.relu()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                loss = (y * w).sum()
            del y
        loss.backward()
    assert packer.report().left_alone == {ALIVE: 1}
    assert packer.report().packed == 0


def test_a_backward_pass_within_the_step_does_not_make_everything_look_free() -> None:
    x = torch.randn(SIZE, requires_grad=True)
    packer = patient()
    with step(packer):
        y = x.relu()
        y.sum().backward()
        del y
    assert packer.report().left_alone == {ALIVE: 1}


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_on_a_gpu_are_a_plain_runs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1024, 1024), nn.ReLU())
    plain.to("cuda", dtype)
    model = copy.deepcopy(plain)
    x = torch.randn(SIZE, device="cuda", dtype=dtype)
    packer = patient()
    for _ in range(TRIALS + 2):
        for net, using in ((plain, None), (model, packer)):
            torch.manual_seed(1)
            net.zero_grad()
            with step(using, net) if using else nullcontext():
                loss = net(x).square().sum()
            loss.backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert packer.report().packed >= 3


@pytest.mark.gpu
def test_packing_frees_memory_on_a_gpu() -> None:
    x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
    held = []
    for packer in (None, patient()):
        before = torch.cuda.memory_allocated()
        with step(packer) if packer else nullcontext():
            loss = (x + 0).relu().sum()
        held.append(torch.cuda.memory_allocated() - before)
        del loss
    assert held[1] < 0.1 * held[0]


@pytest.mark.gpu
def test_nothing_is_packed_while_a_graph_is_captured() -> None:
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    packer = patient()
    graph = torch.cuda.CUDAGraph()
    torch.autograd.grad(x.relu().sum(), x)
    with torch.cuda.graph(graph), step(packer):
        (grad,) = torch.autograd.grad(x.relu().sum(), x)
    graph.replay()
    assert packer.report().packed == 0
    assert torch.equal(grad, (x > 0).float())
