"""Offloading from a GPU: the same gradients, a lower peak, and no wait."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.memory.offload import Offloader
from lightning_accel.memory.saved_tensors import saving
from support.gpu_sizes import on_gpu
from support.memory.offloaders import NO_MODEL, PLACES, Make, make, one_core, wave

pytestmark = pytest.mark.numbers

__all__ = ["make", "one_core"]


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("depth", [1, 4])
def test_a_gpu_computes_the_very_same_gradients(to: str, depth: int, gpu: torch.device, make: Make) -> None:
    offloader = make(to, device=gpu)
    offloader.prefetch_depth = depth
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(12))).to(gpu)
    x = torch.randn(on_gpu(4096, simulated=256), 1024, device=gpu)
    expected = torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
    for _ in range(5):
        with saving(offloader, model):
            loss = model(x).square().mean()
        found = torch.autograd.grad(loss, [*model.parameters()])
        assert all(map(torch.equal, found, expected))
    assert offloader.stats.live_bytes == 0


@pytest.mark.gpu
def test_a_gpu_is_never_waited_for(gpu: torch.device, make: Make) -> None:
    offloader = make(device=gpu)
    x = torch.randn(1 << 20, device=gpu, requires_grad=True)
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # buffers are pinned in the first one
        try:
            with saving(offloader, NO_MODEL):
                y = wave(x).sum()
            y.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_peak_of_a_gpu_is_that_of_a_few_tensors(gpu: torch.device, make: Make) -> None:
    def peak(offloader: Offloader | None) -> int:
        x = torch.randn(on_gpu(16 << 20, simulated=1 << 20), device=gpu, requires_grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        with saving(offloader, NO_MODEL) if offloader else nullcontext():
            y = wave(x, 30).sum()
        y.backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - start

    offloader = make(device=gpu)
    offloader.prefetch_depth = 1
    assert peak(offloader) < 0.35 * peak(None)


@pytest.mark.gpu
def test_while_a_cuda_graph_is_recorded_nothing_moves_and_that_is_said_once(gpu: torch.device, make: Make) -> None:
    offloader = make(device=gpu)
    x = torch.randn(1 << 20, device=gpu, requires_grad=True)

    def step() -> Tensor:
        with saving(offloader, NO_MODEL):
            y = wave(x).sum()
        return torch.autograd.grad(y, x)[0]

    expected = step()
    torch.cuda.synchronize()
    moved, graph = offloader.stats.tensors_out, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert torch.equal(found, expected)
    assert offloader.stats.tensors_out == moved
    assert len(offloader.complaints) == 1
    assert "CUDA graph" in offloader.complaints[0]


@pytest.mark.gpu
def test_tensors_of_another_stream_are_safe(gpu: torch.device, make: Make) -> None:
    offloader = make(device=gpu)
    x = torch.randn(on_gpu(8 << 20, simulated=1 << 19), device=gpu, requires_grad=True)
    expected = torch.autograd.grad(wave(x, 20).sum(), x)[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            with saving(offloader, NO_MODEL):
                y = wave(x, 20).sum()
            assert torch.equal(torch.autograd.grad(y, x)[0], expected)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_tensors_of_the_host_stay_where_a_gpu_is_offloaded(gpu: torch.device, make: Make) -> None:
    assert make(device=gpu).pack(torch.ones(1000)) is None


@pytest.mark.gpu
def test_a_recorded_stream_does_not_wait_for_copies_that_run(gpu: torch.device, make: Make) -> None:
    offloader = make(device=gpu)
    x = torch.randn(1 << 20, device=gpu, requires_grad=True)
    counter = torch.zeros(1, device=gpu)
    with saving(offloader, NO_MODEL):
        y = wave(x).sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        offloader.settle()
        offloader.drain()
        counter.add_(1)
    graph.replay()
    assert counter.item() == 1
    y.backward()
