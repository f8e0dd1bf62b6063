"""The :class:`SpeedMemoryLogger` of a fit whose Trainer has none."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_accel.callbacks._tuner_searches import Searches
from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger, speed_memory_loggers
from lightning_accel.lightning.packages import LightningModule, Trainer
from lightning_accel.settings import Plan
from lightning_accel.step.layers import Call, Layer

# Methods of Lightning's, and the hooks that are called after and before them.
_AFTER = {"on_run_start": "on_train_start", "on_advance_start": "on_train_epoch_start"}
_AT_END = {"on_advance_end": "on_train_epoch_end", "on_run_end": "on_train_end"}
_BEFORE = ("on_validation_start", "on_validation_end", "on_exception")


class AddedLogger(Layer):
    """A :class:`SpeedMemoryLogger` that runs during a fit but is not in the Trainer's list of callbacks.

    Its hooks are called nearer to the step than those of the user's callbacks; what they do once a step or an epoch
    has ended comes after it.

    Attributes:
        logger: The logger.
    """

    name = "logger"

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        loop, strategy = trainer.fit_loop, trainer.strategy
        self._steps = loop.epoch_loop
        is_automatic = module.automatic_optimization
        optimization = self._steps.automatic_optimization if is_automatic else self._steps.manual_optimization
        # A single rank keeps nobody waiting.
        of_strategy = [*_BEFORE, *(["pre_backward"] if trainer.world_size > 1 else [])]
        super().__init__([(loop, (*_AFTER, *_AT_END)), (strategy, of_strategy), (optimization, ("run",))])
        self.logger = SpeedMemoryLogger()
        self._trainer, self._module, self._searches = trainer, module, Searches(trainer)
        self.apply()

    @classmethod
    def where_wanted(cls, plan: Plan, trainer: Trainer, module: LightningModule) -> AddedLogger | None:
        """Makes one for the fit that begins. None if the plan logs nothing or the Trainer has a logger of this kind."""
        if not plan.report or trainer.barebones or speed_memory_loggers(trainer):
            return None
        return cls(trainer, module)

    def close(self) -> None:
        """Ends the record of the fit, and undoes the edits to the Trainer."""
        self.logger.on_fit_end(self._trainer, self._module)
        self.logger.teardown(self._trainer, self._module, "fit")
        self.undo()

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
        callback = self.logger
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
        told = getattr(self.logger, hook)
        if told is not None and not self._searches.are_running():
            told(self._trainer, self._module, *values)
