"""How a callback hears of a fit in which it is none of the Trainer's callbacks: those are the user's."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_accel.callbacks._tuner_searches import Searches
from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger
from lightning_accel.lightning.packages import LightningModule, Trainer
from lightning_accel.step.layers import Call, Layer


class DetachedCallback(Layer):
    """Calls the hooks of a callback in a fit, nearer to the step than the user's callbacks are.

    What the hooks do once a step or an epoch has ended comes after it. Whoever applies this layer calls the hooks for
    the end of the fit and for a checkpoint that is being saved.
    """

    name = "logger"

    def __init__(self, trainer: Trainer, module: LightningModule, callback: SpeedMemoryLogger) -> None:
        loop, strategy = trainer.fit_loop, trainer.strategy
        self._steps = loop.epoch_loop
        is_automatic = module.automatic_optimization
        optimization = self._steps.automatic_optimization if is_automatic else self._steps.manual_optimization
        # A single rank keeps nobody waiting.
        of_strategy = [*_BEFORE, *(["pre_backward"] if trainer.world_size > 1 else [])]
        super().__init__([(loop, (*_AFTER, *_AT_END)), (strategy, of_strategy), (optimization, ("run",))])
        self._trainer, self._module, self._callback, self._searches = trainer, module, callback, Searches(trainer)

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        if stage in _AFTER:
            result = call(*args, **kwargs)
            self._tell(_AFTER[stage])
            return result
        if stage == "pre_backward":
            self._tell("on_before_backward", *args, *kwargs.values())
        else:
            self._tell(_AT_END.get(stage, stage), *args, *kwargs.values())
        return call(*args, **kwargs)

    def around_run(self, call: Call, *args: Any) -> Any:
        # With as few calls as can be: it is this that a step costs with nothing to do.
        if self._searches.found and self._searches.are_running():
            return call(*args)
        callback = self._callback
        if (rests := callback.rests).left:
            outputs = call(*args)
            rests.left -= 1
            if not rests.left:
                callback.rested(outputs)
            return outputs
        batch = next(iter(args[-1].values()), None)  # the first of what `training_step` is called with
        begins = callback.on_train_batch_start
        if begins is not None:
            begins(self._trainer, self._module, batch, self._steps.batch_idx)
        outputs = call(*args)
        callback.on_train_batch_end(self._trainer, self._module, outputs, batch, -1)
        return outputs

    def _tell(self, hook: str, *values: Any) -> None:
        told = getattr(self._callback, hook)
        if told is not None and not self._searches.are_running():
            told(self._trainer, self._module, *values)


# Methods of Lightning's, and the hooks that are called after and before them.
_AFTER = {"on_run_start": "on_train_start", "on_advance_start": "on_train_epoch_start"}
_AT_END = {"on_advance_end": "on_train_epoch_end", "on_run_end": "on_train_end"}
_BEFORE = ("on_validation_start", "on_validation_end", "on_exception")
