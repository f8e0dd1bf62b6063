"""Recomputation of one call: its activations are forgotten, and computed again in the backward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), https://arxiv.org/abs/1604.06174. The selective
mode keeps what is expensive to recompute, as in Korthikanti et al. (2022), https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_accel.core.device import CONVOLUTIONS
from lightning_accel.core.isolation import no_cast_cache
from lightning_accel.core.patch import MethodPatch

Recomputation = Literal["full", "selective"]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""The norms that may keep running statistics."""

_COMPUTE_BOUND = (*CONVOLUTIONS, nn.Linear, nn.Bilinear)


# What is kept of a call goes through the hooks for saved tensors around it, as it will by default after torch 2.15: it
# is packed or offloaded as all is that autograd keeps. Before 2.15 it passes them by, and nothing else can be had.
_THROUGH_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": True}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)

Run = Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
"""Calls ``original`` as ``run(module, original, args, kwargs)``."""


def trained_patch(site: str, change: str, module: nn.Module, run: Run) -> MethodPatch:
    """The edit that has ``run`` call a module's forward wherever there are gradients."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(self, *args, **kwargs)
            return run(self, original, args, kwargs)

        forward.is_checkpointed = True  # type: ignore[attr-defined]  # for whoever would do it again
        return forward

    return MethodPatch(site, change, module, "forward", wrap)


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

    ``"full"`` keeps the arguments only, ``"selective"`` also what matrix products, convolutions and attention computed;
    a long sequence of layers it recomputes piece by piece: what one brings back is gone before the next. A second run
    must not move again what a block ``has_statistics`` of (:func:`keeps_statistics`).
    """
    is_sequence = original is nn.Sequential.forward and len(args) == 1 and not kwargs
    pieces = pieces_of(block) if mode == "selective" and is_sequence else []
    if not pieces:
        # Bound by partial: checkpoint() would take a block's own argument named, say, `debug` for one of its own.
        return _whole(functools.partial(original, block, **kwargs), args, mode, block if has_statistics else None)
    x = args[0]
    for piece in pieces:
        if len(piece) == 1:
            x = piece[0](x)
        else:
            frozen = block if any(map(keeps_statistics, piece)) else None
            x = _whole(functools.partial(_run_layers, piece), (x,), "full", frozen)
    return x


def _whole(function: Callable[..., Any], args: tuple[Any, ...], mode: Recomputation, frozen: nn.Module | None) -> Any:
    """Recomputes ``function`` as one; the running statistics of ``frozen`` stay."""
    context_fn = _context_fn(mode, frozen)
    if context_fn is None:
        return checkpoint(function, *args, use_reentrant=False)
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn)
    # Selective recomputation counts operators: it must not meet a cast that the first time found in the cache.
    with no_cast_cache():
        return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **_THROUGH_HOOKS)


def pieces_of(block: nn.Module) -> list[list[nn.Module]]:
    """Runs of consecutive layers that end in a matrix product or convolution; empty where ``block`` has but one.

    Each is to be recomputed whole. All it then keeps is what entered it, the product of the piece before; its own
    product, the last thing in it, nothing asks for again, and recomputation stops short of it.
    """
    if type(block) is not nn.Sequential or any(True for child in block for _ in child.children()):
        return []
    if sum(isinstance(layer, _COMPUTE_BOUND) for layer in block) < 2:
        return []
    pieces: list[list[nn.Module]] = [[]]
    for layer in block:
        pieces[-1].append(layer)
        if isinstance(layer, _COMPUTE_BOUND):
            pieces.append([])
    return [piece for piece in pieces if piece]


def _run_layers(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _context_fn(mode: Recomputation, frozen: nn.Module | None) -> Callable[[], Contexts] | None:
    selective = functools.partial(create_selective_checkpoint_contexts, _policy) if mode == "selective" else None
    # A compiled graph is walked once, holds each update of the statistics once, and cannot trace a context of ours.
    if torch.compiler.is_compiling() or (selective is None and frozen is None):
        return selective

    def contexts() -> Contexts:
        first, cached = selective() if selective is not None else (nullcontext(), nullcontext())
        return first, _Again(cached, frozen)

    return contexts


class _Again(AbstractContextManager[None]):
    """Around every recomputation of a call: there is one for each backward pass through a retained graph.

    What was kept (``cached``) is given back to the first of them, and then gone: a second one computes it all. Torch's
    own context refuses a second backward pass, which plain training allows. Running statistics of ``frozen`` stay.
    """

    def __init__(self, cached: AbstractContextManager[Any], frozen: nn.Module | None) -> None:
        self._cached = cached
        self._frozen = frozen
        self._entered: list[ExitStack] = []

    @override
    def __enter__(self) -> None:
        cached, self._cached = self._cached, nullcontext()
        with ExitStack() as stack:
            if self._frozen is not None:
                stack.enter_context(_frozen_statistics(self._frozen))
            stack.enter_context(cached)
            self._entered.append(stack.pop_all())

    @override
    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """With a momentum of zero running statistics stay, and autograd saves as many tensors as the first time."""
    norms = [m for m in block.modules() if isinstance(m, NORMS) and m.training and m.track_running_stats]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in before:
        norm.momentum, norm.num_batches_tracked = 0.0, None if count is None else count.clone()
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if _is_compute_bound(operator) and not _makes_scores(operator, args):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _is_compute_bound(operator: Any) -> bool:
    """Whether it is one of aten's matrix products (mm, bmm, addmm …), convolutions, or fused attention."""
    namespace, _, name = operator.name().partition("::")
    name = name.partition(".")[0]
    return namespace == "aten" and (name.endswith("mm") or name == "convolution" or "attention" in name)


def _makes_scores(operator: Any, args: Any) -> bool:
    """Whether a batched product gives more than it is given, as queries by keys do: (B, T, d) by (B, d, T) → (B, T, T).

    Attention's scores are most of what a block holds, and a small part of its arithmetic (Korthikanti et al.).
    """
    if operator is not torch.ops.aten.bmm.default:
        return False
    left, right = args
    return bool(left.shape[1] * right.shape[2] > left.shape[2] * (left.shape[1] + right.shape[2]))


def keeps_statistics(block: nn.Module) -> bool:
    """Whether a training pass through ``block`` moves running statistics."""
    return any(isinstance(m, NORMS) and m.track_running_stats for m in block.modules())
