"""The edit by which those who ask are told when this rank waits for others."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import distributed
from typing_extensions import override

from lightning_accel.core.patch import AttributePatch, Patch, PatchSet
from lightning_accel.core.torch_private import is_in_backward
from lightning_accel.evidence.parts import COMMUNICATION

_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
)


class Listener(Protocol):
    """Who is told."""

    def enter(self, part: str) -> None:
        """A part begins."""

    def leave(self) -> None:
        """The one that began last ends."""


class CollectivesPatch(Patch):
    """Tells of collective calls of ``torch.distributed``, FSDP's among them, and of CUDA streams that wait for one.

    The calls of a backward pass are told of, too, on whichever thread of autograd. FSDP on a GPU calls ahead, on
    streams of its own: there a call takes no time, and what does is that the training's stream waits for it. What
    DistributedDataParallel does in C++, and functional collectives, as sharded tensors call them, go by unseen.

    Args:
        listeners: Who is told; may change while the edit is there.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        super().__init__("torch.distributed", "told of communication")
        self._listeners, self._patches = listeners, PatchSet()
        self._thread = 0

    @override
    def _apply(self) -> None:
        self._thread = threading.get_ident()
        self._patches = PatchSet()
        for name in _COLLECTIVES:
            if (call := getattr(distributed, name, None)) is not None:  # some are there from torch 2.13 on
                told = self._telling(call, lambda: True)
                self._patches.add(AttributePatch(name, "told of", distributed, name, told))
        wait = self._telling(torch.cuda.Stream.wait_event, _is_asked_by_torch_distributed)
        self._patches.add(AttributePatch("wait_event", "told of", torch.cuda.Stream, "wait_event", wait))
        self._patches.apply()

    @override
    def _undo(self) -> None:
        self._patches.undo()

    def _telling(self, original: Callable[..., Any], is_communication: Callable[[], bool]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_of_training = threading.get_ident() == self._thread or is_in_backward()
            if not is_of_training or not is_communication() or _is_capturing():
                return original(*args, **kwargs)
            told = tuple(self._listeners)
            for listener in told:
                listener.enter(COMMUNICATION)
            try:
                return original(*args, **kwargs)
            finally:
                for listener in reversed(told):
                    listener.leave()

        return call


def _is_capturing() -> bool:
    """Whether a CUDA graph is being made, in which no time passes, and which a mark of ours would spoil."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _is_asked_by_torch_distributed() -> bool:
    """Whether it is what calls us, or what calls ``torch.cuda.Stream.wait_stream``, which calls us."""
    caller = sys._getframe(2)
    callers = (caller, caller.f_back)  # none above a hook on a thread of autograd
    return any(one is not None and _is_of_torch_distributed(one.f_globals.get("__name__")) for one in callers)


def _is_of_torch_distributed(module: Any) -> bool:
    return isinstance(module, str) and module.startswith("torch.distributed.")
