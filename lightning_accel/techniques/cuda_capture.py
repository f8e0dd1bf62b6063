"""CUDA graphs of one function, forward and backward, captured so that the run around it goes on whatever happens.

:func:`torch.cuda.make_graphed_callables` does the like, in three ways that a training run cannot have:

* It captures in the mode ``"global"``: an unsafe call on any other thread, a loader's that pins memory say, invalidates
  the capture, and fails itself. Here only calls on the capturing thread count.
* It gives the function the parameters themselves. A graph of the run's that is alive holds the nodes that accumulate
  their gradients, with the stream that they were made on, and to walk through those ends the capture. Here the function
  is given parameters of its own, in the same memory.
* After a failure the thread stays on the stream of the capture, and the allocator takes every allocation for one of the
  graph's (https://github.com/pytorch/pytorch/pull/180395). Here both are put right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_accel.core.torch_private.cuda import end_failed_capture
from lightning_accel.core.tree import map_tensors, tensors_in

_WARM_UPS = 3  # of them the first chooses kernels, the second allocates workspaces


def capture_on_cuda(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Captures a function of tensors on one GPU, after passes that warm it up.

    Args:
        function: Returns tensors, in any structure; at least one of them has gradients.
        tensors: What it is captured with: inputs and parameters. The graph reads their memory, at any later call.

    Returns:
        A function of as many tensors. Its results, and the gradients of its backward pass, are in the graph's memory:
        the next call overwrites them. Tensors that are elsewhere than those captured with are copied there.

    Raises:
        RuntimeError: What the function does cannot be captured.
    """
    captured = _Captured(function, tensors)

    def replay(*now: Tensor) -> Any:
        outputs = iter(_Replay.apply(captured, *now))  # type: ignore[no-untyped-call]
        return map_tensors(lambda _: next(outputs), captured.results)

    return replay


class _Captured:
    """A forward and a backward graph, and the tensors that they read and write."""

    def __init__(self, function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> None:
        self._inputs = [_own(tensor) for tensor in tensors]
        self._wanted = [tensor for tensor in self._inputs if tensor.requires_grad]
        self._graphs = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        device = tensors[-1].device
        pool = torch.cuda.graph_pool_handle()
        outside = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)
        with torch.cuda.device(device), torch.cuda.stream(_stream(device)), torch.enable_grad():
            for _ in range(_WARM_UPS):
                results = function(*self._inputs)
                self._gradients(results, [torch.zeros_like(output) for output in _differentiable(results)])
            del results
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # a capture gives nothing back when memory is short
            with _capturing(self._graphs[0], pool, device):
                results = function(*self._inputs)
            with torch.cuda.stream(outside):  # which will write to it
                self._given = [torch.zeros_like(output) for output in _differentiable(results)]
            with _capturing(self._graphs[1], pool, device):
                self._returned = self._gradients(results, self._given)
        self.is_differentiable = [output.requires_grad for output in tensors_in(results)]
        # Detached: the pass itself would hold what accumulates the gradients of parameters, for good.
        self.results = map_tensors(Tensor.detach, results)
        torch.cuda.synchronize(device)

    def forward(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        for own, now in zip(self._inputs, tensors, strict=True):
            if own.data_ptr() != now.data_ptr():
                own.detach().copy_(now)
        self._graphs[0].replay()
        return [output.detach() for output in tensors_in(self.results)]

    def backward(self, gradients: tuple[Tensor, ...]) -> list[Tensor | None]:
        given = (one for one, is_one in zip(gradients, self.is_differentiable, strict=True) if is_one)
        for own, now in zip(self._given, given, strict=True):
            own.copy_(now)
        self._graphs[1].replay()
        returned = iter(self._returned)
        return [next(returned) if tensor.requires_grad else None for tensor in self._inputs]

    def _gradients(self, results: Any, given: list[Tensor]) -> list[Tensor | None]:
        return list(torch.autograd.grad(_differentiable(results), self._wanted, given, allow_unused=True))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all captures: for each stream, cuBLAS keeps workspaces (64 MiB on Hopper) for good.

    Its priority is another than that of pipelines and of offloading. torch hands out 32 streams of each in turn: one of
    many streams would be one on which another thread works.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.captured = captured
        outputs = captured.forward(tensors)
        is_differentiable = zip(outputs, captured.is_differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, is_one in is_differentiable if not is_one))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.captured.backward(gradients))


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Captures what is launched inside, on the current stream.

    Raises:
        RuntimeError: It cannot be captured: the error that says why, not those that come of it.
    """
    failure: BaseException | None = None
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        yield
    except BaseException as error:
        failure = error
    try:
        graph.capture_end()
    except RuntimeError as error:
        failure = failure or error
    if failure is not None:
        end_failed_capture(graph, pool, device)
        try:
            raise failure
        finally:
            failure = None  # which holds this frame, and all below it


def _own(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _differentiable(results: Any) -> list[Tensor]:
    return [output for output in tensors_in(results) if output.requires_grad]
