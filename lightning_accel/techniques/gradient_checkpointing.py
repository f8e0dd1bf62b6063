"""Gradient checkpointing: blocks forget their activations and compute them again in the backward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), https://arxiv.org/abs/1604.06174. The selective
mode keeps what is dear to recompute, as in Korthikanti et al. (2022), https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_accel.blocks import find_blocks
from lightning_accel.compiled import is_inside_compiled
from lightning_accel.host import Host
from lightning_accel.isolation import no_cast_cache
from lightning_accel.patch import MethodPatch, Patch, PatchSet
from lightning_accel.plan import CheckpointingPlan
from lightning_accel.techniques.base import Refusal, Technique, Verdict, Verdicts
from lightning_accel.tree import leaves
from lightning_accel.trial import Contender, Trial

# Arguments that a block cannot change, or (tensors) is seen to change; a batch or cache object of the user's can be.
_PLAIN = (Tensor, type(None), int, float, complex, str, bytes, Enum, torch.dtype, torch.device, nn.Module, FunctionType)

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# Operators whose results selective checkpointing keeps, by name: not every build of torch has every one.
_DEAR = (
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "convolution", "_scaled_mm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward"),
)


def checkpoint_block(site: str, block: nn.Module, plan: CheckpointingPlan) -> MethodPatch:
    """The edit that makes one block recompute itself: non-reentrant, with the random state of the first time."""
    has_statistics = _keeps_statistics(block)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(self, *args, **kwargs)
            # Bound by partial: checkpoint() would take a block's own argument named, say, `debug` for one of its own.
            function = functools.partial(original, self, **kwargs)
            context_fn = _context_fn(self, plan.mode, has_statistics)
            if context_fn is None:
                return checkpoint(function, *args, use_reentrant=False)
            # Selective recomputation counts operators: it must not meet a cast that the first time found in the cache.
            with nullcontext() if torch.compiler.is_compiling() else no_cast_cache():
                return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn)

        forward.is_checkpointed = True  # type: ignore[attr-defined]
        return forward

    return MethodPatch(site, f"forward → checkpointed ({plan.mode})", block, "forward", wrap)


def _context_fn(block: nn.Module, mode: str, has_statistics: bool) -> Callable[[], Contexts] | None:
    selective = functools.partial(create_selective_checkpoint_contexts, _policy) if mode == "selective" else None
    # A compiled graph holds each update of the statistics once, and cannot trace a context of ours.
    if not has_statistics or torch.compiler.is_compiling():
        return selective

    def contexts() -> Contexts:
        first, again = selective() if selective is not None else (nullcontext(), nullcontext())
        return first, _FrozenStatistics(block, again)

    return contexts


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


def _keeps_statistics(block: nn.Module) -> bool:
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


class GradientCheckpointing(Technique):
    """Checkpoints the repeated blocks of a model, or those that are named.

    Every block is tried on its first real input: its outputs and gradients must be those of the original, and it
    must leave nothing behind that a second run of its forward would leave twice.
    """

    name: ClassVar[str] = "gradient_checkpointing"
    applied_before_trial: ClassVar[bool] = True
    explicit = True

    def __init__(self, plan: CheckpointingPlan, *, verify: bool = True) -> None:
        self._plan = plan
        self._verify = verify
        self._blocks: dict[str, nn.Module] = {}
        self._untried: dict[str, MethodPatch] = {}

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterable[Patch | Refusal]:
        self._blocks = find_blocks(model, self._plan.blocks)
        if not self._blocks:
            raise ValueError(
                f"gradient_checkpointing={self._plan.mode!r}: {type(model).__name__} has no repeated blocks to"
                " checkpoint. Name some: gradient_checkpointing={'mode': 'full', 'blocks': ['MyBlock', 'encoder.mid']}."
            )
        for site, block in self._blocks.items():
            if isinstance(block, torch.jit.ScriptModule):
                yield Refusal(site, "a TorchScript module: its forward cannot be rebound")
            elif hasattr(vars(block).get("forward"), "is_checkpointed"):
                yield Refusal(site, "already checkpointed")
            elif any(is_lazy(parameter) for parameter in block.parameters()):
                yield Refusal(site, "has lazy parameters: run the model once before, and they will be there")
            elif _keeps_statistics(block) and is_inside_compiled(model, site):
                # Only backends that plan the backward pass themselves (Inductor) know not to repeat a statistic.
                yield Refusal(site, "compiled by you, with running statistics that some compilers would move twice")
            else:
                yield checkpoint_block(site, block, self._plan)

    @override
    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        return self._trial(patches) if self._verify else super().trial(patches)

    @contextmanager
    def _trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        self._untried = {patch.site: patch for patch in patches if isinstance(patch, MethodPatch)}
        verdicts: Verdicts = {}
        with self._tried_when_called(verdicts):
            yield verdicts
        for site in self._untried:
            verdicts[site] = Verdict(keep=True, reason="not called on the first step: tried when it is")

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        return self._late_trial() if self._untried else nullcontext()

    @contextmanager
    def _late_trial(self) -> Iterator[None]:
        verdicts: Verdicts = {}
        with self._tried_when_called(verdicts):
            yield
        refused = {site: verdict.reason for site, verdict in verdicts.items() if not verdict.keep}
        self.objections = {**self.objections, **refused}

    @contextmanager
    def _tried_when_called(self, verdicts: Verdicts) -> Iterator[None]:
        with ExitStack() as stack:
            for patch in self._untried.values():
                stack.enter_context(self._tried_at_first_call(patch, verdicts))
            yield
        self._untried = {site: patch for site, patch in self._untried.items() if site not in verdicts}

    @contextmanager
    def _tried_at_first_call(self, patch: MethodPatch, verdicts: Verdicts) -> Iterator[None]:
        block, checkpointed = self._blocks[patch.site], patch.value
        original = patch.original

        def wrap(_: Callable[..., Any]) -> Callable[..., Any]:
            def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if self is block and patch.site not in verdicts and torch.is_grad_enabled():
                    verdicts[patch.site] = Verdict(keep=True)  # for calls of the block within its own trial
                    verdicts[patch.site] = _try_block(
                        block, functools.partial(original, block), checkpointed, args, kwargs
                    )
                if self is block and patch.site in verdicts and not verdicts[patch.site].keep:
                    return original(self, *args, **kwargs)
                return checkpointed.__func__(self, *args, **kwargs)

            return forward

        probe = MethodPatch(patch.site, "trial", block, "forward", wrap)
        probe.apply()
        try:
            yield
        finally:
            probe.undo()


def _try_block(
    block: nn.Module, original: Callable[..., Any], checkpointed: Callable[..., Any], args: Any, kwargs: Any
) -> Verdict:
    strange = next((type(x).__name__ for x in leaves((args, kwargs)) if not isinstance(x, _PLAIN)), None)
    if strange is not None:
        return Verdict(keep=False, reason=f"takes a {strange}, which may not be the same when the block is recomputed")
    found = Trial(block, args, kwargs).numbers(Contender(original), Contender(checkpointed), with_oracle=False)
    if found.failure:
        return Verdict(keep=False, reason=found.failure)
    if not found.compared:
        return Verdict(keep=False, reason="returns no tensors that could be compared with the original's")
    norms = {n: m for n, m in block.named_modules() if isinstance(m, _NormBase)}
    changed = [name for name in found.left_behind if name.rpartition(".")[0] not in norms]
    if changed:
        return Verdict(keep=False, reason=f"its forward changes {changed[0]!r}, which recomputing would change again")
    return Verdict(keep=True)
