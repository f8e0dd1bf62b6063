"""One compiled block whose kernels are replayed from a CUDA graph: a choice of its own beside the compiled block.

Not by the compiler's own graphs, ``mode="reduce-overhead"``. Gradients in their memory are overwritten by the next
step, so that accumulating them raises (https://github.com/pytorch/pytorch/issues/169545, open). Where no backward pass
is to come, as in a validation, each compiled block begins a new generation of graphs, which invalidates what the block
before has returned (https://github.com/pytorch/pytorch/issues/160281, open). And blocks could not share what is
compiled, as a graph holds the parameters of one. Here blocks of a kind share it, and
:class:`~lightning_accel.techniques.graphed_block.GraphedBlock` captures that, with all that it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_accel.core.compiled import eager_call
from lightning_accel.core.patch import applied
from lightning_accel.core.torch_private.compilation import compiled_call, set_compiled_call
from lightning_accel.techniques.arms import OFF
from lightning_accel.techniques.compiled_blocks import CompilePatch
from lightning_accel.techniques.graphed_block import Capture, Forward, GraphedBlock
from lightning_accel.techniques.technique_context import TechniqueContext, Verdict

GRAPHS = "graphs"
"""The variant."""

SETTLE = 2
"""Steps after a switch: the memory of graphs is given back when they are off, so that they are captured anew."""

_NOT_TRIED = "not captured yet"


class ReplayedPatch(CompilePatch):
    """As its base class; where :data:`GRAPHS` is chosen, calls replay what was captured of the compiled block."""

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
            set_compiled_call(self.block, self._replaying(compiled))

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

    def _replaying(self, compiled: Forward) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._graphed.call(compiled, args, kwargs)
