"""Recomputation of one call: its activations are forgotten, and computed again in the backward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), https://arxiv.org/abs/1604.06174. The selective
mode keeps what is dear to recompute, as in Korthikanti et al. (2022), https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_accel.core.isolation import no_cast_cache

Recomputation = Literal["full", "selective"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# Operators whose results selective checkpointing keeps, by name: not every build of torch has every one.
_DEAR = (
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "convolution", "_scaled_mm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward"),
)


def recomputed(
    block: nn.Module,
    original: Callable[..., Any],
    mode: Recomputation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_statistics: bool,
) -> Any:
    """Calls ``original(block, *args, **kwargs)`` so that it recomputes itself: with the random state of the first time.

    Args:
        block: The module that the call belongs to.
        original: Its forward, as a function of ``(block, *args, **kwargs)``.
        mode: ``"full"`` keeps the arguments only, ``"selective"`` also what matrix products, convolutions and
            attention computed.
        args: Positional arguments.
        kwargs: Keyword arguments.
        has_statistics: Whether the block :func:`keeps_statistics`, which a second run must not move again.
    """
    # Bound by partial: checkpoint() would take a block's own argument named, say, `debug` for one of its own.
    function = functools.partial(original, block, **kwargs)
    context_fn = _context_fn(block, mode, has_statistics)
    if context_fn is None:
        return checkpoint(function, *args, use_reentrant=False)
    # Selective recomputation counts operators: it must not meet a cast that the first time found in the cache.
    with nullcontext() if torch.compiler.is_compiling() else no_cast_cache():
        return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn)


def _context_fn(block: nn.Module, mode: str, has_statistics: bool) -> Callable[[], Contexts] | None:
    selective = functools.partial(create_selective_checkpoint_contexts, _policy) if mode == "selective" else None
    # A compiled graph is walked once, holds each update of the statistics once, and cannot trace a context of ours.
    if torch.compiler.is_compiling() or (selective is None and not has_statistics):
        return selective

    def contexts() -> Contexts:
        first, cached = selective() if selective is not None else (nullcontext(), nullcontext())
        again = _CachedOnce(cached)
        return first, _FrozenStatistics(block, again) if has_statistics else again

    return contexts


class _CachedOnce(AbstractContextManager[None]):
    """What was kept is given back to the first recomputation, and then gone: a second one computes it all.

    Torch's own context refuses a second backward pass through a retained graph, which plain training allows.
    """

    def __init__(self, cached: AbstractContextManager[Any]) -> None:
        self._cached: AbstractContextManager[Any] | None = cached
        self._entered: list[AbstractContextManager[Any]] = []

    @override
    def __enter__(self) -> None:
        context, self._cached = self._cached or nullcontext(), None
        self._entered.append(context)
        context.__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in _dear_operators() and not _makes_scores(operator, args):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _makes_scores(operator: Any, args: Any) -> bool:
    """Whether a batched product gives more than it is given, as queries by keys do: (B, T, d) by (B, d, T) → (B, T, T).

    Attention's scores are most of what a block holds, and a small part of its arithmetic (Korthikanti et al.).
    """
    if operator is not torch.ops.aten.bmm.default:
        return False
    left, right = args
    return bool(left.shape[1] * right.shape[2] > left.shape[2] * (left.shape[1] + right.shape[2]))


@functools.cache
def _dear_operators() -> frozenset[Any]:
    found = (getattr(torch.ops.aten, name, None) for name in _DEAR)
    return frozenset(getattr(packet, overload) for packet in found if packet for overload in packet.overloads())


def keeps_statistics(block: nn.Module) -> bool:
    """Whether a training pass through ``block`` moves running statistics."""
    return any(isinstance(m, _NormBase) and m.track_running_stats for m in block.modules())


class _FrozenStatistics(AbstractContextManager[None]):
    """Recomputing a norm must not move its running statistics a second time.

    With a momentum of zero they stay, and autograd still saves as many tensors as the first time. A class, as it is
    entered again for every backward pass through a retained graph.
    """

    def __init__(self, block: nn.Module, around: AbstractContextManager[Any]) -> None:
        self._block = block
        self._around = around
        self._before: list[tuple[_NormBase, float | None, Tensor | None]] = []

    @override
    def __enter__(self) -> None:
        norms = [m for m in self._block.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]
        self._before = [(norm, norm.momentum, norm._buffers["num_batches_tracked"]) for norm in norms]
        for norm, _, count in self._before:
            norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, None if count is None else count.clone()
        self._around.__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        self._around.__exit__(*error)
        for norm, momentum, count in self._before:
            norm.momentum, norm._buffers["num_batches_tracked"] = momentum, count
