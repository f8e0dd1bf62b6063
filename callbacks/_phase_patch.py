"""The edit by which those who ask are told of the parts of a step."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_accel.callbacks._collectives_patch import CollectivesPatch, Listener, told_of
from lightning_accel.core.patch import MethodPatch, Patch, PatchSet
from lightning_accel.evidence.phase_names import BACKWARD, FORWARD, LOGGING, OPTIMIZER, TRANSFER
from lightning_accel.lightning.packages import Trainer

PARTS = {
    "batch_to_device": TRANSFER,
    "training_step": FORWARD,
    "backward": BACKWARD,
    "optimizer_step": OPTIMIZER,
}
"""Methods of a strategy, which Lightning's loop and manual optimization call alike, and what they are."""

_OF_LOGGERS = ("log_metrics", "save")


class _Edit:
    def __init__(self) -> None:
        self.patches = PatchSet()
        self.listeners: list[Listener] = []
        self.collectives = CollectivesPatch(self.listeners)  # applied while there are listeners, as it is everybody's
        self.holders = 0


class PartsPatch(Patch):
    """Tells listeners of the parts of a Trainer's steps, those of the dataloader left out.

    All who ask share one edit, made when the first of them applies it and undone by the last: they may end in another
    order than they began, and one edit upon another's would be left behind. Without a listener it is a call more.
    Of several ranks they are also told when one waits for others.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__("parts", "told of parts")
        self._strategy: Any = trainer.strategy
        self._has_others = trainer.world_size > 1
        self._owners = [(trainer.strategy, PARTS)]
        self._owners += [(logger, dict.fromkeys(_OF_LOGGERS, LOGGING)) for logger in trainer.loggers]  # type: ignore[misc]
        self._listeners: list[Listener] = []

    def tell(self, listener: Listener) -> None:
        """Has it told from now on, where the edit is applied."""
        edit = _EDITS.get(self._strategy)
        if edit is not None and listener not in edit.listeners:
            edit.listeners.append(listener)
            if self._has_others:
                edit.collectives.apply()

    def forget(self, listener: Listener) -> None:
        """Has it told no more."""
        edit = _EDITS.get(self._strategy)
        if edit is not None and listener in edit.listeners:
            edit.listeners.remove(listener)
            if not edit.listeners:
                edit.collectives.undo()

    @override
    def _apply(self) -> None:
        edit = _EDITS.get(self._strategy)
        if edit is None:
            edit = _Edit()
            for number, (owner, names) in enumerate(self._owners):
                for name, part in names.items():
                    if not isinstance(getattr(owner, name), types.MethodType):  # a mock, which is read while it runs
                        raise TypeError(f"{name} of {type(owner).__name__} is no method of it")
                    change = functools.partial(_telling, part, edit.listeners, weakref.ref(owner))
                    edit.patches.add(MethodPatch(f"{name} of {number}", "told of parts", owner, name, change))
            try:
                edit.patches.apply()
                if self._has_others:  # what cannot be edited is to show here, and not in a step
                    edit.collectives.apply()
                    edit.collectives.undo()
            except BaseException:
                edit.patches.undo()
                raise
            _EDITS[self._strategy] = edit
        edit.holders += 1

    @override
    def _undo(self) -> None:
        edit = _EDITS.get(self._strategy)
        if edit is None:
            return
        edit.holders -= 1
        if edit.holders == 0:
            edit.collectives.undo()
            edit.patches.undo()
            del _EDITS[self._strategy]


_EDITS: weakref.WeakKeyDictionary[Any, _Edit] = weakref.WeakKeyDictionary()


def _telling(
    part: str, listeners: list[Listener], owner: weakref.ref[Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    def method(caller: Any, *args: Any, **kwargs: Any) -> Any:
        if not listeners or owner() is not caller:  # a copy of it, which somebody made meanwhile
            return original(caller, *args, **kwargs)
        with told_of(part, listeners):
            return original(caller, *args, **kwargs)

    return method
