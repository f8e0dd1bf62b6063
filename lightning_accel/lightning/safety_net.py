"""The net below a run: a step that raises with edits of ours in force is run once more as the user wrote it.

No technique is worth a run. Whatever is raised in a step, everything is taken back, random streams, buffers and what
else the step had changed, and the step is repeated without us; the report says what happened. Only if that raises as
well is it the user's own error, which they then get alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.core.checks import SettingError
from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.core.report import AccelError
from lightning_accel.core.trial import one_line
from lightning_accel.engine import Engine
from lightning_accel.lightning.attempt import Attempt, SmallState, Step

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")

# The end of a loader that the step itself reads, and what we tell the user on purpose.
_NOT_OURS = (StopIteration, SettingError, AccelError)


class SafetyNet:
    """Guards the steps of one run.

    A step cannot be repeated where an optimizer has stepped in it, or gradients were added to older ones; nor one that
    reads its loader itself. Its exception then goes through as it is.

    Args:
        module: The run's module.
        engine: At work on it.
        is_ours: Whether anything of ours is in force in the next step.
        without_precision: Takes the choice of a precision back around a repeated step; given what that first raised.
        yields: Told what a step raised: takes back an arm that was on trial in it, and says whether there was one.
    """

    def __init__(
        self,
        module: LightningModule,
        engine: Engine,
        is_ours: Callable[[], bool],
        without_precision: Callable[[Exception], AbstractContextManager[Any]],
        yields: Callable[[Exception], bool] = lambda error: False,
    ) -> None:
        self._module = module
        self._engine = engine
        self._is_ours = is_ours
        self._without_precision = without_precision
        self._yields = yields
        self._has_yielded = False  # in the latest repetition
        self._attempt: Attempt | None = None
        self._state: SmallState | None = None

    def patches(self, strategy: Strategy) -> Iterator[Patch]:
        """The edits that put every step of ``strategy`` above the net."""
        for name in _STEPS:
            goes_backward = name == "training_step" and self._module.automatic_optimization
            guarded = functools.partial(self._guarded, goes_backward)
            yield MethodPatch(f"{name}, guarded", "above a net", strategy, name, guarded)
            # DistributedDataParallel calls the module's own step after it has sent rank 0's buffers to all.
            if self._module.trainer.world_size > 1:
                yield MethodPatch(f"{name}, kept again", "above a net", self._module, name, self._kept_again)

    def _guarded(self, goes_backward: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
            outputs = self._run(functools.partial(original, strategy), args, kwargs)
            if not goes_backward:
                self._attempt = None  # its batch is not to be there beside the next one
            return outputs

        return step

    def _kept_again(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
            if self._attempt is not None:
                self._attempt.keep_again(self._state)
            return original(module, *args, **kwargs)

        return step

    @property
    def is_spread(self) -> bool:
        """Whether the latest step can be repeated: not where nothing of ours is in force."""
        return self._attempt is not None

    def backward(self, run: Callable[[], None], run_repeated: Callable[[Any], None]) -> None:
        """The backward pass after a step with a net.

        Where it raises because of an edit, the step is repeated, and ``run_repeated`` goes backward from its outputs.
        """
        attempt, self._attempt = self._attempt, None
        assert attempt is not None, "no net is spread"
        try:
            run()
            return
        except Exception as error:
            if not (self._gradients_are_new() and self._may_repeat(attempt, error)):
                raise
            failure = _without_frames(error)
        self._module.zero_grad(set_to_none=True)
        run_repeated(self._repeat(attempt, failure))
        self._tell(failure)

    def _run(self, step: Step, args: Any, kwargs: Any) -> Any:
        self._attempt = None
        if not self._is_ours():
            return step(*args, **kwargs)
        try:
            state = None
            if not self._engine.is_trying:
                state = self._state = self._state or SmallState(self._module)
            attempt = self._attempt = Attempt(step, (args, kwargs), self._module, state)
        except Exception:  # what cannot be copied cannot be brought back: a step without a net is the user's own
            self._state = None
            return step(*args, **kwargs)
        try:
            return step(*args, **kwargs)
        except Exception as error:
            has_gone_backward, self._attempt = self._attempt is not attempt, None
            if has_gone_backward or not self._may_repeat(attempt, error):
                raise
            failure = _without_frames(error)
        # Outside of the handler, so that an error of the user's does not drag ours along.
        outputs = self._repeat(attempt, failure)
        self._tell(failure)
        return outputs

    def _may_repeat(self, attempt: Attempt, error: Exception) -> bool:
        return not isinstance(error, _NOT_OURS) and attempt.can_be_repeated()

    def _gradients_are_new(self) -> bool:
        # Several ranks wait for each other in a backward pass: there is no second one for a single rank.
        trainer, module = self._module.trainer, self._module
        return module.automatic_optimization and trainer.accumulate_grad_batches == 1 and trainer.world_size == 1

    def _repeat(self, attempt: Attempt, error: Exception) -> Any:
        try:
            attempt.take_back()
        except Exception:  # a repetition would not start from where the step did
            raise error from None
        args, kwargs = self._engine.predictions(attempt.given)  # the batch, too, as the user's loader gave it
        self._has_yielded = self._yields(error)
        if self._has_yielded:
            return attempt.step(*args, **kwargs)
        remark = f"a step raised {one_line(error)}"
        self._engine.stand_aside(remark)
        model = self._module.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # No buffers are sent again: the other ranks are past that. DDP's forward sets this for the next one.
            model.require_forward_param_sync = False
        with self._without_precision(error):
            outputs = attempt.step(*args, **kwargs)
        self._engine.join_after_failure()
        return outputs

    def _tell(self, error: Exception) -> None:
        if self._has_yielded:
            self._engine.report.note(f"a step with an arm on trial raised {one_line(error)}, and ran without it")
            return
        remark = f"a step raised {one_line(error)}, and ran when it was repeated without the edits of this plugin"
        self._engine.degrade(f"{remark}: all of them are taken back")


def _without_frames(error: Exception) -> Exception:
    """The exception without what the frames it came through hold: the failed step's activations."""
    error.__cause__ = error.__context__ = None
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    return error.with_traceback(None)
