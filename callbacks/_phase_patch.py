"""The layer that tells listeners which phase of a step begins and ends."""

from __future__ import annotations

import types
from typing import Any

from typing_extensions import override

from lightning_accel.callbacks._collectives_patch import SHARED, Listener, told_of
from lightning_accel.evidence.phase_names import BACKWARD, FORWARD, LOGGING, OPTIMIZER, TRANSFER
from lightning_accel.lightning.packages import Trainer
from lightning_accel.step.layers import Call, Layer

PARTS = {
    "batch_to_device": TRANSFER,
    "training_step": FORWARD,
    "backward": BACKWARD,
    "optimizer_step": OPTIMIZER,
}
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
