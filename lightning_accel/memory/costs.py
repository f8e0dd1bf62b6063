"""What one call of a block needs: bytes kept for its backward pass, the most it needs on top, and its time.

Measured, not modelled: the block runs, forward and backward, on copies of its real arguments, once a policy.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_accel.core.device import device_of, synchronize
from lightning_accel.core.isolation import isolated
from lightning_accel.core.tree import map_tensors, storage_of, storages_of, tensors_in
from lightning_accel.memory.meter import END, START, Meter, MeterBusyError
from lightning_accel.memory.offload import Offloader
from lightning_accel.memory.recompute import keeps_statistics, recomputed
from lightning_accel.memory.saved import saving, sparing

Policy = Literal["keep", "selective", "full", "offload", "full+offload"]
"""What a block does with its activations: keep, recompute or offload them; the more, the later in this list."""

POLICIES: tuple[Policy, ...] = get_args(Policy)
OFFLOADING: tuple[Policy, ...] = ("offload", "full+offload")
_ON_DEVICE: dict[Policy, Policy] = {"offload": "keep", "full+offload": "full"}
TIMED_RUNS = 3
LEAST_EXTRA = 1.01  # how much longer than keeping all else takes at least


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One policy for one call of a block."""

    kept_bytes: int  # held from its forward to its backward pass, arguments and results not counted
    argument_bytes: int  # arguments that it holds likewise
    forward_bytes: int  # the most on top of what was allocated before its forward pass
    backward_bytes: int  # the most on top of what was allocated before its backward pass
    ms: float  # forward and backward together

    def scaled(self, factor: float) -> Cost:
        """The cost of a call ``factor`` times as large."""
        sizes = {name: round(factor * value) for name, value in vars(self).items() if name != "ms"}
        return Cost(**sizes, ms=factor * self.ms)


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """What is known of one call of a block."""

    by_policy: Mapping[Policy, Cost]  # for each policy that works here
    argument_elements: int  # the size of its arguments, to tell larger batches by
    saved_by_operator: Mapping[str, int]  # bytes that autograd saves when everything is kept, by what made them

    def of_call(self, elements: float, shared_bytes: int) -> dict[Policy, Cost]:
        """The costs of one call, in proportion to its size; what it keeps includes arguments that only it holds."""
        factor = elements / self.argument_elements if self.argument_elements else 1.0
        scaled = {policy: cost.scaled(factor) if factor != 1 else cost for policy, cost in self.by_policy.items()}

        def own(policy: Policy, cost: Cost) -> Cost:
            arguments = max(0, cost.argument_bytes - shared_bytes)
            kept = replace(cost, kept_bytes=cost.kept_bytes + arguments)
            if not torch.are_deterministic_algorithms_enabled():
                return kept
            # A time that no clock has a part in: the more a policy does, and the more there is to do.
            return replace(kept, ms=POLICIES.index(policy) * scaled.get("keep", cost).kept_bytes / 2**20)

        return {policy: own(policy, cost) for policy, cost in scaled.items()}


def run_block(
    policy: Policy,
    block: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offloader: Offloader | None = None,
) -> Any:
    """Calls ``original(block, *args, **kwargs)`` by a policy."""
    if offloader is not None:
        offloader.settle()  # of the blocks before
        with saving(offloader, block) if policy in OFFLOADING else sparing(offloader):
            outputs = run_block(_ON_DEVICE.get(policy, policy), block, original, args, kwargs)
        if policy in OFFLOADING and offloader.is_exact:
            offloader.drain()
        return outputs
    if policy == "keep":
        return original(block, *args, **kwargs)
    assert policy == "selective" or policy == "full"
    return recomputed(block, original, policy, args, kwargs, has_statistics=keeps_statistics(block))


def kind_of(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Calls of the same kind cost the same: the same class, the same shapes of parameters and arguments."""

    def described(tensor: Tensor) -> tuple[Any, ...]:
        strides = tensor.layout if storage_of(tensor) is None else tensor.stride()
        return tensor.shape, tensor.dtype, tensor.requires_grad, strides

    return (
        type(block),
        block.training,
        tuple((type(m), m.extra_repr()) for m in block.modules()),
        tuple(map(described, block.parameters())),
        tuple(map(described, tensors_in((args, kwargs)))),
    )


def measure_block(
    block: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meter: Meter,
    *,
    policies: tuple[Policy, ...] = POLICIES,
    offloader: Offloader | None = None,
) -> BlockCosts:
    """Runs the block by each of ``policies`` that it can, and leaves no trace. One that raises is left out.

    Raises:
        MeterBusyError: Another profiler is at work.
    """
    costs: dict[Policy, Cost] = {}
    runs: dict[Policy, _Run] = {}
    tally = _Tally()
    for policy in policies if offloader is not None else [p for p in policies if p not in OFFLOADING]:
        run = partial(run_block, policy, block, original, offloader=offloader)
        try:
            with isolated(block):
                if policy == "keep":
                    with saving(tally, block):
                        _Pass(block, args, kwargs).forward(run)
                costs[policy] = _metered(_Pass(block, args, kwargs), run, meter, offloader)
        except MeterBusyError:
            raise
        except Exception:
            continue
        runs[policy] = run
    costs |= {policy: replace(costs[policy], ms=ms) for policy, ms in _timed(block, runs, args, kwargs).items()}
    elements = sum(tensor.numel() for tensor in tensors_in((args, kwargs)))
    return BlockCosts(by_policy=costs, argument_elements=elements, saved_by_operator=dict(tally.saved))


_Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def _timed(block: nn.Module, runs: Mapping[Policy, _Run], args: Any, kwargs: Any) -> dict[Policy, float]:
    """Milliseconds, forward and backward: the least of a few runs, the policies in turns."""
    device = device_of(block)
    ms = dict.fromkeys(runs, float("inf"))
    with isolated(block):
        for _ in range(TIMED_RUNS):
            for policy, run in runs.items():
                once = _Pass(block, args, kwargs)
                synchronize(device)
                start = time.perf_counter()
                once.forward(run)
                once.backward(once.gradients())
                synchronize(device)
                ms[policy] = min(ms[policy], 1e3 * (time.perf_counter() - start))
    # Whatever recomputes or moves does all that keeping does, and more: less time is the clock's noise, and must not
    # make a roomy budget recompute.
    least = LEAST_EXTRA * ms.get("keep", 0.0)
    return {policy: took if policy == "keep" else max(took, least) for policy, took in ms.items()}


def _metered(once: _Pass, run: _Run, meter: Meter, offloader: Offloader | None) -> Cost:
    meter.start(once.arguments())
    try:
        once.forward(run)
        if offloader is not None:
            offloader.drain()  # as the blocks that follow give it time for
        meter.mark("between")
        result_bytes, held_bytes = once.result_bytes(), once.held_bytes()
        gradients = once.gradients()
        meter.mark("backward")
        once.backward(gradients)
        meter.mark(END)
    finally:
        intervals = {interval.mark: interval for interval in meter.stop()}
    forward, between, back = (intervals[mark] for mark in (START, "between", "backward"))
    freed_bytes = once.argument_bytes - held_bytes
    return Cost(
        kept_bytes=max(0, between.level_bytes - forward.level_bytes - result_bytes + freed_bytes),
        argument_bytes=held_bytes,
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
        self._storages = WeakSet(storages_of(self.arguments()))
        self._results: list[Tensor] = []
        self.argument_bytes = self.held_bytes()

    def _copied(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor.detach().clone()
        leaf = tensor.detach().clone().requires_grad_()
        self._wanted.append(leaf)
        with torch.enable_grad():
            return leaf.clone()

    def arguments(self) -> list[Tensor]:
        return tensors_in(self._given)

    def forward(self, run: _Run) -> None:
        assert self._given is not None
        given, self._given = self._given, None
        with torch.enable_grad():
            outputs = run(*given)
        self._results = [t for t in tensors_in(outputs) if t.requires_grad]

    def result_bytes(self) -> int:
        return sum(storage.nbytes() for storage in storages_of(self._results).difference(self._storages))

    def held_bytes(self) -> int:
        """Of the arguments, what is still there."""
        return sum(storage.nbytes() for storage in self._storages)

    def gradients(self) -> list[Tensor]:
        return [torch.ones_like(t) for t in self._results]

    def backward(self, gradients: list[Tensor]) -> None:
        if self._results and self._wanted:
            torch.autograd.grad(self._results, self._wanted, gradients, allow_unused=True)


class _Tally:
    """Counts what autograd saves, by the operator that made it, and takes nothing."""

    def __init__(self) -> None:
        self.saved: Counter[str] = Counter()
        self._seen: set[torch.UntypedStorage] = set()

    def pack(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            self.saved[_maker(tensor)] += storage.nbytes()


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
