"""Captures on a GPU, and what is around them: other threads, graphs of before, and what a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.techniques.cuda_capture import capture_on_cuda

pytestmark = pytest.mark.gpu


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda()


def function_of(module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
    names = [name for name, _ in module.named_parameters()]
    result: Tensor = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), x)
    return result


def check_replays(module: nn.Module) -> None:
    """Captures it, and compares results and gradients of a replay with what the module computes."""
    parameters = tuple(module.parameters())
    given = torch.randn(8, 64, device="cuda", requires_grad=True)
    replay = capture_on_cuda(lambda *all_of: function_of(module, *all_of), (given, *parameters))
    for _ in range(3):
        x = torch.randn(8, 64, device="cuda", requires_grad=True)
        expected = torch.autograd.grad(module(x).square().sum(), (x, *parameters))
        found = torch.autograd.grad(replay(x, *parameters).square().sum(), (x, *parameters))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def fail_to_capture() -> None:
    given = torch.ones(8, 64, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture_on_cuda(lambda x: x * x.sum().item(), (given,))


@contextmanager
def busy_thread() -> Iterator[list[BaseException]]:
    """Another thread does what is unsafe while a stream of its own captures: pins memory, copies, asks for events."""
    failures: list[BaseException] = []
    is_over = threading.Event()

    def work() -> None:
        stream = torch.cuda.Stream()
        size = 1
        try:
            while not is_over.is_set():
                size = size % 64 + 1
                with torch.cuda.stream(stream):
                    copied = torch.empty(size << 16).pin_memory().to("cuda", non_blocking=True)
                    event = stream.record_event()
                event.query()
                event.synchronize()
                del copied
                torch.cuda.empty_cache()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield failures
    finally:
        is_over.set()
        thread.join()


def test_a_replay_computes_what_the_function_computes() -> None:
    check_replays(block())


def test_all_captures_are_on_one_stream_so_that_cublas_keeps_workspaces_for_one() -> None:
    streams = set()

    def noting(x: Tensor) -> Tensor:
        streams.add(torch.cuda.current_stream())
        return x * 2

    for _ in range(3):
        capture_on_cuda(noting, (torch.ones(8, device="cuda", requires_grad=True),))
    assert len(streams) == 1
    assert torch.cuda.default_stream() not in streams


def test_what_another_thread_does_meanwhile_ends_neither() -> None:
    with busy_thread() as failures:
        for _ in range(10):
            check_replays(block())
    assert failures == []


def test_a_graph_of_the_run_that_is_still_alive_does_not_end_the_capture() -> None:
    module = block()
    alive = module(torch.randn(8, 64, device="cuda")).sum()
    check_replays(module)
    alive.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_parameters_keep_no_node_of_the_captured_pass() -> None:
    module = block()
    check_replays(module)
    loss = module(torch.randn(8, 64, device="cuda")).sum()
    loss.backward()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_after_a_failure_random_numbers_memory_and_stream_are_as_before() -> None:
    fail_to_capture()  # the first makes workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    fail_to_capture()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.memory_allocated() == before[0]
    drawn = torch.rand(1000, device="cuda")
    torch.cuda.set_rng_state(before[1])
    assert torch.equal(drawn, torch.rand(1000, device="cuda"))
    for _ in range(100):
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() <= before[0] + (1 << 20)


def test_after_a_failure_the_next_one_can_be_captured() -> None:
    fail_to_capture()
    check_replays(block())
