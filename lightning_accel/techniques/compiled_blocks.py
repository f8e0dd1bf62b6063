"""One block that is compiled: the edits, its trial, and which blocks share what the compiler makes of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from typing_extensions import override

from lightning_accel.core.compiled import CompiledKind, compile_call, eager_call, is_gathered_by_hooks, undo_compile
from lightning_accel.core.patch import Patch, applied, temporarily
from lightning_accel.core.torch_private import modules
from lightning_accel.core.torch_private.compilation import compiled_call, inductor_options, set_compiled_call
from lightning_accel.core.tree import changeable_argument, tensors_in
from lightning_accel.experiment.trial import Trial
from lightning_accel.experiment.trial_runs import TrialSide
from lightning_accel.techniques.arms import OFF
from lightning_accel.techniques.graphed_block import Capture, GraphedBlock
from lightning_accel.techniques.technique_context import TechniqueContext, Verdict

Prepare = Callable[[GraphModule], None]
KindOf = Callable[["CompilePatch", Any, Any], CompiledKind]  # of a block, by the arguments of a call

GRAPHS = "graphs"
"""The variant."""

SETTLE = 2
"""Steps after a switch: the memory of graphs is given back when they are off, so that they are captured anew."""

_NOT_TRIED = "not captured yet"
_PLAIN = (bool, int, float, str, type(None))
_SHARED_MODES = ("default", "max-autotune-no-cudagraphs")  # a CUDA graph holds one block's parameters


class CompilePatch(Patch):
    """Compiles a module's call in place: no wrapper, so names and ``state_dict`` keys stay."""

    def __init__(self, site: str, block: nn.Module, mode: str, prepare: Prepare, *, kind_of: KindOf) -> None:
        super().__init__(site, "call → compiled" + (f" ({mode})" if mode != "default" else ""))
        self.block = block
        # What it shares with blocks that are like it; None until it is called, or tried.
        self.kind: CompiledKind | None = None
        self.is_wanted = True  # whether it runs compiled while the patch is applied
        self.may_share = mode in _SHARED_MODES
        self._prepare, self._kind_of = prepare, kind_of
        # What is drawn is drawn as it would be eagerly, and not by a generator of the compiler's own.
        self._options = inductor_options(mode) | {"fallback_random": True}

    @override
    def _apply(self) -> None:
        if not self.is_wanted:
            return
        if self.kind is None and not is_gathered_by_hooks(self.block):
            set_compiled_call(self.block, self._first_call)
            return
        self.kind = self.kind or self._kind_of(self, (), {})
        compile_call(self.block, self._options, self._prepare, self.kind)

    @override
    def _undo(self) -> None:
        undo_compile(self.block)

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        """Where an earlier run's trial was taken over, this call is the first that shows which blocks are alike."""
        self.kind = self._kind_of(self, args, kwargs)
        set_compiled_call(self.block, None)
        self._apply()
        # None: it was sharded meanwhile, and its forward is compiled instead.
        call = compiled_call(self.block) or modules.eager_call(self.block)
        return call(*args, **kwargs)

    @override
    def switch(self, variant: str) -> None:
        """Runs the block eagerly while the variant is ``"off"``; what was compiled waits."""
        is_wanted = variant != OFF
        if is_wanted != self.is_wanted:
            self.is_wanted = is_wanted
            if self.is_applied:
                self._apply() if is_wanted else self._undo()


class ReplayedPatch(CompilePatch):
    """As its base class; where :data:`GRAPHS` is chosen, calls replay what was captured of the compiled block.

    Not by the compiler's own graphs, ``mode="reduce-overhead"``. Gradients in their memory are overwritten by the next
    step, so that accumulating them raises (https://github.com/pytorch/pytorch/issues/169545, open). Where no backward
    pass is to come, as in a validation, each compiled block begins a new generation of graphs, which invalidates what
    the block before has returned (https://github.com/pytorch/pytorch/issues/160281, open). And blocks could not share
    what is compiled, as a graph holds the parameters of one. Here blocks of a kind share it, and
    :class:`~lightning_accel.techniques.graphed_block.GraphedBlock` captures that, with all that it refuses.
    """

    variants = ("on", GRAPHS)

    def __init__(self, *args: Any, capture: Capture, run: TechniqueContext, **more: Any) -> None:
        super().__init__(*args, **more)
        self.why_not_replayed = _NOT_TRIED  # empty: calls may be replayed
        self._graphed, self._run = GraphedBlock(self.block, capture, self._given_back), run
        self._is_chosen = False

    @override
    def _apply(self) -> None:
        super()._apply()
        compiled = compiled_call(self.block)
        if self._is_chosen and not self.why_not_replayed and compiled is not None:
            self._graphed.pause(False)
            set_compiled_call(self.block, lambda *args, **kwargs: self._graphed.call(compiled, args, kwargs))

    @override
    def _undo(self) -> None:
        super()._undo()
        self._graphed.pause(True)

    @override
    def switch(self, variant: str) -> None:
        is_chosen = variant == GRAPHS
        if is_chosen != self._is_chosen:
            self._is_chosen = is_chosen
            if self.is_applied and self.is_wanted and variant != OFF:
                self._undo()
                self._apply()
        super().switch(variant)

    def try_replay(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Captures the compiled block on copies of the inputs of its call, and compares numbers with the eager one."""
        self.why_not_replayed = _NOT_TRIED
        with applied(self):
            self.why_not_replayed = self._graphed.tried(eager_call(self.block), args, kwargs).failure

    @property
    def remark(self) -> str:
        """What is in force, for the report."""
        return self.change + (f"; without a CUDA graph: {self.why_not_replayed}" if self.why_not_replayed else "")

    def _given_back(self, why: str) -> None:
        self.why_not_replayed = why
        self._run.revise(self.site, Verdict("kept", self.remark))


def alike(block: nn.Module, args: Any, kwargs: Any) -> Hashable:
    """What blocks of one kind have in common, inputs included: whatever a compiler may build into its code.

    What is not seen here, and yet differs, is seen by the compiler's own guards, and compiled once more.
    """
    plain = [
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, _PLAIN)
    ]
    tensors = [
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in [*block.named_parameters(), *block.named_buffers()]
    ]
    given = [(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors_in((args, kwargs)) if _is_dense(t)]
    classes = [type(module) for module in block.modules()]
    return repr((plain, tensors, given, torch.is_grad_enabled())), *classes


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def tried(patch: CompilePatch, args: Any, kwargs: dict[str, Any], *, for_numbers: bool = True) -> Verdict:
    """Compiles a block, forward and backward, on copies of the inputs of its call; kept where its numbers agree.

    Its edit is not applied, and is not afterwards. Not ``for_numbers`` where an earlier run's trial has compared them.
    """
    if (strange := changeable_argument(args, kwargs)) is not None:
        return Verdict("refused", f"takes a {strange}, which its trial would change")
    block = patch.block
    # All samples: another batch size would have the block compiled a second time, for any size, and slower. So would
    # switching its dropout off.
    trial = Trial(block, args, kwargs, with_gradients=torch.is_grad_enabled(), samples=None, has_dropout=True)
    is_cached = torch.is_autocast_cache_enabled()
    compiled = TrialSide(_call(block), state=lambda: _applied(patch, is_cached))
    found = trial.numbers(TrialSide(eager_call(block)), compiled) if for_numbers else trial.rehearse(compiled)
    return Verdict(found.kind, found.failure, measured=found.measured() if for_numbers else None)


def _call(block: nn.Module) -> Callable[..., Any]:
    return (lambda *args, **kwargs: block.forward(*args, **kwargs)) if is_gathered_by_hooks(block) else block.__call__


@contextmanager
def _applied(patch: Patch, is_cached: bool) -> Iterator[None]:
    # Trials keep no casts of weights; what is compiled under that switch would be compiled once more for the run.
    switch = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    with temporarily(*switch, is_cached), applied(patch):
        yield
