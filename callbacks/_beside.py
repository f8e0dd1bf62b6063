"""How a callback hears of a fit in which it is none of the Trainer's callbacks: those are the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_accel.core.patch import MethodPatch, Patch


def beside(
    trainer: Trainer, module: LightningModule, callback: Callback, is_aside: Callable[[], bool]
) -> Iterator[Patch]:
    """The edits that have a callback's hooks called in a fit, nearer to the step than the user's callbacks are.

    What they do once a step or an epoch has ended comes after it. The end of the fit and a checkpoint that is being
    saved are told by whoever makes these edits.

    Args:
        trainer: Its loops and its strategy are edited.
        module: In its fit.
        callback: Is told.
        is_aside: Whether it is not to be told now: a search puts all callbacks aside while it runs the loop.
    """
    step: list[Any] = []  # the batch and its number

    def tell(hook: str, *values: Any) -> None:
        told = getattr(callback, hook)
        if told is not None and not is_aside():
            told(trainer, module, *values)

    def begin_step(*values: Any) -> None:
        step[:] = values
        tell("on_train_batch_start", *values)

    def end_step(outputs: Any) -> None:
        values = tuple(step)
        step.clear()  # a batch is not to live longer than its step
        tell("on_train_batch_end", outputs, *values)

    loop, strategy = trainer.fit_loop, trainer.strategy
    steps = loop.epoch_loop
    optimization: Any = steps.automatic_optimization if module.automatic_optimization else steps.manual_optimization
    yield _after(loop, "on_run_start", lambda _: tell("on_train_start"))
    yield _after(loop, "on_advance_start", lambda _: tell("on_train_epoch_start"))
    yield _before(strategy, "on_train_batch_start", begin_step)
    yield _before(strategy, "pre_backward", partial(tell, "on_before_backward"))
    yield _after(optimization, "run", end_step)
    yield _before(strategy, "on_validation_start", partial(tell, "on_validation_start"))
    yield _before(strategy, "on_validation_end", partial(tell, "on_validation_end"))
    yield _before(loop, "on_advance_end", partial(tell, "on_train_epoch_end"))
    yield _before(loop, "on_run_end", partial(tell, "on_train_end"))
    yield _before(strategy, "on_exception", partial(tell, "on_exception"))


def _before(owner: Any, name: str, tell: Callable[..., None]) -> Patch:
    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(caller: Any, *args: Any) -> Any:
            if caller is owner:  # and no copy of it, which somebody made meanwhile
                tell(*args)
            return original(caller, *args)

        return method

    return MethodPatch(f"{type(owner).__name__}.{name}", "is heard", owner, name, telling)


def _after(owner: Any, name: str, tell: Callable[[Any], None]) -> Patch:
    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(caller: Any, *args: Any) -> Any:
            result = original(caller, *args)
            if caller is owner:
                tell(result)
            return result

        return method

    return MethodPatch(f"{type(owner).__name__}.{name}", "is heard", owner, name, telling)
