"""The net below a run: a step that raises with edits of ours in force is run once more as the user wrote it.

No technique is worth a run. Whatever is raised in a step, everything is taken back, random streams, buffers and what
else the step had changed, and the step is repeated without us; the report says what happened. Only if that raises as
well is it the user's own error, which they then get alone.

A step that has run out of memory would need more without us. It is repeated with what needs less
(:mod:`~lightning_accel.lightning.out_of_memory`), as often as there is something left to put on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch.nn.parallel import DistributedDataParallel

from lightning_accel.core.checks import SettingError
from lightning_accel.core.out_of_memory import free_what_failed, is_out_of_memory, without_frames
from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.core.report import AccelError, EditError
from lightning_accel.core.trial import one_line
from lightning_accel.engine import Engine
from lightning_accel.lightning.attempt import Attempt, SmallState, Step, begins_gradients
from lightning_accel.lightning.out_of_memory import STEPS, MemoryAnswers

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
        memory: What there is against a lack of memory.
        yields: Told what a step raised: takes back an arm that was on trial in it, and says whether there was one.
        gives_up: Told that all edits are about to be taken back.
    """

    def __init__(
        self,
        module: LightningModule,
        engine: Engine,
        is_ours: Callable[[], bool],
        without_precision: Callable[[Exception], AbstractContextManager[Any]],
        memory: MemoryAnswers,
        yields: Callable[[Exception], bool] = lambda error: False,
        gives_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._module = module
        self._engine = engine
        self._is_ours = is_ours
        self._without_precision = without_precision
        self._memory = memory
        self._yields, self._gives_up = yields, gives_up
        self._has_yielded = False  # in the latest repetition
        self._attempt: Attempt | None = None
        self._state: SmallState | None = None

    def patches(self, strategy: Strategy) -> Iterator[Patch]:
        """The edits that put every step of ``strategy`` above the net."""
        for name in STEPS:
            guarded = functools.partial(self._guarded, name == "training_step")
            yield MethodPatch(f"{name}, guarded", "above a net", strategy, name, guarded)
            # DistributedDataParallel calls the module's own step after it has sent rank 0's buffers to all.
            if self._module.trainer.world_size > 1:
                yield MethodPatch(f"{name}, kept again", "above a net", self._module, name, self._kept_again)

    def _guarded(self, trains: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
            outputs = self._run(trains, functools.partial(original, strategy), args, kwargs)
            if not (trains and self._module.automatic_optimization):
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

    def backward(
        self, run: Callable[[], None], run_repeated: Callable[[Any], None], let_go: Callable[[], None]
    ) -> None:
        """The backward pass after a step with a net.

        Where it raises because of an edit, the step is repeated, and ``run_repeated`` goes backward from its outputs.
        ``let_go`` frees the graph of the first time, whose loss the Trainer holds.
        """
        attempt, self._attempt = self._attempt, None
        assert attempt is not None, "no net is spread"
        try:
            run()
            return
        except Exception as error:
            if not (self._gradients_are_new(error) and self._may_repeat(attempt, error)):
                raise
            lacks_memory = self._lacks_memory(error)
            failure = without_frames(error)
        let_go()

        def again(repeat: Callable[[], Any]) -> None:
            self._module.zero_grad(set_to_none=True)
            run_repeated(repeat())

        if lacks_memory:
            self._answer(attempt, failure, again, trains=True)
            return
        again(lambda: self._repeat(attempt, failure))
        self._tell(failure)

    def _run(self, trains: bool, step: Step, args: Any, kwargs: Any) -> Any:
        self._attempt = None
        if not (self._is_ours() or (trains and self._memory.may_run_out((args, kwargs)))):
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
            lacks_memory = self._lacks_memory(error)
            failure = without_frames(error)
        # Outside of the handler, so that an error of the user's does not drag ours along.
        if lacks_memory:
            outputs = self._answer(attempt, failure, lambda repeat: repeat(), trains=trains)
            self._attempt = attempt  # memory may run out in the backward pass yet
            return outputs
        outputs = self._repeat(attempt, failure)
        self._tell(failure)
        return outputs

    def _may_repeat(self, attempt: Attempt, error: Exception) -> bool:
        if isinstance(error, _NOT_OURS) or not (is_out_of_memory(error) or self._is_ours()):
            return False
        # Of several ranks, the others wait for what a trial of this one has found, and else for nothing.
        is_alone = not self._is_one_of_several() or self._engine.is_trying
        if is_out_of_memory(error) and (self._memory.lets_pass or not is_alone):
            return False
        return attempt.can_be_repeated()

    def _is_one_of_several(self) -> bool:
        return self._module.trainer.world_size > 1

    def _gradients_are_new(self, error: Exception) -> bool:
        # Several ranks wait for each other in a backward pass: there is no second one for a single rank.
        trainer, module = self._module.trainer, self._module
        if not module.automatic_optimization or trainer.world_size > 1:
            return False
        if not begins_gradients(trainer):
            self._memory.because("the gradients of earlier batches had been added up, and cannot be told from its own")
            return False
        return True

    def _lacks_memory(self, error: Exception) -> bool:
        """Whether memory ran out in a step of this process's own; then looks at who holds it."""
        if not is_out_of_memory(error) or self._is_one_of_several():
            return False
        self._memory.saw(error)
        return True

    def _answer(
        self, attempt: Attempt, error: Exception, run: Callable[[Callable[[], Any]], Any], *, trains: bool
    ) -> Any:
        """Repeats a step that has run out of memory with what needs less, until it runs or nothing is left.

        Args:
            attempt: The step.
            error: What it raised.
            run: Repeats it by what it is given, and goes backward if need be.
            trains: Whether the step keeps activations, of which less could be kept.
        """
        args, kwargs = attempt.given
        is_freed = False
        while True:
            self._engine.listen()
            free_what_failed(self._module.device)
            try:
                attempt.take_back()
            except Exception:  # a repetition would not start from where the step did
                raise error from None
            if self._yields(error):
                self._engine.report.note(f"a step with an arm on trial raised {one_line(error)}, and ran without it")
            elif trains and self._memory.put_on_next():
                pass
            elif self._engine.is_trying:  # a trial's own memory may be what there is none for
                self._engine.stand_aside(f"a step raised {one_line(error)}")
                self._gives_up()
            elif not trains and not is_freed:
                is_freed = True
            else:
                raise error
            try:
                outputs = run(lambda: attempt.step(*args, **kwargs))
            except Exception as again:
                if not attempt.can_be_repeated():
                    raise
                if is_out_of_memory(again):
                    self._memory.saw(again)
                    error = without_frames(again)
                elif not self._memory.take_off(again):
                    raise
                continue
            self._memory.ran()
            return outputs

    def _repeat(self, attempt: Attempt, error: Exception) -> Any:
        try:
            attempt.take_back()
        except Exception:  # a repetition would not start from where the step did
            raise error from None
        args, kwargs = self._engine.predictions(attempt.given)  # the batch, too, as the user's loader gave it
        self._has_yielded = self._yields(error)
        remark = f"a step raised {one_line(error)}"
        if not self._has_yielded and isinstance(error, EditError):
            self._engine.withdraw(error.technique, remark)
        if self._has_yielded or isinstance(error, EditError):
            return attempt.step(*args, **kwargs)
        self._gives_up()
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
        if isinstance(error, EditError):
            self._engine.report.note(f"a step raised {one_line(error)}, and ran without {error.technique}")
            return
        remark = f"a step raised {one_line(error)}, and ran when it was repeated without the edits of this plugin"
        self._engine.degrade(f"{remark}: all of them are taken back")
