"""Tensors know their device, and operations refuse to mix devices."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.memory.movers import ThreadMover
from lightning_accel.techniques.grad_scaler import CountingGradScaler
from simulated_cuda import faults

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.numbers]


def test_tensors_are_plain_tensors_of_a_cuda_device() -> None:
    tensor = torch.arange(4.0, device="cuda")
    assert type(tensor) is Tensor
    assert tensor.is_cuda
    assert tensor.device == torch.device("cuda", 0)
    assert torch.equal((tensor * 2).cpu(), torch.arange(4.0) * 2)


def test_a_tensor_of_the_host_in_an_operation_of_the_device_raises() -> None:
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, cuda:0 and cpu"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).device.type == "cuda", "a single number may be the host's"


def test_a_host_tensor_is_not_indexed_by_the_devices() -> None:
    with pytest.raises(RuntimeError, match="same device as the indexed tensor"):
        torch.ones(3)[torch.tensor([1], device="cuda")]


@pytest.mark.usefixtures("two_devices")
def test_two_devices_do_not_mix_but_copy() -> None:
    one, other = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        one + other
    assert (one.to("cuda:1") + other).device.index == 1


@pytest.mark.usefixtures("two_devices")
def test_every_thread_has_its_current_device_and_stream() -> None:
    stream = torch.cuda.Stream(1)
    seen: list[tuple[int, bool]] = []
    with torch.cuda.stream(stream):
        assert torch.cuda.current_device() == 1
        assert torch.ones(1, device="cuda").device.index == 1
        look = lambda: seen.append((torch.cuda.current_device(), torch.cuda.current_stream(1) == stream))  # noqa: E731
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    assert seen == [(0, False), (1, True)]
    assert torch.cuda.current_device() == 0


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.cuda.set_device(1)


@pytest.mark.usefixtures("two_devices")
def test_autograd_goes_back_on_a_thread_of_each_device_and_on_the_stream_of_the_forward_pass() -> None:
    threads: dict[int, int] = {}
    streams: list[object] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            threads[torch.cuda.current_device()] = threading.get_ident()
            streams.append(torch.cuda.current_stream(gradient.device))
            return gradient

    x = torch.ones(2, device="cuda:0", requires_grad=True)
    stream = torch.cuda.Stream(0)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = Look.apply(x)
    torch.cuda.current_stream().wait_stream(stream)
    Look.apply(y.to("cuda:1")).sum().backward()
    assert set(threads) == {0, 1}
    assert len({*threads.values(), threading.get_ident()}) == 3
    assert streams[1] == stream
    assert x.grad is not None
    assert x.grad.device.index == 0


def test_autocast_of_the_device_is_its_own() -> None:
    layer = nn.Linear(3, 3).cuda()
    with torch.autocast("cuda", torch.float16):
        assert layer(torch.ones(2, 3, device="cuda")).dtype == torch.float16
        assert nn.Linear(3, 3)(torch.ones(2, 3)).dtype == torch.float32


def test_tensors_are_copied_and_saved_with_their_device() -> None:
    layer = nn.Linear(3, 3).cuda()
    assert all(p.is_cuda and type(p) is nn.Parameter for p in copy.deepcopy(layer).parameters())
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    for place in ("cpu", "cuda"):
        file.seek(0)
        loaded = torch.load(file, map_location=None if place == "cuda" else place)
        assert {value.device.type for value in loaded.values()} == {place}
        assert torch.equal(loaded["weight"].cpu(), layer.weight.detach().cpu())


def test_a_class_of_a_programs_own_is_the_hosts_on_the_host() -> None:
    class Named(Tensor):
        pass

    assert torch.ones(2).as_subclass(Named).tolist() == [1.0, 1.0]
    on_device = torch.ones(2, device="cuda").as_subclass(Named) + 1
    assert type(on_device) is Named
    assert on_device.is_cuda


def test_numpy_sees_no_memory_of_the_device() -> None:
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        torch.ones(2, device="cuda").numpy()
    assert faults.taken() == []


@pytest.mark.usefixtures("two_devices")
def test_the_thread_that_offloads_is_on_the_gpu_of_its_mover() -> None:
    """A thread begins on the first GPU. To leave a stream there would make a context on it."""
    mover = ThreadMover(torch.device("cuda", 1))
    assert mover._thread.submit(torch.cuda.current_device).result() == 1
    mover.close()


@pytest.mark.usefixtures("two_devices")
def test_gradients_that_wait_on_another_device_follow_a_change_of_the_scale() -> None:
    a, b = (nn.Parameter(torch.ones(1, device=f"cuda:{index}")) for index in range(2))
    scaler = CountingGradScaler("cuda", init_scale=8.0, growth_interval=1)
    first, second = (torch.optim.SGD([parameter], lr=1.0) for parameter in (a, b))
    scaler.watch([first, second])
    scaler.scale(a.sum()).backward()
    scaler.scale(b.sum().to(a.device)).backward()
    scaler.step(first)
    scaler.update()
    assert b.grad is not None
    assert b.grad.item() == scaler.get_scale() == 16.0
