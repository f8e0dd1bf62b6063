"""However a step or a run with offloading ends, nothing is left behind, and the next one starts anew."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from lightning_accel.memory.buffers import OffloadingError
from lightning_accel.memory.offload import Offloader, Offloading
from lightning_accel.memory.saved_tensors import saving
from support.memory.limits import limited, resource
from support.memory.offloaders import CPU, NO_MODEL, PLACES, Make, copying_threads, make, one_core, wave
from support.models import TASKS

pytestmark = pytest.mark.numbers

__all__ = ["make", "one_core"]

MIB = 1 << 20


class Exploding(torch.autograd.Function):
    """Raises in the pass that it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, when: str) -> Tensor:
        if when == "forward":
            raise ArithmeticError("in the middle")
        ctx.when = when
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.when == "backward":
            raise ArithmeticError("in the middle")
        return gradient, None


def step_with(offloader: Offloader, when: str) -> Tensor:
    x = torch.arange(1000.0, requires_grad=True)
    with saving(offloader, NO_MODEL):
        y = wave(Exploding.apply(wave(x), when)).sum()
    if when != "never":
        y.backward()
    return x


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("when", ["forward", "backward", "never"])
def test_a_step_that_does_not_come_to_its_end_leaves_nothing(when: str, to: str, make: Make) -> None:
    offloader = make(to)
    with nullcontext() if when == "never" else pytest.raises(ArithmeticError):
        step_with(offloader, when)
    gc.collect()
    assert offloader.stats.live_bytes == 0
    x = step_with(offloader, "not at all")
    plain = x.detach().clone().requires_grad_()
    wave(wave(plain)).sum().backward()
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.medium
@pytest.mark.parametrize("to", PLACES)
def test_nothing_grows_in_sixty_steps(to: str, make: Make) -> None:
    offloader, task = make(to), TASKS["transformer"]
    model, process = task.model(), psutil.Process()

    def steps(count: int) -> tuple[int, int, int, int]:
        for step in range(count):
            inputs, targets = task.batch(step % 3)
            with saving(offloader, model):
                loss = task.loss(model(inputs), targets)
            loss.backward()
        del loss
        stats = offloader.stats
        known = len(offloader._known) + len(offloader._live)
        return stats.live_bytes, stats.total_bytes, known, process.num_fds() + process.num_threads()

    before = steps(5)
    resident, moved_bytes = process.memory_info().rss, offloader.stats.bytes_out
    # Other tests' threads and files may end meanwhile.
    assert all(now <= then for now, then in zip(steps(60), before, strict=True))
    assert before[0] == 0
    assert before[2] < 20  # what is known dies with its storage: no more than the batch and what is just on its way
    # Less than if half of what left the device had stayed in the process.
    assert process.memory_info().rss - resident < (offloader.stats.bytes_out - moved_bytes) / 2


def test_closing_twice_is_closing_once(make: Make) -> None:
    offloader = make("disk")
    offloader.pack(torch.ones(1000))
    assert copying_threads()
    offloader.close()
    offloader.close()
    assert not copying_threads()
    assert offloader.stats.total_bytes == 0
    assert offloader.pack(torch.ones(1000)) is None  # a copy of the model, say, that outlives the run


@pytest.mark.parametrize("to", PLACES)
def test_a_backward_pass_after_closing_says_what_is_missing(to: str, make: Make) -> None:
    offloader = make(to)
    x = torch.randn(1000, requires_grad=True)
    with saving(offloader, NO_MODEL):
        y = wave(x).sum()
    offloader.close()
    with pytest.raises(OffloadingError, match=r"offloaded, and are gone.*before undo\(\)"):
        y.backward()


def test_nothing_is_made_before_it_is_needed(make: Make) -> None:
    offloader = make("disk", min_bytes=1 << 20)
    x = torch.randn(1000, requires_grad=True)
    with saving(offloader, NO_MODEL):
        wave(x).sum().backward()
    assert not copying_threads()
    assert offloader.stats.total_bytes == 0


@pytest.mark.medium
def test_a_forgotten_offloader_takes_its_thread_with_it(tmp_path: Path) -> None:
    offloader = Offloader(CPU, Offloading("disk", min_bytes=1, folder=str(tmp_path)))
    offloader.pack(torch.ones(1000))
    threads = copying_threads()
    del offloader
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
    assert not copying_threads()


def test_a_full_disk_ends_the_step_and_the_next_one_starts_anew(make: Make, tmp_path: Path) -> None:
    offloader, task = make("disk"), TASKS["transformer"]
    model = task.model().eval()
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = task.batch()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with saving(offloader, model):
            loss = task.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step(model, optimizer)
    offloader.close()
    offloader = make("disk")
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.Adam(twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    with limited(resource.RLIMIT_FSIZE, 64 << 10), pytest.raises(OffloadingError, match="'disk' needs") as raised:
        step(model, optimizer)
    # Everything is released at once, though the exception still holds the graph of that step.
    assert offloader.stats.live_bytes == offloader.stats.total_bytes == 0
    assert not copying_threads()
    assert raised.value is not None
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)

    step(model, optimizer)
    step(twin, twin_optimizer)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="needs a limit on memory")
def test_where_host_memory_runs_out_tensors_stay_on_the_device(make: Make) -> None:
    offloader = make()
    large = torch.empty(256 * MIB)  # more than earlier tests may have left free in the heap
    assert offloader.pack(torch.ones(1000)) is not None
    with limited(resource.RLIMIT_AS, psutil.Process().memory_info().vms + 16 * MIB):
        assert offloader.pack(large) is None
    assert offloader.pack(large) is None  # it is not asked for again at every tensor
    assert len(offloader.complaints) == 1
    assert "stay on the device" in offloader.complaints[0]
