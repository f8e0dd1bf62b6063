"""A capture of a CUDA graph is spoiled by what spoils it on a real device, and by nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from simulated_cuda import captures

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.numbers]

MODES = ("global", "thread_local", "relaxed")


def on_another_thread(call: Callable[[], object]) -> list[BaseException]:
    """Calls it there; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def capture(work: Callable[[], object], mode: str = "global") -> torch.cuda.CUDAGraph:
    """Captures some work, and leaves the capture's stream whatever happens."""
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            work()
    finally:
        torch.cuda.set_stream(before)
    return graph


def unsafe_calls() -> dict[str, Callable[[], object]]:
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    return {
        "event.query": event.query,
        "event.synchronize": event.synchronize,
        "stream.query": stream.query,
        "stream.synchronize": stream.synchronize,
        "pinned memory": lambda: torch.empty(8, pin_memory=True),
        "cudaMalloc": lambda: torch.empty(2**23, device="cuda"),
        "item": lambda: torch.ones(1, device="cuda").item(),
    }


def test_work_is_done_at_replays_and_not_at_the_capture() -> None:
    x = torch.ones(3, device="cuda")
    results: list[torch.Tensor] = []

    def work() -> None:
        results.append(x * 3)
        x.add_(1)

    graph = capture(work)
    assert x.tolist() == [1.0] * 3, "a capture computes nothing"
    assert results[0].isnan().all().item()
    graph.replay()
    assert (x.tolist(), results[0].tolist()) == ([2.0] * 3, [3.0] * 3)
    graph.replay()
    assert (x.tolist(), results[0].tolist()) == ([3.0] * 3, [6.0] * 3)


def test_random_numbers_are_others_at_every_replay() -> None:
    drawn: list[torch.Tensor] = []
    graph = capture(lambda: drawn.append(torch.rand(8, device="cuda")))
    graph.replay()
    first = drawn[0].tolist()
    graph.replay()
    assert drawn[0].tolist() != first


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(unsafe_calls()))
def test_an_unsafe_call_of_another_thread_spoils_a_global_capture_only(name: str, mode: str) -> None:
    x = torch.ones(3, device="cuda")
    call, raised = unsafe_calls()[name], []
    work = lambda: (x * 2, raised.extend(on_another_thread(call)))  # noqa: E731
    if mode == "global":
        with pytest.raises(torch.AcceleratorError, match="previous error during capture"):
            capture(work, mode)
        assert raised
        assert "not permitted when stream is capturing" in str(raised[0])
    else:
        capture(work, mode).replay()
        assert raised == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["event.query", "stream.synchronize", "pinned memory"])
def test_an_unsafe_call_of_the_capturing_thread_spoils_all_but_a_relaxed_one(name: str, mode: str) -> None:
    call = unsafe_calls()[name]
    if mode == "relaxed":
        capture(call, mode)
    else:
        with pytest.raises(torch.AcceleratorError, match="previous error during capture"):
            capture(call, mode)


@pytest.mark.parametrize("mode", MODES)
def test_waiting_for_the_captured_work_spoils_it_in_every_mode(mode: str) -> None:
    x = torch.ones(3, device="cuda")
    for wait in (torch.cuda.synchronize, lambda: x.sum().item()):
        with pytest.raises(torch.AcceleratorError, match="previous error during capture"):
            capture(wait, mode)
        captures.forget_all()


def test_after_a_failed_end_the_stream_is_the_captures_and_its_pool_is_taken() -> None:
    before, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    with pytest.raises(torch.AcceleratorError), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
        torch.cuda.Event().query()
    assert torch.cuda.current_stream() != before, "as in torch 2.11: nobody leaves it"
    torch.cuda.set_stream(before)
    assert pool in captures.UNDERWAY
    with (
        pytest.raises(RuntimeError, match="already recording to mempool_id"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool),
    ):
        pass
    torch.cuda.set_stream(before)
    capture(lambda: torch.ones(1, device="cuda"))  # another pool's


def test_while_a_capture_is_believed_in_memory_of_several_streams_does_not_come_back() -> None:
    def use_elsewhere() -> None:
        x, stream = torch.zeros(2**10, device="cuda"), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x.add_(1)
        x.record_stream(stream)

    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.AcceleratorError):
        capture(lambda: torch.cuda.Event().query())
    use_elsewhere()
    assert torch.cuda.memory_allocated() == before + 2**12
    captures.forget_all()
    assert torch.ones(1, device="cuda").item() == 1
    assert torch.cuda.memory_allocated() == before


def test_a_capture_on_the_default_stream_is_refused() -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


@pytest.mark.parametrize("is_node_alive", [True, False])
def test_an_accumulation_node_of_the_default_stream_spoils_a_capture(is_node_alive: bool) -> None:
    """The node lives as long as a graph of autograd's holds it, and runs on the stream that it was made on."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    layer, x = nn.Linear(3, 3).cuda(), torch.ones(2, 3, device="cuda")
    outside = layer(x) if is_node_alive else None
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    work = lambda: layer(x).sum().backward()  # noqa: E731
    try:
        if is_node_alive:
            with pytest.raises(RuntimeError, match=r"legacy stream depend|previous error during capture"):
                capture(work)
        else:
            capture(work).replay()
            assert layer.bias.grad is not None
            assert layer.bias.grad.tolist() == [2.0] * 3
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
    del outside


def test_a_stream_that_joined_a_capture_has_to_be_waited_for() -> None:
    x, other = torch.ones(3, device="cuda"), torch.cuda.Stream()

    def fork(is_joined: bool) -> None:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            x * 2
        if is_joined:
            torch.cuda.current_stream().wait_stream(other)

    capture(lambda: fork(True))
    with pytest.raises(torch.AcceleratorError, match="unjoined"):
        capture(lambda: fork(False))


def test_captured_work_does_not_wait_for_what_was_not_captured() -> None:
    event = torch.cuda.Event()
    event.record()
    with pytest.raises(torch.AcceleratorError, match="previous error"):
        capture(lambda: event.wait())


def test_what_nobody_holds_leaves_no_memory_behind() -> None:
    x, kept = torch.ones(2**10, device="cuda"), []
    before = torch.cuda.memory_allocated()
    graph = capture(lambda: kept.append(((x + 1) * (x + 2)).sum()))
    graph.replay()
    assert kept[0].item() == 6 * 2**10
    assert torch.cuda.memory_allocated() - before == 512


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")  # torch keeps the nodes of its warm-up
def test_torch_captures_forward_and_backward_passes() -> None:
    x, layer = torch.randn(2, 3, device="cuda", requires_grad=True), nn.Linear(3, 3).cuda()
    plain = [*torch.autograd.grad(torch.tanh(layer(x)).sum(), [x, layer.weight])]
    graphed = torch.cuda.make_graphed_callables(
        nn.Sequential(layer, nn.Tanh()), (torch.zeros_like(x, requires_grad=True),)
    )
    for expected, got in zip(plain, torch.autograd.grad(graphed(x).sum(), [x, layer.weight]), strict=True):
        torch.testing.assert_close(got.cpu(), expected.cpu())
