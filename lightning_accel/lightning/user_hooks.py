"""The user's hooks: code of the user's between two steps, in the module and in callbacks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from typing_extensions import override

from lightning_accel.lightning.autocast_precision import nested
from lightning_accel.lightning.packages import Callback, LightningModule, callbacks_of, is_lightnings, own
from lightning_accel.step.layers import Call, Layer
from lightning_accel.techniques.memory_format import MemoryFormat


class HooksLayer(Layer):
    """Shows the weights in the user's own layout to the user's hooks, and notes what some of these make.

    Callbacks are not edited, since one may store its attributes in checkpoints. Lightning calls their hooks within
    actions of its profiler, whose names tell the callback and the hook.

    Args:
        memory_format: The layout; None if there is none to be shown.
        noting: Takes the name of a hook, and returns a context for its call. It is for hooks at the start or the end of
            more than one batch.
    """

    name = "outputs"

    def __init__(
        self,
        module: LightningModule,
        memory_format: MemoryFormat | None,
        noting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._memory_format, self._noting = memory_format, noting
        trainer: Any = module.trainer
        self._callbacks = {
            f"[Callback]{one.state_key}.{hook}": hook
            for one in callbacks_of(trainer)
            for hook in self._of_interest(one, Callback)
        }
        profiler = [(trainer.profiler, ("profile",))] if self._callbacks else []
        kind, patched = type(trainer.profiler), vars(trainer.profiler).keys() & {"profile", "start", "stop"}
        does_nothing = is_lightnings(kind) and kind.__name__ == "PassThroughProfiler" and not patched
        self._nothing = nullcontext() if does_nothing else None  # in place of calls, of which a step has over twenty
        # Callbacks give their states to a checkpoint outside of the profiler's actions.
        saving = [] if memory_format is None else [(trainer, ("save_checkpoint",))]
        super().__init__([(module, self._of_interest(module, LightningModule)), *saving, *profiler])

    def _of_interest(self, owner: LightningModule | Callback, kind: Any) -> list[str]:
        return [hook for hook in _hooks_of(owner, kind) if self._memory_format is not None or _is_noted(hook)]

    def _around_hook(self, hook: str) -> AbstractContextManager[Any]:
        shown = nullcontext() if self._memory_format is None else self._memory_format.shown()
        return nested(shown, self._noting(hook)) if _is_noted(hook) else shown

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        with self._around_hook(stage):
            return call(*args, **kwargs)

    def around_profile(self, call: Call, action_name: str) -> AbstractContextManager[Any]:
        action, hook = self._nothing or call(action_name), self._callbacks.get(action_name)
        return action if hook is None else nested(action, self._around_hook(hook))


def _is_noted(hook: str) -> bool:
    return hook.endswith(("_start", "_end")) and "batch" not in hook


_MORE_HOOKS = ("configure_gradient_clipping", "lr_scheduler_step", "optimizer_zero_grad")  # beside those named on_...


def _hooks_of(owner: LightningModule | Callback, kind: Any) -> list[str]:
    """Returns the names of the hooks that the user has written in the module or in a callback.

    In these hooks the user's own code runs outside of steps. ``optimizer_step`` and similar hooks call a step.
    """
    if is_lightnings(type(owner)) or type(owner).__module__.startswith("lightning_accel."):
        return []
    base = own(owner, kind)
    hooks = [name for name in dir(base) if name.startswith("on_") or name in _MORE_HOOKS]
    return [name for name in hooks if _is_overridden(owner, base, name)]


def _is_overridden(owner: LightningModule | Callback, base: Any, name: str) -> bool:
    is_own = name in vars(owner) or getattr(type(owner), name, None) is not getattr(base, name, None)
    return is_own and callable(getattr(owner, name))
