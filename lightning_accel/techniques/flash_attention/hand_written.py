"""Attention written by hand: TorchDynamo captures the module's graph, in which it is found and replaced.

The capture runs every time the module is called, as guards: other shapes, modes or flags than those seen are captured
anew, so that what runs is always a rewriting of what the module's own code would have done.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from typing_extensions import override

from lightning_accel.core.compiled import with_own_code
from lightning_accel.core.garbage import young_garbage_only
from lightning_accel.core.isolation import isolated
from lightning_accel.core.module_copies import silent_copy
from lightning_accel.core.patch import AttributePatch, applied
from lightning_accel.core.torch_private.autograd import saved_tensors_hooks
from lightning_accel.core.torch_private.compilation import (
    compiled_alone,
    draws_by_numpy,
    drop_weak_references,
    dynamo_is_off,
    outside_of_ddp,
)
from lightning_accel.core.torch_private.modes import has_modes, without_dispatch_modes, without_function_modes
from lightning_accel.techniques.flash_attention.backend_trial import Rehearsal
from lightning_accel.techniques.flash_attention.backends import Backend, attend
from lightning_accel.techniques.flash_attention.call import AttentionFinding
from lightning_accel.techniques.flash_attention.rewrite import fuse_attention
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward

# After so many modules needed a graph of their own, later ones get a new Capture: Dynamo tries all graphs of one at
# every call.
_MISSES = 3

_MAX_GRAPHS = 24  # of a capture: modes and kinds of shapes need a few, a counter in a forward one for every call
_MAX_PIECES = 8  # graphs captured in one call: each takes its time, and at every call takes time to be entered


class Capture:
    """One forward function, captured and rewritten. Modules that run it share it: their parameters are its inputs."""

    def __init__(self, forward: Forward) -> None:
        self.has_breaks = False  # it came in more than one graph, or none
        self.why_no_more: str | None = None  # it should be run
        self.findings: list[AttentionFinding] = []  # graph by graph
        self.graphs = 0  # how often it was captured
        self.misses = 0  # how often that was because another module differs from those before
        self._runs = self._graphs_before = 0  # of graphs in one call; captured before it
        self._backend: Backend | Rehearsal | None = None
        self._modes: Sequence[Any] = ()
        self._forward = forward
        self._captured: Forward = compiled_alone(with_own_code(forward), backend=self._rewritten)

    def call(
        self, backend: Backend | Rehearsal, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Computes the module's forward pass by a graph, or as it was written."""
        if not has_modes():
            return self._run(backend, (), module, args, kwargs)
        if dynamo_is_off():  # it would run what it captured as it was written: better under all modes then
            return self._forward(module, *args, **kwargs)
        # Under modes Dynamo gives a function up, or captures it anew: they are put around the graph itself.
        with without_function_modes() as function_modes, without_dispatch_modes() as dispatch_modes:
            # What runs between two graphs would not be seen by them.
            if not (self.has_breaks or any(mode.is_infra_mode() for mode in dispatch_modes)):
                return self._run(backend, [*dispatch_modes[::-1], *function_modes], module, args, kwargs)
        return self._forward(module, *args, **kwargs)

    def _run(self, by: Backend | Rehearsal, modes: Sequence[Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        before = self._backend, self._modes
        self._backend, self._modes, self._runs, self._graphs_before = by, modes, 0, self.graphs
        try:
            with outside_of_ddp():
                result = self._captured(module, *args, **kwargs)
        finally:  # torch keeps a capture until the process ends, and a backend holds the model
            self._backend, self._modes = before
        self.has_breaks = self.has_breaks or (self._runs != 1 and not dynamo_is_off())
        return result

    def _rewritten(self, graph: GraphModule, example_inputs: list[Tensor]) -> Forward:
        self.graphs += 1
        if self.graphs > _MAX_GRAPHS:
            reads = "something that its forward reads is another one at every call"
            self.why_no_more = f"captured {self.graphs} times: {reads}"
        if self.graphs - self._graphs_before > _MAX_PIECES:
            self.why_no_more = f"TorchDynamo captures its forward in more than {_MAX_PIECES} pieces"
            if isinstance(self._backend, Rehearsal):  # else the call that is under way ends as it has begun
                raise RuntimeError(self.why_no_more)
        if draws_by_numpy(graph):
            raise RuntimeError("it draws by NumPy, for which a capture would draw by torch")
        self.findings += fuse_attention(graph, self._compute)
        drop_weak_references(graph)
        forward = GraphModule(graph, graph.graph).forward  # Dynamo's own compiles lazily, through three more calls

        def run(*inputs: Any) -> Any:
            self._runs += 1
            if not self._modes:
                return forward(*inputs)
            with ExitStack() as stack:
                for mode in self._modes:
                    stack.enter_context(mode)
                return forward(*inputs)

        return run

    def _compute(self, original: Forward, fused: Forward, args: tuple[Any, ...]) -> Any:
        """One attention: what it was in the graph, what it is now, as a function of what computes it, and what of."""

        def by(backend: Backend) -> Forward:
            return lambda *args: fused(lambda call: attend(call, backend), *args)

        if isinstance(self._backend, Rehearsal):
            self._backend.rehearse(original, by, args, keeps_strides=False)  # what follows it was read in the graph
            return original(*args)
        assert self._backend is not None
        return by(self._backend)(*args)


class HandWrittenSite(AttentionSite):
    """A module whose ``forward`` spells attention out; ``shared`` are the captures of the model's other sites."""

    what = "hand-written attention"
    # Dynamo would capture hooks, or their absence, at one layer, and does not look for them at the next.
    ignored = ()

    def __init__(self, site: str, module: nn.Module, shared: dict[Forward, Capture] | None = None) -> None:
        super().__init__(site, module)
        self.capture: Capture | None = None
        self._shared = {} if shared is None else shared

    @override
    def run(self, by: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._missed = self.watched()
        if self._missed is not None:
            return original(self.module, *args, **kwargs)
        if not (isinstance(by, Rehearsal) and torch.is_grad_enabled() and saved_tensors_hooks() is not None):
            return self._run_captured(by, original, args, kwargs)
        # Somebody (gradient checkpointing) may run this call again, and what is recomputed must be computed by the
        # same operations: a copy is captured, which nobody watches.
        with isolated(self.module), applied(AttributePatch(self.site, "", self, "module", silent_copy(self.module))):
            self._run_captured(by, original, args, kwargs)
        return original(self.module, *args, **kwargs)

    def _run_captured(
        self, by: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.capture is not None:
            return self.capture.call(by, self.module, args, kwargs)
        capture = self._shared.get(original)
        if capture is None or capture.misses >= _MISSES:
            with young_garbage_only():
                self.capture = self._shared[original] = Capture(original)
                return self.capture.call(by, self.module, args, kwargs)
        self.capture = capture
        graphs = capture.graphs
        result = capture.call(by, self.module, args, kwargs)
        capture.misses += 0 < graphs < capture.graphs
        return result

    @override
    def nothing_found(self) -> str | None:
        if self._missed or self.capture is None or any(finding.form is not None for finding in self.capture.findings):
            return self._missed
        reasons = "; ".join(dict.fromkeys(finding.reason for finding in self.capture.findings))
        return reasons or "no attention in what TorchDynamo could capture of its forward"

    @override
    def given_up(self) -> str | None:
        return None if self.capture is None else self.capture.why_no_more

    @override
    def close(self) -> None:
        self.capture = None
