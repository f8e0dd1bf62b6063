"""How a callback hears of a fit in which it is none of the Trainer's callbacks: those are the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger
from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.lightning.packages import LightningModule, Trainer


def beside(
    trainer: Trainer, module: LightningModule, callback: SpeedMemoryLogger, is_aside: Callable[[], bool]
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

    def tell(hook: str, *values: Any) -> None:
        told = getattr(callback, hook)
        if told is not None and not is_aside():
            told(trainer, module, *values)

    def around_step(original: Callable[..., Any]) -> Callable[..., Any]:
        # With as few calls as can be: it is this that a step costs with nothing to do.
        def run(caller: Any, *args: Any) -> Any:
            if caller is not optimization or is_aside():
                return original(caller, *args)
            if (rest := callback.rest).left:
                outputs = original(caller, *args)
                rest.left -= 1
                if not rest.left:
                    callback.rested(outputs)
                return outputs
            batch = next(iter(args[-1].values()), None)  # the first of what `training_step` is called with
            begins = callback.on_train_batch_start
            if begins is not None:
                begins(trainer, module, batch, steps.batch_idx)
            outputs = original(caller, *args)
            callback.on_train_batch_end(trainer, module, outputs, batch, -1)
            return outputs

        return run

    loop, strategy = trainer.fit_loop, trainer.strategy
    steps = loop.epoch_loop
    optimization: Any = steps.automatic_optimization if module.automatic_optimization else steps.manual_optimization
    yield _heard(loop, "on_run_start", after=lambda _: tell("on_train_start"))
    yield _heard(loop, "on_advance_start", after=lambda _: tell("on_train_epoch_start"))
    if trainer.world_size > 1:  # a single rank keeps nobody waiting
        yield _heard(strategy, "pre_backward", before=partial(tell, "on_before_backward"))
    yield MethodPatch(f"{type(optimization).__name__}.run", "is heard", optimization, "run", around_step)
    for hook in ("on_validation_start", "on_validation_end", "on_exception"):
        yield _heard(strategy, hook, before=partial(tell, hook))
    yield _heard(loop, "on_advance_end", before=partial(tell, "on_train_epoch_end"))
    yield _heard(loop, "on_run_end", before=partial(tell, "on_train_end"))


def _heard(owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Any = None) -> Patch:
    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(caller: Any, *args: Any, **kwargs: Any) -> Any:
            is_owner = caller is owner  # and no copy of it, which somebody made meanwhile
            if is_owner and before is not None:
                before(*args, *kwargs.values())
            result = original(caller, *args, **kwargs)
            if is_owner and after is not None:
                after(result)
            return result

        return method

    return MethodPatch(f"{type(owner).__name__}.{name}", "is heard", owner, name, telling)
