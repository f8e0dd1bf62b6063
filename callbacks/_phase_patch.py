"""The edits that tell listeners which phase of a step begins and ends, and when this rank waits for others."""

from __future__ import annotations

import functools
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import distributed
from typing_extensions import override

from lightning_accel.core.patch import AttributePatch, Patch, PatchSet
from lightning_accel.core.torch_private.autograd import is_in_backward
from lightning_accel.evidence.phase_names import BACKWARD, COMMUNICATION, FORWARD, LOGGING, OPTIMIZER, TRANSFER
from lightning_accel.lightning.packages import Trainer
from lightning_accel.step.layers import Call, Layer

PARTS = {"batch_to_device": TRANSFER, "training_step": FORWARD, "backward": BACKWARD, "optimizer_step": OPTIMIZER}
"""The methods of a strategy that Lightning's loop and manual optimization call alike, and the phase of each."""

_OF_LOGGERS = dict.fromkeys(("log_metrics", "save"), LOGGING)
_PHASES = PARTS | _OF_LOGGERS


class PartsPatch(Layer):
    """Tells listeners of the phases of a Trainer's steps, except for the fetch of a batch.

    If several ranks train, it also tells when this rank waits for others. Without a listener, a phase costs a call.

    Raises:
        TypeError: When it is applied, if a logger's method is none: a mock, which is read while it runs.
    """

    name = "timeline"

    def __init__(self, trainer: Trainer) -> None:
        loggers = [(logger, tuple(_OF_LOGGERS)) for logger in trainer.loggers]
        super().__init__([(trainer.strategy, tuple(PARTS)), *loggers])
        self._has_others = trainer.world_size > 1
        self._listeners: list[Listener] = []

    def tell(self, listener: Listener) -> None:
        """Tells a listener from now on, if the layer is applied."""
        if self.is_applied and listener not in self._listeners:
            self._listeners.append(listener)
            if self._has_others:
                SHARED.tell(listener)

    def forget(self, listener: Listener) -> None:
        """Tells a listener no more."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            SHARED.forget(listener)

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        if not self._listeners:
            return call(*args, **kwargs)
        with told_of(_PHASES[stage], self._listeners):
            return call(*args, **kwargs)

    @override
    def _apply(self) -> None:
        for owner, method in self._targets:
            if not isinstance(getattr(owner, method), types.MethodType):
                raise TypeError(f"{method} of {type(owner).__name__} is no method of it")
        super()._apply()
        if self._has_others:  # what cannot be edited is to show here, and not in a step
            SHARED.apply()
            SHARED.undo()

    @override
    def _undo(self) -> None:
        for listener in list(self._listeners):
            self.forget(listener)
        super()._undo()


_RETURNS_WORK = re.compile(r"-> .*\bWork\b")  # a collective call, by the signature in its docstring


class Listener(Protocol):
    """Who is told."""

    def enter(self, part: str) -> None:
        """A part begins."""

    def leave(self) -> None:
        """The one that began last ends."""


@contextmanager
def told_of(part: str, listeners: Sequence[Listener]) -> Iterator[None]:
    """Tells those who listen at its begin of a part, and of its end."""
    told = tuple(listeners)
    for listener in told:
        listener.enter(part)
    try:
        yield
    finally:
        for listener in reversed(told):
            listener.leave()


class CollectivesPatch(Patch):
    """Tells of collective calls of ``torch.distributed``, FSDP's among them, and of CUDA streams that wait for one.

    What the functions of ``torch.distributed`` call is edited, and not these, which compiled code looks at. The calls
    of a backward pass are told of, too, on whichever thread of autograd. FSDP on a GPU calls ahead, on streams of its
    own: there a call takes no time, and what does is that the training's stream waits for it. What
    DistributedDataParallel does in C++, and functional collectives, as sharded tensors call them, go by unseen, and so
    do process groups that are written in Python.

    A process has one of it, :data:`SHARED`: listeners may end in another order than they began, and one edit upon
    another's would be left behind.
    """

    def __init__(self) -> None:
        super().__init__("torch.distributed", "told of communication")
        self._listeners: list[Listener] = []
        self._patches = PatchSet()
        self._thread = 0

    def tell(self, listener: Listener) -> None:
        """Tells a listener from now on."""
        self._listeners.append(listener)
        self.apply()

    def forget(self, listener: Listener) -> None:
        """Tells a listener no more."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            self.undo()

    @override
    def _apply(self) -> None:
        self._thread = threading.get_ident()
        self._patches = PatchSet()
        if not distributed.is_available() or type(distributed.group.WORLD) is not distributed.ProcessGroup:
            return
        self._add(distributed.Work, "wait")
        for name, method in vars(distributed.ProcessGroup).items():
            if callable(method) and _RETURNS_WORK.search(method.__doc__ or ""):
                self._add(distributed.ProcessGroup, name)
        self._add(torch.cuda.Stream, "wait_event", _is_asked_by_torch_distributed)
        self._patches.apply()

    def _add(self, kind: Any, name: str, is_communication: Callable[[], bool] = lambda: True) -> None:
        told = self._telling(getattr(kind, name), is_communication)
        self._patches.add(AttributePatch(f"{kind.__name__}.{name}", "told of", kind, name, told))

    @override
    def _undo(self) -> None:
        self._patches.undo()

    def _telling(self, original: Callable[..., Any], is_communication: Callable[[], bool]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_of_training = threading.get_ident() == self._thread or is_in_backward()
            if not is_of_training or not is_communication() or _is_capturing():
                return original(*args, **kwargs)
            with told_of(COMMUNICATION, self._listeners):
                return original(*args, **kwargs)

        return call


SHARED = CollectivesPatch()
"""The edit of this process. It is made while there are listeners."""


def _is_capturing() -> bool:
    """Whether a CUDA graph is being made, in which no time passes, and which a mark of ours would spoil."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _is_asked_by_torch_distributed() -> bool:
    """Whether it is what calls us, or what calls ``torch.cuda.Stream.wait_stream``, which calls us."""
    caller = sys._getframe(2)
    callers = [one for one in (caller, caller.f_back) if one is not None]  # none above a hook on a thread of autograd
    return any(str(one.f_globals.get("__name__")).startswith("torch.distributed.") for one in callers)
