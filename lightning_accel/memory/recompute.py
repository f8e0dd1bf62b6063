"""Recomputation (activation checkpointing) of one call: its activations are dropped and recomputed in backward.

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


# Makes kept results pass through the surrounding saved-tensor hooks, so that they are packed or offloaded like all that
# autograd saves. This will be the default after torch 2.15. Before 2.15 torch cannot do it.
_THROUGH_HOOKS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": True}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)

Run = Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
"""Calls ``original`` as ``run(module, original, args, kwargs)``."""


def trained_patch(site: str, change: str, module: nn.Module, run: Run) -> MethodPatch:
    """Returns an edit that calls a module's forward through ``run`` whenever gradients are enabled."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(self, *args, **kwargs)
            return run(self, original, args, kwargs)

        forward.is_checkpointed = True  # type: ignore[attr-defined]  # prevents a second checkpoint
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
    """Calls ``original(block, *args, **kwargs)``, recomputed in backward with the random state of the first call.

    ``"full"`` keeps only the arguments; ``"selective"`` also the results of matrix products, convolutions and
    attention. In selective mode a long sequence of layers is recomputed piece by piece, so that one piece is freed
    before the next. If the block ``has_statistics`` (:func:`keeps_statistics`), a second run must not update them
    again.
    """
    is_sequence = original is nn.Sequential.forward and len(args) == 1 and not kwargs
    pieces = pieces_of(block) if mode == "selective" and is_sequence else []
    if not pieces:
        # partial() binds the arguments: checkpoint() would take an argument named `debug`, say, for its own.
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
    """Recomputes ``function`` as a whole. The running statistics of ``frozen`` stay."""
    context_fn = _context_fn(mode, frozen)
    if context_fn is None:
        return checkpoint(function, *args, use_reentrant=False)
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn)
    # Selective recomputation counts operators, so the first run must not skip casts that are in the cache.
    with no_cast_cache():
        return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **_THROUGH_HOOKS)


def pieces_of(block: nn.Module) -> list[list[nn.Module]]:
    """Splits layers after each matrix product or convolution; empty if ``block`` has only one of them.

    Each piece is recomputed as a whole. It then keeps only its input, the product of the piece before. Its own product
    comes last and is not needed again, so recomputation stops before it.
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
    # A compiled graph runs once, updates statistics once, and cannot trace our context.
    if torch.compiler.is_compiling() or (selective is None and frozen is None):
        return selective

    def contexts() -> Contexts:
        first, cached = selective() if selective is not None else (nullcontext(), nullcontext())
        return first, _Again(cached, frozen)

    return contexts


class _Again(AbstractContextManager[None]):
    """Entered at every recomputation of a call. There is one for each backward pass through a retained graph.

    Kept results (``cached``) are used by the first recomputation and then gone; a second one recomputes everything.
    Torch's own context refuses a second backward pass, which plain training allows. Running statistics of ``frozen``
    stay.
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
    """Keeps running statistics by a momentum of zero, so that autograd saves the same number of tensors."""
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
    """Returns whether it is an aten matrix product (mm, bmm, addmm …), convolution or fused attention."""
    namespace, _, name = operator.name().partition("::")
    name = name.partition(".")[0]
    return namespace == "aten" and (name.endswith("mm") or name == "convolution" or "attention" in name)


def _makes_scores(operator: Any, args: Any) -> bool:
    """Returns whether a batched product is larger than its inputs, as scores are: (B, T, d) by (B, d, T) → (B, T, T).

    Attention scores are most of what a block holds, and a small part of its arithmetic (Korthikanti et al.).
    """
    if operator is not torch.ops.aten.bmm.default:
        return False
    left, right = args
    return bool(left.shape[1] * right.shape[2] > left.shape[2] * (left.shape[1] + right.shape[2]))


def keeps_statistics(block: nn.Module) -> bool:
    """Returns whether a training pass through ``block`` updates running statistics."""
    return any(isinstance(m, NORMS) and m.track_running_stats for m in block.modules())
