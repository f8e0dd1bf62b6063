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
from torch import Tensor

from lightning_accel.checks import SettingError
from lightning_accel.engine import AccelError, Engine
from lightning_accel.isolation import Snapshot
from lightning_accel.patch import MethodPatch, Patch
from lightning_accel.tree import leaves, tensors_in
from lightning_accel.trial import one_line

Step = Callable[..., Any]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_MAX_BUFFER_BYTES = 1 << 20  # of one buffer that is copied at every step: running statistics, not tables

# The end of a loader that the step itself reads, and what we tell the user on purpose.
_NOT_OURS = (StopIteration, SettingError, AccelError)


class SafetyNet:
    """Guards the steps of one run.

    A step cannot be repeated where an optimizer has stepped in it, or gradients were added to older ones; nor one that
    reads its loader itself. Its exception then goes through as it is.

    Args:
        module: The run's module.
        engine: At work on it.
        without_precision: Takes back what the engine does not do, the choice of a precision: entered around a
            repeated step, and given what it first raised.
    """

    def __init__(
        self,
        module: LightningModule,
        engine: Engine,
        without_precision: Callable[[Exception], AbstractContextManager[Any]],
    ) -> None:
        self._module = module
        self._engine = engine
        self._without_precision = without_precision
        self._attempt: _Attempt | None = None
        self._small_buffers: list[Tensor] | None = None

    def patches(self, strategy: Strategy) -> Iterator[Patch]:
        """The edits that put every step of ``strategy`` above the net."""

        def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
            def step(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
                return self._run(functools.partial(original, strategy), args, kwargs)

            return step

        for name in _STEPS:
            yield MethodPatch(f"{name}, guarded", "above a net", strategy, name, guarded)

    @property
    def is_spread(self) -> bool:
        """Whether the latest step can be repeated: not where nothing is edited."""
        return self._attempt is not None

    def backward(self, run: Step, run_repeated: Callable[[Any], None]) -> None:
        """A backward pass after a step with a net, which is repeated where the pass raises because of an edit.

        Args:
            run: The backward pass.
            run_repeated: The same for the outputs of the step's repetition.
        """
        attempt = self._attempt
        assert attempt is not None, "no net is spread"
        attempt.has_gone_backward = True
        try:
            run()
            return
        except Exception as error:
            if not (self._gradients_are_new() and self._may_repeat(attempt, error)):
                raise
            failure = error
        attempt.has_gone_backward = False
        self._module.zero_grad(set_to_none=True)
        run_repeated(self._repeat(attempt, failure))
        self._tell(failure)

    def _run(self, step: Step, args: Any, kwargs: Any) -> Any:
        if not self._engine.has_edits:
            self._attempt = None
            return step(*args, **kwargs)
        attempt = self._attempt = self._begin(step, (args, kwargs))
        try:
            return step(*args, **kwargs)
        except Exception as error:
            if attempt.has_gone_backward or not self._may_repeat(attempt, error):
                raise
            failure = error
        # Outside of the handler, so that an error of the user's does not drag ours along.
        outputs = self._repeat(attempt, failure)
        self._tell(failure)
        return outputs

    def _begin(self, step: Step, given: Any) -> _Attempt:
        is_trial = self._engine.is_trying
        if not is_trial and self._small_buffers is None:  # found once: to walk through a model takes its time
            buffers = list(self._module.buffers())
            self._small_buffers = [buffer for buffer in buffers if buffer.nbytes <= _MAX_BUFFER_BYTES]
        return _Attempt(step, given, self._module, is_trial=is_trial, small_buffers=self._small_buffers or [])

    def _may_repeat(self, attempt: _Attempt, error: Exception) -> bool:
        return not isinstance(error, _NOT_OURS) and attempt.can_be_repeated()

    def _gradients_are_new(self) -> bool:
        # Several ranks wait for each other in a backward pass: there is no second one for a single rank.
        trainer, module = self._module.trainer, self._module
        return module.automatic_optimization and trainer.accumulate_grad_batches == 1 and trainer.world_size == 1

    def _repeat(self, attempt: _Attempt, error: Exception) -> Any:
        attempt.take_back()
        args, kwargs = self._engine.predictions(attempt.given)  # the batch, too, as the user's loader gave it
        remark = f"a step raised {one_line(error)}"
        self._engine.stand_aside(remark)
        with self._without_precision(error):
            outputs = attempt.step(*args, **kwargs)
        self._engine.join_after_failure()
        return outputs

    def _tell(self, error: Exception) -> None:
        remark = f"a step raised {one_line(error)}, and ran when it was repeated without the edits of this plugin"
        self._engine.degrade(f"{remark}: all of them are taken back")


class _Attempt:
    """A step, and what it may change.

    Attributes:
        step: Runs it, again perhaps.
        given: Its arguments, positional and by name.
        has_gone_backward: Whether there are gradients of it.

    Args:
        step: See above.
        given: See above.
        module: The run's module.
        is_trial: Whether techniques are tried in it: then all that a step may change is kept. Later it is the random
            streams of torch, and buffers as small as running statistics are.
        small_buffers: These buffers.
    """

    def __init__(
        self, step: Step, given: Any, module: LightningModule, *, is_trial: bool, small_buffers: list[Tensor]
    ) -> None:
        self.step = step
        self.has_gone_backward = False
        self.given = given
        self._module = module
        self._num_optimizer_steps = module.trainer.global_step
        self._random = _random_states(module.device)
        self._snapshots = [*_whole_state(module, given)] if is_trial else []
        self._buffers = [] if is_trial else small_buffers
        self._values = [torch.empty_like(buffer) for buffer in self._buffers]
        if self._values:
            torch._foreach_copy_(self._values, self._buffers)

    def can_be_repeated(self) -> bool:
        reads_its_loader = any(hasattr(leaf, "__next__") for leaf in leaves(self.given))
        has_stepped = self._module.trainer.global_step != self._num_optimizer_steps
        return not (reads_its_loader or has_stepped)

    def take_back(self) -> None:
        for restore in (*self._snapshots, *self._random):
            restore()
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._values, strict=True):
                buffer.copy_(value)


def _random_states(device: torch.device) -> list[Callable[[], None]]:
    """What brings back torch's random streams as they are now."""
    state = torch.get_rng_state()
    restores: list[Callable[[], None]] = [lambda: torch.set_rng_state(state)]
    if device.type == "cuda":
        of_device = torch.cuda.get_rng_state(device)
        restores.append(lambda: torch.cuda.set_rng_state(of_device, device))
    return restores


def _whole_state(module: LightningModule, given: Any) -> Iterator[Callable[[], Any]]:
    """What brings back a module, what it logged and its batch as they are now."""
    yield Snapshot(module).restore
    logged: Any = getattr(module.trainer, "_results", None)
    if logged is not None:
        before = dict(logged)
        for metric in before.values():
            yield Snapshot(metric).restore
        yield lambda: [logged.pop(name) for name in list(logged) if name not in before]
    for tensor in tensors_in(given):
        if not tensor.is_inference():  # which keeps no count of what is written into it
            yield functools.partial(_put_back, tensor, tensor.clone(), tensor._version)


def _put_back(tensor: Tensor, value: Tensor, version: int) -> None:
    if tensor._version != version:
        with torch.no_grad():
            tensor.copy_(value)
