"""The outputs layer: tensors that outlive a step get the dtype and the layout of a plain run.

A step in bfloat16 or in channels_last may leave tensors that the next step, in float32 and in the user's layout, cannot
use. Hooks, callbacks and loggers do not expect them either. So this layer converts what a step returns to the plain
form. It also searches attributes, lists and closures for tensors that a step leaves there: in the first steps, then
more and more rarely.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.core.layout import is_channels_last
from lightning_accel.core.live_tensors import MOST, held_tensors
from lightning_accel.core.report import EditError
from lightning_accel.core.tree import map_tensors, storage_of, tensors_in
from lightning_accel.lightning.packages import callbacks_of
from lightning_accel.lightning.run_engine import RunEngine
from lightning_accel.lightning.user_hooks import HooksLayer
from lightning_accel.step.layers import STEPS, Call, Layer
from lightning_accel.techniques.layout_modes import LayoutDraws
from lightning_accel.techniques.memory_format import MemoryFormat

DRAWS_GOING_BACKWARD = "a hook on the backward pass draws random numbers, in the order of memory"
LOOKING = "looking for what outlives a step"  # a purpose of the run's purse
_DRAWS_AFTERWARDS = "random numbers are drawn between the backward pass and the end of the optimizer's step"


@dataclass(frozen=True)
class _Form:
    """The form that a step gives to tensors that are float32 and contiguous in a plain run.

    Attributes:
        dtype: The dtype in place of float32; None if it is float32.
        is_laid_out: Whether images are in channels_last.
    """

    dtype: torch.dtype | None
    is_laid_out: bool

    def technique(self, tensor: Tensor) -> str | None:
        """Returns the technique that brought a tensor into this form; None if the tensor is not in it."""
        if tensor.dtype == self.dtype:
            return "precision"
        return "memory_format" if self.is_laid_out and is_channels_last(tensor) else None

    def plain(self, tensor: Tensor) -> Tensor:
        """Returns the tensor in its plain form. Autocast makes 16-bit tensors from float32 only."""
        tensor = tensor.float() if tensor.dtype == self.dtype else tensor
        return tensor.contiguous() if self.is_laid_out and is_channels_last(tensor) else tensor


class StepOutputs(Layer):
    """Checks the tensors that leave the steps of one run.

    If a training step leaves a tensor in another form, the technique that made it is reverted: live trials may switch a
    number format or a layout between two steps only if no code can see a difference. What a step of evaluation leaves
    is converted to the plain form after every such step.
    """

    name = "outputs"

    def __init__(self, engine: RunEngine) -> None:
        self._engine, self._module, self._precision = engine, engine.module, engine.precision
        laid_out = engine.technique(MemoryFormat)
        self._memory_format = laid_out if laid_out is not None and laid_out.has_weights else None
        self._steps: Counter[str] = Counter()  # the number of steps in another form, by stage
        self._mended: set[str] = set()  # evaluation stages that are searched after every step
        self._looked_at: _Form | None = None  # the form of the current step, if it was searched
        self._leaving: dict[str, str] = {}  # techniques to revert before the next step, with reasons
        self._draws: LayoutDraws | None = None  # random draws since the latest backward pass, if they are looked at
        self._has_drawn = False  # whether that pass has drawn any
        self._shows_after = True  # whether what follows the backward pass is shown the user's layout
        self._was_laid_out = False  # whether we laid out any step in channels_last
        self._is_cut = False  # whether the latest search stopped at its limit
        self._own: WeakValueDictionary[int, Tensor] | None = None  # the user's tensors in such a form
        self._hooks: Counter[str] = Counter()  # the number of calls, by the name of a user's hook between steps
        self._makers: set[str] = set()  # those of the hooks that have made tensors in such a form

        is_in_form = self._memory_format is not None or self._precision.chosen_dtype is not None
        companions = [HooksLayer(self._module, self._memory_format, self._noting)] if is_in_form else []
        stepping = [(self._module, ("optimizer_step",))] if self._memory_format is not None else []
        strategy = self._module.trainer.strategy
        super().__init__([(strategy, STEPS), (self._precision, ("backward",)), *stepping], companions)

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        if self._own is None:
            self._find_own()
        while self._leaving:
            self._engine.revert(*self._leaving.popitem(), "refused")
        self._looked_at = None
        is_cast = self._precision.is_ours
        is_laid_out = self._memory_format is not None and self._memory_format.acts()
        if not (is_cast or is_laid_out):
            return call(*args, **kwargs)
        if is_laid_out and self._memory_format is not None:
            self._memory_format.lay()
        form = _Form(self._precision.chosen_dtype if is_cast else None, is_laid_out)
        self._steps[stage] += 1
        self._was_laid_out |= form.is_laid_out
        is_look = stage in self._mended or self._steps[stage].bit_count() == 1  # the 1st, 2nd, 4th, 8th ...
        parameters = [(p, p.data) for p in self._module.parameters()] if is_look else []
        outputs = call(*args, **kwargs)
        if any(map(form.technique, tensors_in(outputs))):
            outputs = map_tensors(form.plain, outputs)
        if is_look or self._is_in_sight(form):
            self._look(stage, form, parameters)
        for technique, reason in self._engine.spoilt():
            if self._engine.can_repeat_step():
                raise EditError(technique, reason)
        return outputs

    def around_backward(self, call: Call, *args: Any, **kwargs: Any) -> None:
        """Searches for tensors that backward hooks keep if the forward pass was searched, and for their random draws.

        A gradient has the layout of its weight in memory, and so has the noise that is added to it. So what follows the
        backward pass sees the user's layout, unless nothing was drawn there up to the end of the first optimizer step.
        """
        if self._looked_at is None and self._memory_format is None:
            call(*args, **kwargs)
            return
        self._draws = LayoutDraws(self._module.device) if self._engine.has("memory_format") else None
        call(*args, **kwargs)
        self._has_drawn = self._draws is not None and self._draws.have_moved()
        if self._has_drawn and self._engine.has("memory_format"):
            self._leaving["memory_format"] = DRAWS_GOING_BACKWARD
        elif self._memory_format is not None and self._shows_after and self._module.automatic_optimization:
            self._memory_format.show()
        if self._looked_at is not None:
            self._leaving |= self._brought_to_plain(self._looked_at)

    def around_optimizer_step(self, call: Call, *args: Any, **kwargs: Any) -> None:
        """Looks for random draws of the user's own code, and of the optimizer, after the backward pass."""
        call(*args, **kwargs)
        draws, self._draws = self._draws, None
        if draws is None or self._memory_format is None:
            return
        has_drawn = draws.have_moved()
        if has_drawn and self._engine.has("memory_format") and not self._memory_format.is_shown:
            self._leaving["memory_format"] = _DRAWS_AFTERWARDS
        self._shows_after &= has_drawn

    def has_drawn_laid_out(self) -> bool:
        """Returns whether the latest backward pass has drawn random numbers while a layout may be on."""
        return self._has_drawn and self._memory_format is not None and self._memory_format.acts()

    def mend(self) -> list[str]:
        """Converts what earlier steps left to the plain form, before a step that may fail with another form.

        Returns:
            The techniques whose form it was. They are reverted before the next step.
        """
        if not self._steps:
            return []
        self._leaving |= self._brought_to_plain(_Form(self._precision.chosen_dtype, self._was_laid_out))
        return list(self._leaving)

    def _find_own(self, earlier: Sequence[Tensor] = ()) -> bool:
        """Notes the user's own tensors in such forms: all but earlier ones. A 16-bit one rules out our precision."""
        self._own = WeakValueDictionary() if self._own is None else self._own
        form, known = _Form(self._precision.chosen_dtype, is_laid_out=True), set(map(id, earlier))
        found = [(way, tensor) for way, tensor in self._left_behind(form) if id(tensor) not in known]
        for way, tensor in found:
            self._own[id(tensor)] = tensor
            if form.technique(tensor) == "precision":
                self._leaving["precision"] = f"{way} is in {str(tensor.dtype).removeprefix('torch.')} of its own"
        return bool(found)

    @contextmanager
    def _noting(self, hook: str) -> Iterator[None]:
        """Notes what a user's hook makes in such a form: in its 1st, 2nd, 4th ... call, and in all once it has."""
        self._hooks[hook] += 1
        if self._own is None or not (hook in self._makers or self._hooks[hook].bit_count() == 1):
            yield
            return
        purse, form = self._engine.purse, _Form(self._precision.chosen_dtype, is_laid_out=True)
        with nullcontext() if purse is None else purse.paying(LOOKING):
            earlier = [tensor for _, tensor in self._left_behind(form)]
        yield
        with nullcontext() if purse is None else purse.paying(LOOKING):
            if self._find_own(earlier):
                self._makers.add(hook)

    def _is_in_sight(self, form: _Form) -> bool:
        """Returns whether a module attribute, or the end of a list, is in a form: a cheap check for every step."""
        values = [part[-1] if type(part) is list and part else part for part in vars(self._module).values()]
        own = self._own or ()
        return any(form.technique(t) is not None and id(t) not in own for t in values if isinstance(t, Tensor))

    def _look(self, name: str, form: _Form, parameters: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Searches for tensors that a step left in another form, and converts them to the plain form."""
        moved = [(p, before) for p, before in parameters if p.dtype != before.dtype]
        # Tensors that a backward pass will read stay until it is over. With manual optimization it is over by now.
        goes_backward = name == "training_step" and self._module.automatic_optimization
        reasons = self._brought_to_plain(form, spares_graphs=goes_backward)
        for parameter, before in moved:
            parameter.data = before  # the value before rounding
        if name != "training_step":
            self._mended |= {name} if reasons else set()
            if reasons and self._is_cut:
                self._leaving = reasons | self._brought_to_plain(form, most=sys.maxsize)
            return
        self._looked_at = form
        if not reasons:
            return
        if moved and self._engine.can_repeat_step():  # the gradient would have the parameter's wrong dtype
            raise EditError("precision", reasons["precision"])
        self._leaving = reasons

    def _brought_to_plain(self, form: _Form, *, spares_graphs: bool = False, most: int = MOST) -> dict[str, str]:
        """Converts all held tensors in a form to the plain form. Returns the reasons, by technique."""
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
        """Returns the tensors in a form that the user's objects hold since the run began, each with the path to it."""
        callbacks = callbacks_of(self._module.trainer)
        roots = [("self", self._module), *((type(callback).__name__, callback) for callback in callbacks)]
        own = self._own or ()
        found = []
        plain: set[tuple[Any, int]] = set()  # storages, each with the dimensions of a tensor there in the plain form
        self._is_cut = False
        try:
            for way, tensor in held_tensors(*roots, most=most):
                technique = form.technique(tensor)
                is_ours = technique == "memory_format" and isinstance(tensor, nn.Parameter)  # the technique restores it
                if technique is None:
                    plain.add(_place_of(tensor))
                elif not is_ours and id(tensor) not in own:
                    found.append((way, tensor))
        except LookupError as error:
            self._is_cut = True
            self._engine.report.note(f"not all that outlives a step could be looked at: {error}")
        # Beside a tensor in the plain form, another view of its memory has the layout that the user gave it.
        return [(way, tensor) for way, tensor in found if _place_of(tensor) not in plain]


def _place_of(tensor: Tensor) -> tuple[Any, int]:
    storage = storage_of(tensor)
    return (id(tensor), 0) if storage is None else (storage, tensor.dim())
