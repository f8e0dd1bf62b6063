"""What one call of a block needs: bytes kept for its backward pass, the most it needs on top, and its time.

Measured, not modelled: the block runs, forward and backward, on copies of its real arguments, once a way.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_accel.core.device import device_of
from lightning_accel.core.isolation import isolated
from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.memory.meter import END, START, Meter, MeterBusyError
from lightning_accel.memory.offload import Offloader
from lightning_accel.memory.pieces import recomputed_block
from lightning_accel.memory.recompute import keeps_statistics
from lightning_accel.memory.saved import has_storage, saving, sparing, unique_bytes

Way = Literal["keep", "selective", "full", "offload", "full+offload"]
WAYS: tuple[Way, ...] = get_args(Way)
OFFLOADING: tuple[Way, ...] = ("offload", "full+offload")
_ON_DEVICE: dict[Way, Way] = {"offload": "keep", "full+offload": "full"}
TIMED_RUNS = 3


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One way to run one call of a block.

    Attributes:
        kept_bytes: Held from its forward to its backward pass, arguments and results not counted.
        argument_bytes: Arguments that it holds likewise.
        forward_bytes: The most on top of what was allocated before its forward pass.
        backward_bytes: The most on top of what was allocated before its backward pass.
        ms: Forward and backward together.
    """

    kept_bytes: int
    argument_bytes: int
    forward_bytes: int
    backward_bytes: int
    ms: float

    def scaled(self, factor: float) -> Cost:
        """The cost of a call ``factor`` times as large."""
        return Cost(
            kept_bytes=round(factor * self.kept_bytes),
            argument_bytes=round(factor * self.argument_bytes),
            forward_bytes=round(factor * self.forward_bytes),
            backward_bytes=round(factor * self.backward_bytes),
            ms=factor * self.ms,
        )


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """What is known of one call of a block.

    Attributes:
        ways: The cost of each way that works here.
        argument_elements: The size of its arguments, to tell larger batches by.
        saved_by_operator: Bytes that autograd saves when everything is kept, by the operator that made them;
            ``"arguments and constants"`` for what no operator did.
    """

    ways: Mapping[Way, Cost]
    argument_elements: int
    saved_by_operator: Mapping[str, int] = field(default_factory=dict)

    def for_elements(self, elements: float) -> BlockCosts:
        """The costs of a call whose arguments have so many elements, in proportion to the one that was measured."""
        if not self.argument_elements or elements == self.argument_elements:
            return self
        factor = elements / self.argument_elements
        ways = {way: cost.scaled(factor) for way, cost in self.ways.items()}
        return replace(self, ways=ways, argument_elements=round(elements))


def run_block(
    way: Way,
    block: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offloader: Offloader | None = None,
) -> Any:
    """Calls ``original(block, *args, **kwargs)`` in one of the ways."""
    if offloader is not None:
        offloader.settle()  # of the blocks before
        with saving(offloader, block) if way in OFFLOADING else sparing(offloader):
            outputs = run_block(_ON_DEVICE.get(way, way), block, original, args, kwargs)
        if way in OFFLOADING and offloader.is_exact:
            offloader.drain()
        return outputs
    if way == "keep":
        return original(block, *args, **kwargs)
    assert way == "selective" or way == "full"
    return recomputed_block(block, original, way, args, kwargs, has_statistics=keeps_statistics(block))


def kind_of(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Calls of the same kind cost the same: the same class, the same shapes of parameters and arguments."""

    def described(tensor: Tensor) -> tuple[Any, ...]:
        strides = tensor.stride() if has_storage(tensor) else tensor.layout
        return tensor.shape, tensor.dtype, tensor.requires_grad, strides

    return (
        type(block),
        block.training,
        tuple((type(m), m.extra_repr()) for m in block.modules()),
        tuple(described(p) for p in block.parameters()),
        tuple(map(described, tensors_in((args, kwargs)))),
    )


def elements_in(args: Any, kwargs: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in((args, kwargs)))


def measure_block(
    block: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meter: Meter,
    *,
    ways: tuple[Way, ...],
    offloader: Offloader | None = None,
) -> BlockCosts:
    """Runs the block in each of ``ways``, and leaves no trace of it.

    A way that raises (out of memory, say) is left out.

    Raises:
        MeterBusyError: Another profiler is at work.
    """
    found: dict[Way, Cost] = {}
    tally = _Tally()
    calls: dict[Way, Callable[..., Any]] = {}
    for way in ways:

        def call(*args: Any, way: Way = way, **kwargs: Any) -> Any:
            return run_block(way, block, original, args, kwargs, offloader)

        try:
            with isolated(block):
                if way == "keep":
                    with saving(tally, block):
                        _Pass(block, args, kwargs).forward(call)
                found[way] = _metered(_Pass(block, args, kwargs), call, meter, offloader)
        except MeterBusyError:
            raise
        except Exception:
            continue
        calls[way] = call
    for way, ms in _timed(block, calls, args, kwargs).items():
        found[way] = replace(found[way], ms=ms)
    return BlockCosts(ways=found, argument_elements=elements_in(args, kwargs), saved_by_operator=tally.saved)


def _timed(block: nn.Module, calls: Mapping[Way, Callable[..., Any]], args: Any, kwargs: Any) -> dict[Way, float]:
    """Milliseconds, forward and backward: the least of a few runs, the ways in turns."""
    device = device_of(block)
    ms = dict.fromkeys(calls, float("inf"))
    with isolated(block):
        for _ in range(TIMED_RUNS):
            for way, call in calls.items():
                run = _Pass(block, args, kwargs)
                _synchronize(device)
                start = time.perf_counter()
                run.forward(call)
                run.backward()
                _synchronize(device)
                ms[way] = min(ms[way], 1e3 * (time.perf_counter() - start))
    # Whatever recomputes or moves does all that keeping does, and more: less time is the clock's noise.
    return {way: max(took, ms.get("keep", 0.0)) for way, took in ms.items()}


def _metered(run: _Pass, call: Callable[..., Any], meter: Meter, offloader: Offloader | None) -> Cost:
    meter.start(run.arguments())
    try:
        run.forward(call)
        if offloader is not None:
            offloader.drain()  # as the blocks that follow give it time for
        meter.mark("between")
        result_bytes, freed_bytes = run.result_bytes(), run.freed_bytes()
        run.prepare_backward()
        meter.mark("backward")
        run.backward()
        meter.mark(END)
    finally:
        intervals = {interval.mark: interval for interval in meter.stop()}
    forward, between, back = (intervals[mark] for mark in (START, "between", "backward"))
    return Cost(
        kept_bytes=max(0, between.level_bytes - forward.level_bytes - result_bytes + freed_bytes),
        argument_bytes=run.argument_bytes - freed_bytes,
        forward_bytes=forward.peak_bytes - forward.level_bytes,
        backward_bytes=back.peak_bytes - back.level_bytes,
        ms=0.0,
    )


class _Pass:
    """One run of a block on copies of its arguments, forward and backward.

    The copies are handed over and not held on to: what is still alive of them afterwards, the block holds.
    """

    def __init__(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._wanted: list[Tensor] = [p for p in block.parameters() if p.requires_grad]
        self._given: tuple[Any, Any] | None = map_tensors(self._copied, (args, kwargs))
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self.arguments() if has_storage(t)}
        self._storages = {key: (weakref.ref(storage), storage.nbytes()) for key, storage in storages.items()}
        self._results: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self.argument_bytes = sum(size for _, size in self._storages.values())

    def _copied(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor.detach().clone()
        leaf = tensor.detach().clone().requires_grad_()
        self._wanted.append(leaf)
        with torch.enable_grad():
            return leaf.clone()

    def arguments(self) -> list[Tensor]:
        return tensors_in(self._given)

    def forward(self, call: Callable[..., Any]) -> None:
        assert self._given is not None
        (args, kwargs), self._given = self._given, None
        with torch.enable_grad():
            outputs = call(*args, **kwargs)
        self._results = [t for t in tensors_in(outputs) if t.requires_grad]

    def result_bytes(self) -> int:
        return unique_bytes(t for t in self._results if t.untyped_storage()._cdata not in self._storages)

    def freed_bytes(self) -> int:
        return sum(size for storage, size in self._storages.values() if storage() is None)

    def prepare_backward(self) -> None:
        self._gradients = [torch.ones_like(t) for t in self._results]

    def backward(self) -> None:
        if self._results and self._wanted:
            gradients = self._gradients or [torch.ones_like(t) for t in self._results]
            torch.autograd.grad(self._results, self._wanted, gradients, allow_unused=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Tally:
    """Counts what autograd saves, by the operator that made it, and takes nothing."""

    def __init__(self) -> None:
        self.saved: dict[str, int] = {}
        self._seen: set[int] = set()
        self._alive: list[Tensor] = []  # or a storage's address might serve a second tensor

    def pack(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._seen:
            self._seen.add(key)
            self._alive.append(tensor.detach())
            maker = _maker(tensor)
            self.saved[maker] = self.saved.get(maker, 0) + tensor.untyped_storage().nbytes()


# They make no values of their own: what they look at did.
_LOOKS = {"View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Select", "Slice", "Split"}
_LOOKS |= {"Unsqueeze", "Squeeze", "Unbind", "Alias", "AsStrided", "Clone", "ToCopy"}


def _maker(tensor: Tensor) -> str:
    """The operator that computed a tensor: ``"NativeLayerNormBackward0"`` → ``"native_layer_norm"``."""
    node = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        name = node.name().partition("Backward")[0]
        if name not in _LOOKS or node.next_functions[0][0] is None:
            return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        node = node.next_functions[0][0]
    return "arguments and constants"
