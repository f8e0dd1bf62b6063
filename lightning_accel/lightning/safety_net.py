"""The net below a run: a step that raises with edits of ours in force is run once more as the user wrote it.

No technique is worth a run. Whatever is raised in a step, what it has changed is taken back, random streams, buffers
and all else, and it is repeated: without the technique that the error speaks of, without an arm on trial, at last
without us; the report says what happened. Only if that raises as well is it the user's own error, which they get alone.

A step that has run out of memory would need more without us. It is repeated with what needs less
(:mod:`~lightning_accel.lightning.oom_recovery`), as often as there is something left to put on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_accel.core.checks import SettingError
from lightning_accel.core.oom_errors import free_what_failed, is_out_of_memory, without_frames
from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.core.report import AccelError, EditError
from lightning_accel.core.trial import one_line
from lightning_accel.engine import Engine
from lightning_accel.lightning.autocast_precision import AutocastPrecision
from lightning_accel.lightning.error_attribution import suspects
from lightning_accel.lightning.oom_recovery import STEPS, MemoryAnswers
from lightning_accel.lightning.packages import LightningModule, Strategy
from lightning_accel.lightning.step_outputs import DRAWS_GOING_BACKWARD, Edges
from lightning_accel.lightning.step_snapshot import Attempt, SmallState, Step, begins_gradients

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
        precision: The run's.
        edges: What watches over what outlives a step.
        memory: What there is against a lack of memory.
        withdraw: Takes a technique back for the rest of the run, given its name and why.
        yields: Told what a step raised: takes back an arm that was on trial in it, and says whether there was one.
        gives_up: Told that all edits are about to be taken back.
    """

    def __init__(
        self,
        module: LightningModule,
        engine: Engine,
        is_ours: Callable[[], bool],
        precision: AutocastPrecision,
        edges: Edges,
        memory: MemoryAnswers,
        withdraw: Callable[[str, str], None],
        yields: Callable[[Exception], bool] = lambda error: False,
        gives_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._module = module
        self._engine = engine
        self._is_ours = is_ours
        self._precision, self._edges = precision, edges
        self._memory, self._withdraw = memory, withdraw
        self._yields, self._gives_up = yields, gives_up
        self._attempt: Attempt | None = None
        self._is_stepping = False
        self._gone_backward: Attempt | None = None  # whose gradients an optimizer is about to apply
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
    def can_repeat(self) -> bool:
        """Whether the step under way can be run again, by whoever raises an :class:`EditError` in it."""
        return self._attempt is not None and not self._is_one_of_several() and self._attempt.can_be_repeated()

    @property
    def is_spread(self) -> bool:
        """Whether the latest step can be repeated from its backward pass: not where nothing of ours is in force.

        With manual optimization, that is a part of the step.
        """
        return self._attempt is not None and self._module.automatic_optimization

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
            is_first = begins_gradients(self._module.trainer) and not self._is_one_of_several()
            if is_first and self._edges.has_drawn(laid_out=True) and attempt.can_be_repeated():
                raise EditError("memory_format", DRAWS_GOING_BACKWARD)
            self._gone_backward = attempt if self._is_stepping else None
            return
        except Exception as error:
            if not (self._gradients_are_new(error) and self._may_repeat(attempt, error)):
                raise
            lacks_memory = self._lacks_memory(error)
            suspected = suspects(error)
            failure = without_frames(error)
        let_go()

        def again(repeat: Callable[[], Any]) -> None:
            self._module.zero_grad(set_to_none=True)
            run_repeated(repeat())

        if lacks_memory:
            self._answer(attempt, failure, again, trains=True)
        else:
            self._repeat(attempt, failure, suspected, again)

    def optimizer_step(self, run: Callable[[], Any]) -> Any:
        """An optimizer's step, with all that Lightning has it call: the step of the module, and the backward pass.

        Where it raises after these, and has written to no parameter, it is repeated with them.
        """
        self._is_stepping = True
        try:
            return run()
        except Exception as error:
            attempt = self._gone_backward
            may_repeat = attempt is not None and not is_out_of_memory(error) and self._gradients_are_new(error)
            if attempt is None or not may_repeat or not self._may_repeat(attempt, error):
                raise
            suspected = suspects(error)
            failure = without_frames(error)
        finally:
            self._is_stepping, self._gone_backward = False, None
        return self._repeat(attempt, failure, suspected, lambda repeat: run())

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
            has_gone_backward, self._attempt = self._attempt is not attempt, None  # by itself, as it is automatic
            if has_gone_backward or not self._may_repeat(attempt, error):
                raise
            lacks_memory = self._lacks_memory(error)
            suspected = suspects(error)
            failure = without_frames(error)
        # Outside of the handler, so that an error of the user's does not drag ours along.
        if lacks_memory:
            outputs = self._answer(attempt, failure, lambda repeat: repeat(), trains=trains)
        else:
            outputs = self._repeat(attempt, failure, suspected, lambda repeat: repeat())
        self._attempt = attempt  # the backward pass may raise yet
        return outputs

    def _may_repeat(self, attempt: Attempt, error: Exception) -> bool:
        if isinstance(error, _NOT_OURS):
            return False
        if not (isinstance(error, EditError) or is_out_of_memory(error) or self._is_ours()):
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
            self._engine.apply_updates()
            free_what_failed(self._module.device)
            self._take_back(attempt, error)
            if self._yields(error):
                self._engine.report.note(f"a step with an arm on trial raised {one_line(error)}, and ran without it")
            elif trains and self._memory.put_on_next():
                pass
            elif self._engine.is_trying:  # a trial's own memory may be what there is none for
                self._engine.revert_all(f"a step raised {one_line(error)}")
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

    def _repeat(
        self, attempt: Attempt, error: Exception, suspected: Sequence[str], run: Callable[[Callable[[], Any]], Any]
    ) -> Any:
        """Repeats a step with less and less of ours, until it runs: the likeliest edit goes first, all of them last.

        Args:
            attempt: The step.
            error: What it raised.
            suspected: The techniques that ``error`` speaks of.
            run: Repeats it by what it is given, and goes further if need be.
        """
        remark = f"a step raised {one_line(error)}"
        args, kwargs = attempt.given
        step = functools.partial(attempt.step, *args, **kwargs)
        self._take_back(attempt, error)
        certain = self._edges.mend()  # what is left of another turn may be what this one could not take
        certain += suspected if isinstance(error, EditError) else []
        for name in dict.fromkeys([*certain, *suspected]):
            if name not in certain and not self._is_in_force(name):
                continue
            self._take_back(attempt, error)
            self._withdraw(name, str(error) if isinstance(error, EditError) else remark)
            try:
                outputs = run(step)
            except Exception as again:
                self._may_go_on(attempt, again)
                continue
            self._engine.report.note(f"{remark}, and ran without {name}")
            return outputs
        self._take_back(attempt, error)
        if self._yields(error):
            try:
                outputs = run(step)
            except Exception as again:
                self._may_go_on(attempt, again)
                self._take_back(attempt, error)
            else:
                self._engine.report.note(f"a step with an arm on trial raised {one_line(error)}, and ran without it")
                return outputs
        self._gives_up()
        self._engine.revert_all(remark)
        model = self._module.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # No buffers are sent again: the other ranks are past that. DDP's forward sets this for the next one.
            model.require_forward_param_sync = False
        with self._precision.in_float32():
            outputs = run(step)
        self._engine.join_after_failure()
        self._engine.degrade(
            f"{remark}, and ran when it was repeated without the edits of this plugin: all of them are taken back"
        )
        return outputs

    def _is_in_force(self, name: str) -> bool:
        return self._precision.is_ours if name == "precision" else self._engine.has(name)

    def _may_go_on(self, attempt: Attempt, error: Exception) -> None:
        if isinstance(error, _NOT_OURS) or is_out_of_memory(error) or not attempt.can_be_repeated():
            raise error

    def _take_back(self, attempt: Attempt, error: Exception) -> None:
        try:
            attempt.take_back()
        except Exception:  # a repetition would not start from where the step did
            raise error from None
