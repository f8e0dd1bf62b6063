"""The cost of one call of a block: bytes kept for backward, temporary memory, and time.

Costs are measured, not modelled: the block runs forward and backward on copies of its real arguments, once per policy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.core.device import device_of
from lightning_accel.core.isolation import isolated
from lightning_accel.core.torch_private.modes import DispatchMode
from lightning_accel.core.tree import storage_of, storages_of, tensors_in
from lightning_accel.experiment.passes import Call, Passes
from lightning_accel.experiment.time_calls import time_calls
from lightning_accel.memory.meter import END, START, Meter, MeterBusyError
from lightning_accel.memory.offload import Offloader
from lightning_accel.memory.recompute import keeps_statistics, recomputed
from lightning_accel.memory.saved_tensors import saving, sparing

Policy = Literal["keep", "selective", "full", "offload", "full+offload"]
"""What a block does with its activations: keep, recompute or offload. Later entries do more work."""

POLICIES: tuple[Policy, ...] = get_args(Policy)
OFFLOADING: tuple[Policy, ...] = ("offload", "full+offload")
_ON_DEVICE: dict[Policy, Policy] = {"offload": "keep", "full+offload": "full"}
TIMED_RUNS = 3
LEAST_EXTRA = 1.01  # every other policy counts as at least this much slower than keeping


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """The cost of one policy for one call of a block."""

    kept_bytes: int  # kept from forward to backward, without arguments and results
    argument_bytes: int  # arguments kept from forward to backward
    forward_bytes: int  # peak above the level before its forward pass
    backward_bytes: int  # peak above the level before its backward pass
    ms: float  # forward and backward together

    def scaled(self, factor: float) -> BlockCost:
        """Returns the cost of a call ``factor`` times as large."""
        sizes = {name: round(factor * value) for name, value in vars(self).items() if name != "ms"}
        return BlockCost(**sizes, ms=factor * self.ms)


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """The measured costs of one call of a block."""

    by_policy: Mapping[Policy, BlockCost]  # the policies that work here
    argument_elements: int  # size of its arguments, to recognise larger batches
    saved_by_operator: Mapping[str, int]  # bytes that autograd saves if everything is kept, by operator

    @property
    def leanest(self) -> Policy:
        """The policy of a block without a plan."""
        return "full" if "full" in self.by_policy else self.smallest

    @property
    def smallest(self) -> Policy:
        """The policy that keeps the fewest bytes, to a page, and among equals needs the least in backward."""
        found = self.by_policy
        return min(found, key=lambda policy: (found[policy].kept_bytes >> 12, found[policy].backward_bytes))

    def of_call(self, elements: float, shared_bytes: int) -> dict[Policy, BlockCost]:
        """Returns the costs of a call, in proportion to its size. Kept bytes include arguments that only it holds."""
        factor = elements / self.argument_elements if self.argument_elements else 1.0
        scaled = {policy: cost.scaled(factor) for policy, cost in self.by_policy.items()}
        costs = {
            policy: replace(cost, kept_bytes=cost.kept_bytes + max(0, cost.argument_bytes - shared_bytes))
            for policy, cost in scaled.items()
        }
        if not torch.are_deterministic_algorithms_enabled():
            return costs
        # A deterministic substitute for the measured time: it grows with the work of the policy and with the size.
        return {
            policy: replace(cost, ms=POLICIES.index(policy) * scaled.get("keep", scaled[policy]).kept_bytes / 2**20)
            for policy, cost in costs.items()
        }


def run_block(
    policy: Policy,
    block: nn.Module,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offloader: Offloader | None = None,
) -> Any:
    """Calls ``original(block, *args, **kwargs)`` with a policy."""
    if offloader is not None:
        offloader.settle()  # copies of earlier blocks
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
    """Returns a key. Calls with the same key cost the same: same class, same shapes of parameters and arguments."""

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
    offloader: Offloader | None,
) -> BlockCosts:
    """Runs the block with each possible policy and restores its state. A policy that raises is left out.

    Raises:
        MeterBusyError: Another profiler is active.
    """

    def following(policy: Policy) -> Call:
        def run(*args: Any, **kwargs: Any) -> Any:
            outputs = run_block(policy, block, original, args, kwargs, offloader)
            if offloader is not None:
                offloader.drain()  # in a step, later blocks leave time for this
            return outputs

        return run

    passes = Passes(block)
    costs: dict[Policy, BlockCost] = {}
    saved: dict[str, int] = {}
    for policy in POLICIES if offloader is not None else [p for p in POLICIES if p not in OFFLOADING]:
        try:
            with isolated(block):
                if policy == "keep":
                    saved = _saved_by_operator(passes, following(policy), args, kwargs)
                costs[policy] = _metered(passes, following(policy), args, kwargs, meter)
        except MeterBusyError:
            raise
        except Exception:
            continue
    ms = _timed(passes, {policy: following(policy) for policy in costs}, args, kwargs)
    elements = sum(tensor.numel() for tensor in tensors_in((args, kwargs)))
    by_policy = {policy: replace(cost, ms=ms[policy]) for policy, cost in costs.items()}
    return BlockCosts(by_policy=by_policy, argument_elements=elements, saved_by_operator=saved)


def _timed(passes: Passes, runs: Mapping[Policy, Call], args: Any, kwargs: Any) -> dict[Policy, float]:
    """Returns milliseconds of forward and backward: the minimum of a few runs, with the policies in turns."""
    device = device_of(passes.module)
    calls = {policy: lambda run=run: nullcontext(passes.prepared(run, args, kwargs)) for policy, run in runs.items()}
    with isolated(passes.module):
        seconds = time_calls(calls, device, rounds=TIMED_RUNS)
    ms = {policy: 1e3 * min(each) for policy, each in seconds.items()}
    # Recomputing and offloading do all the work of keeping, and more. A shorter time is noise, which must not make a
    # large budget recompute.
    least = LEAST_EXTRA * ms.get("keep", 0.0)
    return {policy: took if policy == "keep" else max(took, least) for policy, took in ms.items()}


def _metered(passes: Passes, run: Call, args: Any, kwargs: Any, meter: Meter) -> BlockCost:
    """Meters one forward and backward run. Arguments that are still alive after forward are held by the block."""
    leaves, inputs = passes.copies(args, kwargs)
    wanted = leaves + [p for p in passes.module.parameters() if p.requires_grad]
    arguments = WeakSet(storages_of(tensors_in(inputs)))
    argument_bytes = _bytes_of(arguments)
    meter.start(tensors_in(inputs))
    try:
        with torch.enable_grad():
            results = [t for t in tensors_in(run(*inputs[0], **inputs[1])) if t.requires_grad]
        del inputs
        meter.mark("between")
        result_bytes, held_bytes = _bytes_of(storages_of(results).difference(arguments)), _bytes_of(arguments)
        gradients = [torch.ones_like(t) for t in results]
        meter.mark("backward")
        if results and wanted:
            torch.autograd.grad(results, wanted, gradients, allow_unused=True)
        meter.mark(END)
    finally:
        intervals = {interval.mark: interval for interval in meter.stop()}
    forward, between, back = (intervals[mark] for mark in (START, "between", "backward"))
    freed_bytes = argument_bytes - held_bytes
    return BlockCost(
        kept_bytes=max(0, between.level_bytes - forward.level_bytes - result_bytes + freed_bytes),
        argument_bytes=held_bytes,
        forward_bytes=forward.peak_bytes - forward.level_bytes,
        backward_bytes=back.peak_bytes - back.level_bytes,
        ms=0.0,
    )


def _bytes_of(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages)


def _saved_by_operator(passes: Passes, run: Call, args: Any, kwargs: Any) -> dict[str, int]:
    tally = _Tally()
    _, inputs = passes.copies(args, kwargs)
    with torch.enable_grad(), saving(tally, passes.module):
        run(*inputs[0], **inputs[1])
    return dict(tally.saved)


class _Tally:
    """Counts the bytes that autograd saves, by the operator that made them, and packs nothing."""

    def __init__(self) -> None:
        self.saved: Counter[str] = Counter()
        self._seen: set[torch.UntypedStorage] = set()

    def pack(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            self.saved[_maker(tensor)] += storage.nbytes()


def kept_bytes(block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Runs a call once, on copies of its arguments, and counts the storages alive afterwards, without its results.

    Storages are counted, not what autograd reports as saved: a recomputed call keeps its arguments elsewhere. The
    allocator is not used, so no peak counter is reset. The block and the random state stay as they were.
    """
    with isolated(block), torch.enable_grad():
        _, inputs = Passes(block).copies(args, kwargs)
        made = _Made()
        made.storages.update(storages_of(tensors_in(inputs)))
        with made:
            results = call(*inputs[0], **inputs[1])
        del inputs
        others = storages_of([*tensors_in(results), *block.parameters(), *block.buffers()])  # weights may be among them
        return sum(storage.nbytes() for storage in made.storages if storage not in others)


class _Made(DispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages that operations create, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: WeakSet[torch.UntypedStorage] = WeakSet()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.storages.update(storages_of(tensors_in(made)))
        return made


# These operators compute no values of their own. Their input was made by another operator.
_LOOKS = {"View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Select", "Slice", "Split"}
_LOOKS |= {"Unsqueeze", "Squeeze", "Unbind", "Alias", "AsStrided", "Clone", "ToCopy"}


def _maker(tensor: Tensor) -> str:
    """Returns the operator that computed a tensor: ``"NativeLayerNormBackward0"`` → ``"native_layer_norm"``."""
    node = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        name = node.name().partition("Backward")[0]
        if name not in _LOOKS or node.next_functions[0][0] is None:
            return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        node = node.next_functions[0][0]
    return "arguments and constants"
