"""What outlives a step is as it would be plain, whatever the step computed in: in dtype and in layout.

A step in bfloat16 or in channels_last may hand on what the next one, in float32 and in the user's layout, cannot take,
and what hooks, callbacks and loggers do not expect. What a step returns is therefore brought to the plain form. What it
leaves behind, in attributes, lists, closures, is looked for in the first steps and then ever more rarely.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.core.layout import is_channels_last
from lightning_accel.core.live_tensors import MOST, held_tensors
from lightning_accel.core.report import EditError
from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.engine import Engine
from lightning_accel.lightning.autocast_precision import AutocastPrecision
from lightning_accel.lightning.packages import Callback, LightningModule, Trainer, is_lightnings, own
from lightning_accel.lightning.private import ActionPatch, hook_action
from lightning_accel.step.pipeline import STEPS, Call, Layer
from lightning_accel.techniques.layout_draws import LayoutDraws
from lightning_accel.techniques.memory_format import MemoryFormat

DRAWS_GOING_BACKWARD = "a hook on the backward pass draws random numbers, in the order of memory"


@dataclass(frozen=True)
class _Form:
    """In which a step has tensors that would be in float32, and contiguous.

    Attributes:
        dtype: In the place of float32; None: float32.
        is_laid_out: Whether images are in channels_last.
    """

    dtype: torch.dtype | None
    is_laid_out: bool

    def technique(self, tensor: Tensor) -> str | None:
        """The technique that has brought a tensor into this form; None: it is not in it."""
        if tensor.dtype == self.dtype:
            return "precision"
        return "memory_format" if self.is_laid_out and is_channels_last(tensor) else None

    def plain(self, tensor: Tensor) -> Tensor:
        """A tensor as it would be; autocast makes 16 bits of nothing but float32."""
        tensor = tensor.float() if tensor.dtype == self.dtype else tensor
        return tensor.contiguous() if self.is_laid_out and is_channels_last(tensor) else tensor


class StepOutputs(Layer):
    """Watches over what leaves the steps of one run.

    What a training step leaves in another form ends the technique that made it so: a number format, or a layout, is
    switched between two steps only where none can be told from the other. What evaluation leaves is brought to the
    plain form after every step.

    Args:
        module: The module of the run.
        engine: The engine at work on it.
        precision: The precision plugin of the run.
        can_repeat: Returns whether the step under way can run again. It does, if this layer raises an
            :class:`EditError`.
        revert: Takes a technique back for the rest of the run. It is given the name and the reason.
    """

    name = "outputs"

    def __init__(
        self,
        module: LightningModule,
        engine: Engine,
        precision: AutocastPrecision,
        can_repeat: Callable[[], bool],
        revert: Callable[[str, str], None],
    ) -> None:
        super().__init__([(module.trainer.strategy, STEPS), (precision, ("backward",))])
        self._module, self._engine, self._precision = module, engine, precision
        self._can_repeat, self._revert = can_repeat, revert
        laid_out = engine.technique(MemoryFormat)
        self._memory_format = laid_out if laid_out is not None and laid_out.has_weights else None
        self._steps: Counter[str] = Counter()  # of each kind that were in another form
        self._mended: set[str] = set()  # kinds of steps of evaluation after each of which is looked
        self._looked_at: _Form | None = None  # in which the step under way was, if it was looked at
        self._shown: list[AbstractContextManager[Any]] = []  # of the user's hooks under way
        self._leaving: dict[str, str] = {}  # what is to go before the next step, and why
        self._draws: LayoutDraws | None = None  # of the backward pass under way
        self._was_laid_out = False  # a step, by us
        self._is_cut = False  # the latest look: there was too much to look at
        self._own: dict[int, Tensor] | None = None  # what the user has in such a form; kept, so that no id comes again

        self._hooks: ActionPatch | None = None  # of the user's, which are shown weights in their own layout
        if self._memory_format is not None and (hooks := users_hooks(module.trainer, module)):
            self._hooks = ActionPatch(module.trainer, hooks, self._hook_begins, self._hook_ends)

    @override
    def _apply(self) -> None:
        super()._apply()
        if self._hooks is not None:
            self._hooks.apply()

    @override
    def _undo(self) -> None:
        if self._hooks is not None:
            self._hooks.undo()
        super()._undo()

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        if stage == "backward":
            return self._backward(call, *args, **kwargs)
        return self._step(stage, call, *args, **kwargs)

    def _hook_begins(self) -> None:
        assert self._memory_format is not None, "without it nobody is told"
        self._shown.append(self._memory_format.shown())
        self._shown[-1].__enter__()

    def _hook_ends(self) -> None:
        self._shown.pop().__exit__(None, None, None)

    def _backward(self, call: Call, *args: Any, **kwargs: Any) -> None:
        """Looks for what hooks on the backward pass keep if the forward pass was looked at, and for what they draw.

        A gradient has the layout of its weight in memory, and so has the noise that is added to it.
        """
        if self._looked_at is None and self._memory_format is None:
            call(*args, **kwargs)
            return
        self._draws = LayoutDraws(self._module.device) if self._engine.has("memory_format") else None
        call(*args, **kwargs)
        if self._engine.has("memory_format") and self.has_drawn():
            self._leaving["memory_format"] = DRAWS_GOING_BACKWARD
        if self._looked_at is not None:
            self._leaving |= self._brought_to_plain(self._looked_at)

    def has_drawn(self, *, laid_out: bool = False) -> bool:
        """Whether the backward pass under way has drawn numbers, and a layout may be on; or ``laid_out``, was on."""
        if self._draws is None or (laid_out and not (self._memory_format and self._memory_format.acts())):
            return False
        self._draws.has_drawn |= self._draws.have_moved()
        return self._draws.has_drawn

    def mend(self) -> list[str]:
        """Brings to the plain form what former steps have left, before one runs that may not be able to take it.

        Returns:
            The techniques that had it in another form; they go before the next step.
        """
        if not self._steps:
            return []
        self._leaving |= self._brought_to_plain(_Form(self._precision.chosen_dtype, self._was_laid_out))
        return list(self._leaving)

    def _step(self, name: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        if self._own is None:
            self._find_own()
        while self._leaving:
            self._revert(*self._leaving.popitem())
        self._looked_at = None
        is_cast = self._precision.is_ours
        is_laid_out = self._memory_format is not None and self._memory_format.acts()
        if not (is_cast or is_laid_out):
            return call(*args, **kwargs)
        form = _Form(self._precision.chosen_dtype if is_cast else None, is_laid_out)
        self._steps[name] += 1
        self._was_laid_out |= form.is_laid_out
        is_look = name in self._mended or self._steps[name].bit_count() == 1  # the 1st, 2nd, 4th, 8th ...
        parameters: list[tuple[nn.Parameter, Tensor]] = []
        if is_look:
            parameters = [(p, p.data) for p in self._module.parameters()]
        outputs = call(*args, **kwargs)
        if any(map(form.technique, tensors_in(outputs))):
            outputs = map_tensors(form.plain, outputs)
        if is_look or self._is_in_sight(form):
            self._look(name, form, parameters)
        for technique, reason in self._engine.spoilt():
            if self._can_repeat():
                raise EditError(technique, reason)
        return outputs

    def _find_own(self) -> None:
        """Notes, before the first step, what the user has in such forms; a number format of theirs leaves us none."""
        form = _Form(self._precision.chosen_dtype, is_laid_out=True)
        found = [*self._left_behind(form)]
        self._own = {id(tensor): tensor for _, tensor in found}
        for way, tensor in found:
            if form.technique(tensor) == "precision":
                self._leaving["precision"] = f"{way} is in {str(tensor.dtype).removeprefix('torch.')} of its own"

    def _is_in_sight(self, form: _Form) -> bool:
        """Whether the module itself holds something in a form, or at the end of a list: every step can ask that."""
        values = [part[-1] if type(part) is list and part else part for part in vars(self._module).values()]
        own = self._own or {}
        return any(isinstance(t, Tensor) and form.technique(t) is not None and id(t) not in own for t in values)

    def _look(self, name: str, form: _Form, parameters: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Looks for what a step has left in another form, and brings it to the plain one."""
        moved = [(p, before) for p, before in parameters if p.dtype != before.dtype]
        # What a backward pass will read stays until that is over; with manual optimization it is.
        goes_backward = name == "training_step" and self._module.automatic_optimization
        reasons = self._brought_to_plain(form, spares_graphs=goes_backward)
        for parameter, before in moved:
            parameter.data = before  # as it was before it was rounded
        if name != "training_step":
            self._mended |= {name} if reasons else set()
            if reasons and self._is_cut:
                self._leaving = reasons | self._brought_to_plain(form, most=sys.maxsize)
            return
        self._looked_at = form
        if not reasons:
            return
        if moved and self._can_repeat():  # of a parameter in another dtype the gradient would be, too
            raise EditError("precision", reasons["precision"])
        self._leaving = reasons

    def _brought_to_plain(self, form: _Form, *, spares_graphs: bool = False, most: int = MOST) -> dict[str, str]:
        """Brings what is held in a form to the plain one, whoever holds it; why, by technique."""
        reasons: dict[str, str] = {}
        for way, tensor in self._left_behind(form, most):
            technique = form.technique(tensor)
            assert technique is not None, "it was found by that"
            written = str(tensor.dtype).removeprefix("torch.") if technique == "precision" else "channels_last"
            reasons.setdefault(technique, f"{way} would outlive a step in {written}")
            if spares_graphs and tensor.grad_fn is not None:
                continue
            with torch.no_grad():
                tensor.data = form.plain(tensor.detach())
        return reasons

    def _left_behind(self, form: _Form, most: int = MOST) -> list[tuple[str, Tensor]]:
        """What the user's objects hold in a form, and the way to it; not what they had in it before the first step."""
        callbacks: list[Any] = self._module.trainer.callbacks  # type: ignore[attr-defined]
        roots = [("self", self._module), *((type(callback).__name__, callback) for callback in callbacks)]
        own = self._own or {}
        found = []
        self._is_cut = False
        try:
            for way, tensor in held_tensors(*roots, most=most):
                technique = form.technique(tensor)
                is_ours = technique == "memory_format" and isinstance(tensor, nn.Parameter)  # which it restores itself
                if technique is not None and not is_ours and id(tensor) not in own:
                    found.append((way, tensor))
        except LookupError as error:
            self._is_cut = True
            self._engine.report.note(f"not all that outlives a step could be looked at: {error}")
        return found


_MORE_HOOKS = ("configure_gradient_clipping", "lr_scheduler_step")  # of a module, beside those named on_...


def users_hooks(trainer: Trainer, module: LightningModule) -> set[str]:
    """The hooks of a module and of callbacks that are not Lightning's own, by the names of their actions."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    its_base: Any = own(module, LightningModule)
    base: Any = own(trainer, Callback)
    # Where the user's own code runs beside steps. Not where it calls a step, as `optimizer_step` does.
    its_hooks = [*(name for name in dir(its_base) if name.startswith("on_")), *_MORE_HOOKS]
    owners = [(module, its_base, its_hooks), *((callback, base, dir(base)) for callback in callbacks)]
    return {
        hook_action(owner, name)
        for owner, base, hooks in owners
        if not (is_lightnings(type(owner)) or type(owner).__module__.startswith("lightning_accel."))
        for name in hooks
        if getattr(type(owner), name, None) is not getattr(base, name, None) or name in vars(owner)
    }
