"""Clever, for want of a plain form: a precision plugin that changes its class when it begins or ends to autocast.

Lightning's helpers (:class:`~lightning.pytorch.callbacks.ThroughputMonitor`) read the compute dtype off
``isinstance(plugin, MixedPrecision)``, and the device is known only after the plugin was made. One that always is a
``MixedPrecision`` looks like float16 to them when it runs in float32, one that never is like float32 when it does not.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accel.core.report import Report
from lightning_accel.lightning.packages import (
    LightningModule,
    LightningOptimizer,
    MixedPrecision,
    Package,
    Precision,
    in_order_of,
    own,
    plain,
)
from lightning_accel.lightning.private import after_closure
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.techniques.mixed_precision import (
    DTYPES,
    CountingGradScaler,
    check_optimizer,
    without_mha_fast_path,
)

ResolvedPrecision = Literal["32-true", "16-mixed", "bf16-mixed"]


class AutocastPrecision(Precision):
    """Autocast and a gradient scaler, in force according to :attr:`precision`.

    Args:
        precision: What is in force at first.
        is_chosen: Whether it is chosen for the run, not by the user: float32 then remains the way out.

    Attributes:
        precision: What is in force.
        scaler: The gradient scaler with ``"16-mixed"``, else None.
        device: The kind of device that computes.
    """

    _plain_class: ClassVar[type[AutocastPrecision] | None] = None  # on the class that `_autocasting` makes

    def __init__(self, precision: ResolvedPrecision, *, is_chosen: bool) -> None:
        self._is_chosen = is_chosen
        self._package: Package | None = None  # whose Trainer runs it
        self.scaler: CountingGradScaler | None = None
        self.device = "cpu"
        self._unscaled: weakref.ref[Tensor] | None = None  # the latest loss that was scaled
        self._runs_in_float32 = False  # autocast is left out of a step, whatever the precision
        self._unsaid: Any = None  # the filter of a warning
        self._set_precision(precision)

    def _set_precision(self, precision: ResolvedPrecision) -> None:
        """Becomes a ``MixedPrecision`` exactly when autocast is on."""
        self.say_again()
        self.precision = precision
        kind: Any = self._kind if precision == "32-true" else _autocasting(self._kind)
        self.__class__ = kind if self._package is None else in_order_of(self._package, kind)
        if precision != "16-mixed":
            self.scaler = None
        elif self.scaler is None or self.scaler.device != self.device:
            self.scaler = CountingGradScaler(self.device)

    def be_of(self, package: Package) -> None:
        """Takes what it inherits from this package of Lightning's, whose Trainer runs it."""
        self._package = package
        self._set_precision(cast(ResolvedPrecision, self.precision))

    @property
    def _kind(self) -> Any:
        """Its class, as it was made with."""
        return self._plain_class or plain(type(self))

    @property
    def is_ours(self) -> bool:
        """Whether steps run in a precision that the user did not ask for by name."""
        return self._is_chosen and self.precision != "32-true" and not self._runs_in_float32

    @property
    def image_dtype(self) -> torch.dtype:
        """What preprocessed images are to be in: float32 where steps may come back to it, as images are made ahead."""
        return torch.float32 if self._is_chosen else DTYPES.get(self.precision, torch.float32)

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self.is_ours and self._unsaid is None:
            # Lightning's summary, which comes next, warns of every mixed precision: here of one that nobody chose.
            warnings.filterwarnings("ignore", f"Precision {self.precision} is not supported by the model summary")
            self._unsaid = warnings.filters[0]
        return super().connect(model, optimizers, lr_schedulers)

    def say_again(self) -> None:
        """Ends what :meth:`connect` has begun: with the first step, or with the run."""
        unsaid, self._unsaid = self._unsaid, None
        if unsaid is not None:
            with suppress(ValueError):  # somebody has reset the filters
                warnings.filters.remove(unsaid)  # type: ignore[attr-defined]

    def arms(self) -> list[Arm]:
        """What live trials may choose from. float16 needs its scaler, and with it a step of another kind: no arm."""
        if self._is_chosen and self.precision == "bf16-mixed":
            return [Arm("precision", ("bf16-mixed",), self._set_choice)]
        return []

    def _set_choice(self, choice: str) -> None:
        self._runs_in_float32 = choice == OFF

    @property
    def chosen_dtype(self) -> torch.dtype | None:
        """What steps of the run may make of float32, where the user has not asked for it by name; None: nothing."""
        return DTYPES.get(self.precision) if self._is_chosen else None

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Runs a step in float32, if another precision was not the user's."""
        before, self._runs_in_float32 = self._runs_in_float32, self._is_chosen or self._runs_in_float32
        try:
            yield
        finally:
            self._runs_in_float32 = before

    def give_up(self, report: Report, reason: str) -> None:
        """Runs in float32 from now on, if another precision was not the user's."""
        if self._is_chosen and self.precision != "32-true":
            self._set_precision("32-true")
            record = report.of("precision")
            record.is_on, record.status = False, f"32-true: {reason}"

    def scaled(self, loss: Tensor) -> Tensor:
        """What the backward pass starts from."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def let_go_of(self, loss: Tensor) -> None:
        """Frees the graph of a scaled loss that is not gone backward from after all."""
        for one in (loss, None if self._unscaled is None else self._unscaled()):
            if one is not None and one.grad_fn is not None:
                one.detach_()

    @contextmanager
    def _scaled_step(self, step: AbstractContextManager[None], scaler: CountingGradScaler) -> Iterator[None]:
        with step:
            yield
        # With manual optimization every optimizer of this step has had its turn.
        scaler.finish_step()

    @override
    def __reduce__(self) -> Any:
        return _copied, (self._kind, dict(vars(self)))


@contextmanager
def nested(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    """One context within another."""
    with outer, inner:
        yield


class _Autocasting(MixedPrecision):
    """What an :class:`AutocastPrecision` does otherwise while it autocasts."""

    scaler: CountingGradScaler | None
    _runs_in_float32: bool
    _unscaled: weakref.ref[Tensor] | None
    _unsaid: Any
    say_again: Callable[[], None]

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self.scaler is not None:
            self._unscaled = weakref.ref(tensor)
        return super().pre_backward(tensor, module)

    @override
    def forward_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        if self._unsaid is not None:
            self.say_again()
        if self._runs_in_float32:
            return own(self, Precision).forward_context(self)
        return nested(without_mha_fast_path(self.device), super().forward_context())

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        check_optimizer(optimizer, self.precision)
        closure_result = closure()
        scaler: CountingGradScaler | None = self.scaler
        if scaler is None:  # the step raised, was repeated in float32, and the run stays with that
            after_closure(self, model, optimizer)
            optimizer.step(**kwargs)
            return closure_result
        # training_step returned None: there is no new gradient, and what is left of older ones must not be used.
        is_skipped = closure_result is None and model.automatic_optimization
        if not is_skipped:
            scaler.unscale_(optimizer)  # before the hooks that look at gradients, and before clipping
        after_closure(self, model, optimizer)
        if is_skipped:
            return closure_result
        result = scaler.step(optimizer, **kwargs)
        if model.automatic_optimization:
            scaler.finish_step()
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        if self.scaler is not None and clip_val > 0:
            unwrapped = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
            self.scaler.unscale_(unwrapped)
        # Past Lightning's MixedPrecision, which refuses fused optimizers: ours unscales before they step.
        own(self, Precision).clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


@functools.cache
def _autocasting(kind: Any) -> Any:
    """``kind`` while it autocasts: the same, but its ``super()`` calls reach :class:`_Autocasting`."""
    likeness = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, _Autocasting), {**likeness, "_plain_class": kind})


def _copied(kind: type[AutocastPrecision], state: dict[str, Any]) -> AutocastPrecision:
    plugin = kind.__new__(kind)
    vars(plugin).update(state)
    plugin._set_precision(cast(ResolvedPrecision, plugin.precision))
    return plugin
