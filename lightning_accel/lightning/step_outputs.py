"""The outputs layer: what outlives a step has the dtype and the layout of a plain run.

A step in bfloat16 or in channels_last may leave tensors that the next step, in float32 and in the user's layout, cannot
take. Hooks, callbacks and loggers do not expect them either. So this layer converts what a step returns to the plain
form. It also looks for what a step leaves in attributes, lists and closures: in the first steps, and then ever more
rarely.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.core.layout import is_channels_last
from lightning_accel.core.live_tensors import MOST, held_tensors
from lightning_accel.core.report import EditError
from lightning_accel.core.states import VerdictKind
from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.engine import Engine
from lightning_accel.lightning.autocast_precision import AutocastPrecision
from lightning_accel.lightning.packages import Callback, LightningModule, is_lightnings, own
from lightning_accel.step.layers import STEPS, Call, Layer
from lightning_accel.techniques.layout_draws import LayoutDraws
from lightning_accel.techniques.memory_format import MemoryFormat

DRAWS_GOING_BACKWARD = "a hook on the backward pass draws random numbers, in the order of memory"


@dataclass(frozen=True)
class _Form:
    """The form of tensors in a step that would be in float32 and contiguous in a plain run.

    Attributes:
        dtype: The dtype in place of float32; None if it is float32.
        is_laid_out: Whether images are in channels_last.
    """

    dtype: torch.dtype | None
    is_laid_out: bool

    def technique(self, tensor: Tensor) -> str | None:
        """The technique that has brought a tensor into this form; None if the tensor is not in it."""
        if tensor.dtype == self.dtype:
            return "precision"
        return "memory_format" if self.is_laid_out and is_channels_last(tensor) else None

    def plain(self, tensor: Tensor) -> Tensor:
        """The tensor in its plain form. Autocast makes 16-bit tensors from float32 only."""
        tensor = tensor.float() if tensor.dtype == self.dtype else tensor
        return tensor.contiguous() if self.is_laid_out and is_channels_last(tensor) else tensor


class StepOutputs(Layer):
    """Watches over what leaves the steps of one run.

    If a training step leaves a tensor in another form, the technique that made it ends: live trials may switch a number
    format or a layout between two steps only if nobody can tell the steps apart. What a step of evaluation leaves is
    converted to the plain form after every such step.
    """

    name = "outputs"

    def __init__(
        self,
        module: LightningModule,
        engine: Engine,
        precision: AutocastPrecision,
        can_repeat: Callable[[], bool],
        revert: Callable[[str, str, VerdictKind], None],
    ) -> None:
        self._module, self._engine, self._precision = module, engine, precision
        self._can_repeat, self._revert = can_repeat, revert
        laid_out = engine.technique(MemoryFormat)
        self._memory_format = laid_out if laid_out is not None and laid_out.has_weights else None
        self._steps: Counter[str] = Counter()  # of each kind that were in another form
        self._mended: set[str] = set()  # kinds of steps of evaluation after each of which is looked
        self._looked_at: _Form | None = None  # in which the step under way was, if it was looked at
        self._leaving: dict[str, str] = {}  # what is to go before the next step, and why
        self._draws: LayoutDraws | None = None  # of the backward pass under way
        self._was_laid_out = False  # a step, by us
        self._is_cut = False  # the latest look: there was too much to look at
        self._own: dict[int, Tensor] | None = None  # what the user has in such a form; kept, so that no id comes again

        # The user's hooks are shown weights in their own layout.
        companions = [_HooksLayer(module, self._memory_format)] if self._memory_format is not None else []
        super().__init__([(module.trainer.strategy, STEPS), (precision, ("backward",))], companions)

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        if self._own is None:
            self._find_own()
        while self._leaving:
            self._revert(*self._leaving.popitem(), "refused")
        self._looked_at = None
        is_cast = self._precision.is_ours
        is_laid_out = self._memory_format is not None and self._memory_format.acts()
        if not (is_cast or is_laid_out):
            return call(*args, **kwargs)
        form = _Form(self._precision.chosen_dtype if is_cast else None, is_laid_out)
        self._steps[stage] += 1
        self._was_laid_out |= form.is_laid_out
        is_look = stage in self._mended or self._steps[stage].bit_count() == 1  # the 1st, 2nd, 4th, 8th ...
        parameters: list[tuple[nn.Parameter, Tensor]] = []
        if is_look:
            parameters = [(p, p.data) for p in self._module.parameters()]
        outputs = call(*args, **kwargs)
        if any(map(form.technique, tensors_in(outputs))):
            outputs = map_tensors(form.plain, outputs)
        if is_look or self._is_in_sight(form):
            self._look(stage, form, parameters)
        for technique, reason in self._engine.spoilt():
            if self._can_repeat():
                raise EditError(technique, reason)
        return outputs

    def around_backward(self, call: Call, *args: Any, **kwargs: Any) -> None:
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
        """Whether the backward pass under way has drawn random numbers while a layout may be on."""
        if self._draws is None or (laid_out and not (self._memory_format and self._memory_format.acts())):
            return False
        self._draws.has_drawn |= self._draws.have_moved()
        return self._draws.has_drawn

    def mend(self) -> list[str]:
        """Converts what former steps have left to the plain form, before a step that may not be able to take it.

        Returns:
            The techniques that had it in another form. They are taken back before the next step.
        """
        if not self._steps:
            return []
        self._leaving |= self._brought_to_plain(_Form(self._precision.chosen_dtype, self._was_laid_out))
        return list(self._leaving)

    def _find_own(self) -> None:
        """Notes, before the first step, what the user has in such forms. If it is a number format, ours goes."""
        form = _Form(self._precision.chosen_dtype, is_laid_out=True)
        found = [*self._left_behind(form)]
        self._own = {id(tensor): tensor for _, tensor in found}
        for way, tensor in found:
            if form.technique(tensor) == "precision":
                self._leaving["precision"] = f"{way} is in {str(tensor.dtype).removeprefix('torch.')} of its own"

    def _is_in_sight(self, form: _Form) -> bool:
        """Whether an attribute of the module, or the end of a list in it, is in a form. Each step can afford that."""
        values = [part[-1] if type(part) is list and part else part for part in vars(self._module).values()]
        own = self._own or {}
        return any(isinstance(t, Tensor) and form.technique(t) is not None and id(t) not in own for t in values)

    def _look(self, name: str, form: _Form, parameters: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Looks for what a step has left in another form, and converts it to the plain one."""
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
        """Converts what anybody holds in a form to the plain one. Returns the reasons, by technique."""
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
        """What the user's objects hold in a form, each with the way to it. What they had before the run is left out."""
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


class _HooksLayer(Layer):
    """Shows the user's hooks, of the module and of callbacks, the weights in the user's own layout."""

    name = "outputs"

    def __init__(self, module: LightningModule, memory_format: MemoryFormat) -> None:
        self._memory_format = memory_format
        super().__init__(users_hooks(module))

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        with self._memory_format.shown():
            return call(*args, **kwargs)


_MORE_HOOKS = ("configure_gradient_clipping", "lr_scheduler_step")  # of a module, beside those named on_...


def users_hooks(module: LightningModule) -> Iterator[tuple[LightningModule | Callback, list[str]]]:
    """The module and the callbacks, each with the names of the hooks that the user has written.

    In these the user's own code runs beside steps. In ``optimizer_step`` and its like it calls a step.
    """
    callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
    for owner, base in [(module, own(module, LightningModule)), *((one, own(module, Callback)) for one in callbacks)]:
        if not (is_lightnings(type(owner)) or type(owner).__module__.startswith("lightning_accel.")):
            hooks = [name for name in dir(base) if name.startswith("on_") or name in _MORE_HOOKS]
            yield owner, [name for name in hooks if _is_overridden(owner, base, name)]


def _is_overridden(owner: LightningModule | Callback, base: Any, name: str) -> bool:
    is_own = name in vars(owner) or getattr(type(owner), name, None) is not getattr(base, name, None)
    return is_own and callable(getattr(owner, name))
