"""Attention written by hand: TorchDynamo captures the module's graph, in which it is found and replaced.

The capture runs every time the module is called, as guards: other shapes, modes or flags than those seen are captured
anew, so that what runs is always a rewriting of what the module's own code would have done.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.fx import GraphModule
from torch.nn.modules import module as module_globals
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from typing_extensions import override

from lightning_accel.core.isolation import isolated, silent_twin
from lightning_accel.techniques.flash_attention.backends import Backend, attend
from lightning_accel.techniques.flash_attention.call import AttentionCall
from lightning_accel.techniques.flash_attention.fused import Rehearse
from lightning_accel.techniques.flash_attention.rehearsal import Rehearsal
from lightning_accel.techniques.flash_attention.rewrite import fuse_attention
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward

_MISSES = 3  # by so many modules that differ, a capture is full: whoever comes next looks through all of it, every call

_MAX_GRAPHS = 24  # of a capture: modes and kinds of shapes need a few, a counter in a forward one for every call

Modes = tuple[list[TorchDispatchMode], list[TorchFunctionMode]]


class Capture:
    """One forward function, captured and rewritten. Modules that run it share it: their parameters are its inputs.

    Attributes:
        has_breaks: Whether it came in more than one graph, or none.
        left_alone: Why attention in it was not fused.
        fused: How many attentions were.
        graphs: How often it was captured.
        misses: How often that was because another module differs from those before.

    Args:
        forward: A function of ``(module, *args, **kwargs)``.
    """

    def __init__(self, forward: Forward) -> None:
        self.has_breaks = False
        self.left_alone: list[str] = []
        self.fused = 0
        self.graphs = 0
        self.misses = 0
        self._runs = 0  # of graphs, in one call
        self._backend: Backend | Rehearsal | None = None
        self._modes: Modes = ([], [])
        self._captured: Forward = torch.compile(_own_copy(forward), backend=self._rewritten)

    def call(
        self, backend: Backend | Rehearsal, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._backend, self._runs = backend, 0
        if DistributedDataParallel._active_ddp_module is None:
            result = self._captured(module, *args, **kwargs)
        else:
            with _outside_of_ddp():
                result = self._captured(module, *args, **kwargs)
        self.has_breaks = self.has_breaks or self._runs != 1
        return result

    def call_in_modes(
        self, backend: Backend | Rehearsal, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As :meth:`call`, when dispatch or function modes are active.

        Dynamo gives a function up for good that it meets under a dispatch mode (a FLOP counter, selective
        checkpointing), and captures anew under a function mode: they are put back around the graph itself.
        """
        with _modes_set_aside() as self._modes:
            try:
                return self.call(backend, module, args, kwargs)
            finally:
                self._modes = ([], [])

    def _rewritten(self, graph: GraphModule, example_inputs: list[Tensor]) -> Forward:
        self.graphs += 1
        found = fuse_attention(graph, self._attend, self._rehearsal)
        self.fused += found.fused
        self.left_alone += found.left_alone
        forward = graph.forward

        def run(*inputs: Any) -> Any:
            self._runs += 1
            if not any(self._modes):
                return forward(*inputs)
            with _in_modes(self._modes):
                return forward(*inputs)

        return run

    def _attend(self, call: AttentionCall) -> Tensor:
        assert isinstance(self._backend, Backend)
        return attend(call, self._backend)

    def _rehearsal(self) -> Rehearse | None:
        if not isinstance(self._backend, Rehearsal):
            return None
        rehearsal = self._backend

        def rehearse(original: Forward, fused: Forward, args: tuple[Any, ...]) -> Any:
            def by(backend: Backend) -> Forward:
                return lambda *args: fused(lambda call: attend(call, backend), *args)

            rehearsal.rehearse(original, by, args)
            return original(*args)

        return rehearse


class HandWrittenSite(AttentionSite):
    """A module whose ``forward`` spells attention out.

    Args:
        site: Its qualified name in the model.
        module: The module.
        shared: Captures of the model's other sites, by forward function.
    """

    what = "hand-written attention"

    def __init__(self, site: str, module: nn.Module, shared: dict[Forward, Capture] | None = None) -> None:
        super().__init__(site, module)
        self._shared = {} if shared is None else shared
        self._capture: Capture | None = None
        self._parts = list(module.modules())[1:]
        self._num_hooks = 0
        self._is_watched = False

    @override
    def fused(self, backend: Backend, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._captured_or_not(backend, original, args, kwargs)

    @override
    def rehearsed(self, rehearsal: Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _may_be_recomputed():
            return self._captured_or_not(rehearsal, original, args, kwargs)
        # What is recomputed must be computed by the same operations again: a copy is captured, which nobody watches.
        module = self.module
        try:
            with isolated(module):
                self.module = silent_twin(module)
                self._captured_or_not(rehearsal, original, args, kwargs)
        finally:
            self.module = module
        return original(module, *args, **kwargs)

    def _captured_or_not(
        self, backend: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        num_hooks = _num_hooks(self._parts)
        self._is_watched = _are_all_watched()
        if self._is_watched:  # which is to see the modules that the user wrote, and no graph of theirs
            return original(self.module, *args, **kwargs)
        if self._capture is None:
            self._num_hooks = num_hooks
            return self._first(backend, original, args, kwargs)
        # A hook that came later, on a softmax to see its weights say, is not in what was captured, and not guarded on.
        if num_hooks != self._num_hooks:
            return original(self.module, *args, **kwargs)
        return self._call(self._capture, backend, original, args, kwargs)

    def _first(
        self, backend: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        capture = self._shared.get(original)
        if capture is None or capture.misses >= _MISSES:
            capture = self._shared[original] = Capture(original)
        self._capture = capture
        graphs = capture.graphs
        result = self._call(capture, backend, original, args, kwargs)
        capture.misses += graphs > 0 and capture.graphs > graphs
        return result

    def _call(
        self,
        capture: Capture,
        backend: Backend | Rehearsal,
        original: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if _is_told_to_run_eagerly():
            return original(self.module, *args, **kwargs)
        dispatch_modes = _get_current_dispatch_mode_stack()
        if not dispatch_modes and not torch._C._len_torch_function_stack():
            return capture.call(backend, self.module, args, kwargs)
        # What runs between two graphs would not be seen by the modes.
        if capture.has_breaks or any(mode.is_infra_mode() for mode in dispatch_modes):
            return original(self.module, *args, **kwargs)
        return capture.call_in_modes(backend, self.module, args, kwargs)

    @override
    def nothing_found(self) -> str | None:
        if self._is_watched:
            return "hooks on all modules are to see its parts called"
        if self._capture is None or self._capture.fused:
            return None
        reasons = "; ".join(dict.fromkeys(self._capture.left_alone))
        return reasons or "no attention in what TorchDynamo could capture of its forward"

    @override
    def given_up(self) -> str | None:
        if self._capture is None or self._capture.graphs <= _MAX_GRAPHS:
            return None
        return f"captured {self._capture.graphs} times: something that its forward reads is another one at every call"

    @override
    def close(self) -> None:
        self._capture = None


def _may_be_recomputed() -> bool:
    """Whether somebody (gradient checkpointing) replaces what is saved, and may run this call again."""
    return torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _are_all_watched() -> bool:
    """Whether a hook on all modules is another's than torch's own, which count operations."""
    hooks = (*module_globals._global_forward_hooks.values(), *module_globals._global_forward_pre_hooks.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)


def _num_hooks(modules: list[nn.Module]) -> int:
    count = len(module_globals._global_forward_hooks) + len(module_globals._global_forward_pre_hooks)
    for module in modules:  # a loop, and no call that can be spared: this runs at every call of the site
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            count += len(module._forward_hooks) + len(module._forward_pre_hooks)
            count += len(module._backward_hooks) + len(module._backward_pre_hooks)
    return count


def _is_told_to_run_eagerly() -> bool:
    # What was captured would run as it was written: then better under all modes, for whoever said so and watches.
    return eval_frame._stance.stance == "force_eager" or torch._dynamo.config.disable


def _own_copy(forward: Forward) -> Forward:
    """A function of the same code with a code object of its own.

    Dynamo keeps what it captured, and its limit on how much of it, by code object, which all layers of a class share.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    function = forward if isinstance(forward, types.FunctionType) else call
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@contextmanager
def _outside_of_ddp() -> Iterator[None]:
    """Inside DistributedDataParallel's forward pass Dynamo cuts graphs up by DDP's buckets, through attention too."""
    active = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = None
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = active


@contextmanager
def _modes_set_aside() -> Iterator[Modes]:
    function_modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    for _ in function_modes:
        _pop_function_mode()  # type: ignore[no-untyped-call]
    try:
        with _disable_current_modes() as dispatch_modes:
            yield [mode for mode in dispatch_modes if mode is not None], function_modes
    finally:
        for mode in function_modes:
            _push_function_mode(mode)  # type: ignore[no-untyped-call]


@contextmanager
def _in_modes(modes: Modes) -> Iterator[None]:
    with ExitStack() as stack:
        for dispatch_mode in modes[0]:
            stack.enter_context(dispatch_mode)
        for function_mode in modes[1]:
            stack.enter_context(function_mode)
        yield
