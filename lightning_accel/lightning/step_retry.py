"""The retry layer: undoes the effects of a failed step, and runs it again with fewer edits or less memory.

No technique is worth the loss of a run. Whatever a step raises, but for events outside of it, this layer restores what
the step has changed (random streams, buffers and all else) and repeats the step after one fallback after the other
(:mod:`~lightning_accel.lightning.fallbacks`). The last fallback is the step as the user wrote it. If that fails as
well, the error is the user's own, and is raised alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from lightning_accel.core.checks import SettingError
from lightning_accel.core.oom_errors import free_what_failed, is_out_of_memory, without_frames
from lightning_accel.core.report import AccelError, EditError
from lightning_accel.core.user_frames import is_event
from lightning_accel.lightning.autocast_precision import AutocastPrecision
from lightning_accel.lightning.fallbacks import Failure, suspects, with_fewer_edits, with_less_memory
from lightning_accel.lightning.finite_steps import NOT_FINITE, FiniteSteps
from lightning_accel.lightning.oom_recovery import OomRecovery
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.lightning.step_outputs import DRAWS_GOING_BACKWARD, StepOutputs
from lightning_accel.lightning.step_snapshot import Attempt, SmallState, begins_gradients
from lightning_accel.step.layers import STEPS, Call, Layer

# The end of a loader that the step itself reads, and errors that we raise for the user. Events are no failures, either.
_NOT_OURS = (StopIteration, SettingError, AccelError)


class StepRetry(Layer):
    """Runs the failed steps of one run again.

    A step cannot be repeated if an optimizer has stepped in it, if its gradients were added to older ones, or if it
    reads its loader itself. Its exception then passes through unchanged.
    """

    name = "retry"

    def __init__(
        self, engine: RunEngine, precision: AutocastPrecision, outputs: StepOutputs, memory: OomRecovery
    ) -> None:
        self._engine, self._module, self._precision = engine, engine.module, precision
        self._outputs, self._memory = outputs, memory
        engine.can_repeat_step = self._can_repeat
        trainer = engine.module.trainer
        self._is_one_of_several = trainer.world_size > 1
        self._finite, self._is_read = FiniteSteps(engine.module, precision), False
        self._may_read = not self._is_one_of_several and precision.chosen_dtype is torch.bfloat16
        # DistributedDataParallel calls the module's own step after it has sent the buffers of rank 0 to all ranks.
        companions = [_AfterBroadcast(self)] if self._is_one_of_several else []
        super().__init__([(trainer.strategy, STEPS), (precision, ("backward", "optimizer_step"))], companions)
        self._attempt: Attempt | None = None
        self._is_stepping = False
        self._gone_backward: Attempt | None = None  # the attempt whose gradients an optimizer is about to apply
        self._state: SmallState | None = None

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        trains = stage == "training_step"
        self._attempt = None
        if not (self._engine.alters_steps or (trains and self._memory.may_run_out((args, kwargs)))):
            return call(*args, **kwargs)
        outputs = self._step(trains, call, args, kwargs)
        if not (trains and self._module.automatic_optimization):
            self._attempt = None  # frees its batch before the next one comes
        return outputs

    def keep_again(self) -> None:
        """Takes the attempt's snapshot again, since rank 0 has sent its buffers after the step began."""
        if self._attempt is not None:
            self._attempt.keep_again()

    def _can_repeat(self) -> bool:
        """Returns whether the current step can be repeated if an :class:`EditError` is raised in it."""
        return self._attempt is not None and not self._is_one_of_several and self._attempt.can_be_repeated()

    # -- the stages of a step --------------------------------------------------------------------------------------

    def _step(self, trains: bool, call: Call, args: Any, kwargs: Any) -> Any:
        try:
            state = None
            if not self._engine.is_trying:
                state = self._state = self._state or SmallState(self._module)
            attempt = self._attempt = Attempt(
                call, (args, kwargs), self._module, state, is_alone=not self._is_one_of_several
            )
        except Exception:  # state that cannot be copied cannot be restored: the step runs once, as the user's own
            self._state = None
            return call(*args, **kwargs)
        self._is_read = self._may_read and self._finite.reads()
        try:
            outputs = call(*args, **kwargs)
            if self._is_read and not self._finite.is_finite(outputs) and self._can_repeat():
                outputs = self._in_float32(attempt)
            return outputs
        except Exception as error:
            has_gone_backward, self._attempt = self._attempt is not attempt, None
            if has_gone_backward or not self._may_repeat(attempt, error):
                raise
            failure = self._failure(attempt, error, trains=trains)
        # Outside of the handler, so that an error of the user's own does not carry ours as its context.
        outputs = self._run_again(failure, lambda repeat: repeat())
        self._attempt = attempt  # the backward pass may still raise
        return outputs

    def _in_float32(self, attempt: Attempt) -> Any:
        """Repeats a step whose loss was not finite. If float32 makes it finite, the run stays in float32."""
        attempt.take_back()
        args, kwargs = attempt.given
        with self._precision.in_float32():
            outputs = attempt.step(*args, **kwargs)
        self._is_read = False
        if self._finite.is_finite(outputs):
            self._engine.revert("precision", NOT_FINITE, "refused")
            self._engine.report.note(f"{NOT_FINITE}: its step, and the rest of the run, are in float32")
        else:
            self._finite.was_futile()
        return outputs

    def around_backward(self, call: Call, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Runs a backward pass. If it raises, both the step and the backward pass run again."""
        if self._attempt is None or not self._module.automatic_optimization:
            # Without an attempt, no edit is in force. With manual optimization, the backward pass is part of the step.
            is_read = self._attempt is not None and self._is_read
            if is_read and not self._finite.is_finite(loss) and self._can_repeat():
                raise EditError("precision", NOT_FINITE)
            call(loss, *args, **kwargs)
            return
        attempt, self._attempt = self._attempt, None
        trainer = self._module.trainer
        try:
            call(loss, *args, **kwargs)
            is_first = begins_gradients(trainer) and not self._is_one_of_several
            if is_first and self._outputs.has_drawn_laid_out() and attempt.can_be_repeated():
                raise EditError("memory_format", DRAWS_GOING_BACKWARD)
            if is_first and self._is_read and not self._finite.has_finite_gradients() and attempt.can_be_repeated():
                raise EditError("precision", NOT_FINITE)
            self._gone_backward = attempt if self._is_stepping else None
            return
        except Exception as error:
            if not (self._gradients_are_new() and self._may_repeat(attempt, error)):
                raise
            failure = self._failure(attempt, error)
        self._precision.let_go_of(loss)  # the Trainer still holds its graph

        def again(repeat: Call) -> None:
            self._module.zero_grad(set_to_none=True)
            outputs = repeat()
            # As Lightning treats the outputs of a step.
            repeated = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            call(self._precision.scaled(repeated / trainer.accumulate_grad_batches), *args, **kwargs)

        self._run_again(failure, again)

    def around_optimizer_step(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Runs an optimizer's step, within which Lightning calls the module's step and the backward pass.

        If the optimizer raises after these, and has written to no parameter, all three run again.
        """
        self._is_stepping = True
        try:
            return call(*args, **kwargs)
        except Exception as error:
            attempt = self._gone_backward
            if attempt is None or is_out_of_memory(error):
                raise
            if not (self._gradients_are_new() and self._may_repeat(attempt, error)):
                raise
            failure = self._failure(attempt, error)
        finally:
            self._is_stepping, self._gone_backward = False, None
        return self._run_again(failure, lambda repeat: call(*args, **kwargs))

    # -- whether a step may run again ------------------------------------------------------------------------------

    def _may_repeat(self, attempt: Attempt, error: Exception) -> bool:
        if isinstance(error, _NOT_OURS) or is_event(error):
            return False
        if not (isinstance(error, EditError) or is_out_of_memory(error) or self._engine.alters_steps):
            return False
        # Other ranks wait for the verdicts of this rank's trial, and for nothing else.
        is_alone = not self._is_one_of_several or self._engine.is_trying
        if is_out_of_memory(error) and (self._memory.lets_pass or not is_alone):
            return False
        return attempt.can_be_repeated()

    def _gradients_are_new(self) -> bool:
        # Ranks wait for each other in a backward pass. So one rank alone cannot repeat it.
        if not self._module.automatic_optimization or self._is_one_of_several:
            return False
        if not begins_gradients(self._module.trainer):
            self._memory.why = "its gradients were added to those of earlier batches and cannot be told apart"
            return False
        return True

    def _failure(self, attempt: Attempt, error: Exception, *, trains: bool = True) -> Failure:
        lacks_memory = is_out_of_memory(error) and not self._is_one_of_several
        if lacks_memory:
            self._memory.saw(error)  # while the frames of the error still exist
        suspected = suspects(error)
        return Failure(attempt, without_frames(error), suspected, lacks_memory=lacks_memory, trains=trains)

    # -- the loop --------------------------------------------------------------------------------------------------

    def _run_again(self, failure: Failure, run: Call) -> Any:
        """Runs a failed step again, after one fallback after the other.

        Raises:
            Exception: The last error of the step, if no fallback is left.
        """
        args, kwargs = failure.attempt.given
        decisions = dict(self._engine.decisions)
        if failure.lacks_memory:
            fallbacks = with_less_memory(failure, self._engine, self._memory)
        else:
            fallbacks = with_fewer_edits(failure, self._engine, self._outputs)
        while True:
            if failure.lacks_memory:
                self._engine.apply_updates()
                free_what_failed(self._module.device)
            try:
                failure.attempt.take_back()
            except Exception:  # a repetition would start from another state than the step
                raise failure.error from None
            fallback = next(fallbacks, None)
            if fallback is None:
                raise failure.error
            try:
                with fallback.context:
                    outputs = run(lambda: failure.attempt.step(*args, **kwargs))
            except Exception as error:
                if fallback.is_last and _are_alike(error, failure.error):  # which says nothing of the edits
                    self._engine.decisions.clear()
                    self._engine.decisions.update(decisions)
                if fallback.is_last or not self._may_go_on(failure, error):
                    raise
                continue
            fallback.succeeded()
            if failure.lacks_memory:
                self._memory.ran()
            return outputs

    def _may_go_on(self, failure: Failure, error: Exception) -> bool:
        """Returns whether the next fallback may follow after the step has raised again."""
        if isinstance(error, _NOT_OURS) or is_event(error) or not failure.attempt.can_be_repeated():
            return False
        if not failure.lacks_memory:
            return not is_out_of_memory(error)
        if not is_out_of_memory(error):
            return self._memory.take_off(error)
        self._memory.saw(error)
        failure.error = without_frames(error)
        return True


def _are_alike(error: Exception, other: Exception) -> bool:
    return type(error) is type(other) and str(error) == str(other)


class _AfterBroadcast(Layer):
    """A layer around the module's own steps, which follow the broadcast of rank 0's buffers."""

    name = "retry"

    def __init__(self, retry: StepRetry) -> None:
        super().__init__([(retry._module, STEPS)])
        self._retry = retry

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        self._retry.keep_again()
        return call(*args, **kwargs)
