"""Mixed precision: which one suits the device, the autocast region, and a gradient scaler that keeps count.

Micikevicius et al., "Mixed Precision Training" (2018), https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import Self, override

from lightning_accel.core.host import Host
from lightning_accel.core.patch import temporarily
from lightning_accel.core.torch_private.training import optimizer_states
from lightning_accel.techniques.arms import Arm
from lightning_accel.techniques.base import BuildContext, Forecast, Technique
from lightning_accel.techniques.registry import register

PrecisionSetting = Literal["auto", "32-true", "16-mixed", "bf16-mixed"]
DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """The number format of a step.

    Attributes:
        mode: ``"auto"``: bfloat16 where the device computes in it natively, float16 with a gradient scaler on older
            CUDA cards, else float32.
    """

    mode: PrecisionSetting = "auto"


def resolve_precision(setting: PrecisionSetting, host: Host) -> tuple[str, str]:
    """The precision that ``setting`` means on ``host``, and the reason in words; another one where it cannot be had."""
    if setting == "16-mixed" and host.kind == "xla":
        return "32-true", (
            "float16 needs a gradient scaler, which would stop XLA at every step, and TPUs compute in bfloat16:"
            " precision='bf16-mixed' is for them"
        )
    if setting != "auto":
        remark = ""
        if setting != "32-true" and host.kind in ("mps", "xla"):
            remark = f"; not measured on {host.kind} yet"
        elif setting == "bf16-mixed" and not host.native_bf16:
            remark = f"; {host.device_name} only emulates bfloat16, expect no speed"
        return setting, f"as asked{remark}"
    if host.native_bf16 and host.kind in ("cuda", "rocm", "cpu"):
        return "bf16-mixed", "the device computes in bfloat16 natively"
    if host.kind in ("cuda", "rocm"):
        return "16-mixed", "the device has no native bfloat16: float16 with a gradient scaler"
    if host.kind == "cpu":
        return "32-true", "this CPU has neither AVX512-BF16 nor AMX: bfloat16 would be emulated, and slower"
    return "32-true", f"not measured on {host.kind} yet; set precision='bf16-mixed' to try it"


def without_mha_fast_path(device_type: str) -> AbstractContextManager[None]:
    """Keeps ``nn.TransformerEncoder`` and its parts on their ordinary path, on CPU.

    Their inference fast path checks for autocast on CUDA only: under CPU autocast a padding mask sends it into a
    nested-tensor kernel that fails with "expected scalar type Float but found BFloat16" (torch 2.11 to 2.13).
    """
    if device_type != "cpu":
        return nullcontext()
    return temporarily(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False)


class CountingGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` for several optimizers a step, which counts the steps it skipped.

    It differs from torch's in four ways, none of which changes a correct use of it: :meth:`unscale_` may be called
    again (clipping by hand and stepping both need it); a scale left without :meth:`update` after a step is updated
    before it is next used; gradients of other optimizers that wait for their step meanwhile are brought to the new
    scale; skipped steps are counted on the device, without a synchronisation.
    """

    def __init__(self, device: str = "cuda", **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self.device = device
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        self._skipped: Tensor | None = None

    @property
    def skipped_steps(self) -> int:
        """How many updates found an overflow and skipped their optimizer step. Synchronises the device."""
        return 0 if self._skipped is None else int(self._skipped.item())

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Makes optimizers known before their first step, so that no update passes over their waiting gradients."""
        self._optimizers.update(optimizers)

    @override
    def scale(self, outputs: Any) -> Any:
        if self._stepped:
            # Those that are unscaled and wait for their step stay so, and answer for their overflow then.
            states = optimizer_states(self)
            waiting = {key: states.pop(key) for key in self._unscaled - self._stepped}
            self.update()
            optimizer_states(self).update(waiting)
            self._unscaled.update(waiting)
        return super().scale(outputs)

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        if self.is_enabled() and id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            super().unscale_(optimizer)
            self._optimizers.add(optimizer)
            self._unscaled.add(id(optimizer))

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not self.is_enabled() or not _has_gradients(optimizer):
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]  # nothing to unscale or to check
        result = super().step(optimizer, *args, **kwargs)
        self._optimizers.add(optimizer)
        self._unscaled.add(id(optimizer))
        self._stepped.add(id(optimizer))
        return result

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        if not self.is_enabled():
            return
        if new_scale is None and not any(state["found_inf_per_device"] for state in optimizer_states(self).values()):
            return
        before = None if self._scale is None else self._scale.clone()
        super().update(new_scale)
        if before is not None and self._scale is not None:
            waiting = [p.grad for p in self._parameters_under_scale() if p.grad is not None]
            for gradient in waiting:
                gradient.mul_(self._scale / before)
            if new_scale is None:
                skipped = (self._scale < before).sum()
                self._skipped = skipped if self._skipped is None else self._skipped + skipped
        self._unscaled.clear()
        self._stepped.clear()

    def finish_step(self) -> None:
        """Ends a training step: the scale is updated, and whatever was unscaled without a step is forgotten."""
        if self._stepped:
            self.update()
        self.forget()

    def forget(self) -> None:
        """Drops what a step that did not come to its end has left behind."""
        if self._unscaled:
            optimizer_states(self).clear()
        self._unscaled.clear()
        self._stepped.clear()

    @override
    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_optimizers")  # weak references to the optimizers of this process
        return state

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._optimizers = weakref.WeakSet()

    def _parameters_under_scale(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            if id(optimizer) not in self._unscaled:
                yield from (parameter for group in optimizer.param_groups for parameter in group["params"])


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def check_optimizer(optimizer: Optimizer, precision: str) -> None:
    """Raises a ``ValueError`` for an optimizer that cannot work with a gradient scaler."""
    if precision == "16-mixed" and isinstance(optimizer, LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} with precision='16-mixed': it calls its closure several times a step, and"
            " the gradient scaler can neither unscale nor skip in between. Use precision='bf16-mixed' or '32-true'."
        )


@register(
    "precision",
    settings=PrecisionPlan,
    default="auto",
    off="32-true",
    after="preprocess",
    exactness="precision",
    shown=("16-mixed", "bf16-mixed"),
    in_plain_loops_only=True,
)
class MixedPrecision(Technique):
    """Autocast around every step of a plain PyTorch loop (under Lightning its own ``MixedPrecision`` does this)."""

    acts_without_sites: ClassVar[bool] = True

    def __init__(self, setting: PrecisionSetting, host: Host) -> None:
        self.precision, reason = resolve_precision(setting, host)
        self._setting, self._reason = setting, reason
        self._autocast_to = DTYPES.get(self.precision)
        # What was not asked for by name may be given up, and batches are made ahead.
        self.dtype = None if setting == "auto" else self._autocast_to
        self.notes.status = f"{self.precision}: {reason}"
        if setting not in ("auto", self.precision):
            self.notes.warn(f"precision={setting!r}: {reason}")
        self._device_type = host.device_type

    @cached_property
    def scaler(self) -> torch.amp.GradScaler:
        """The loop's, which does nothing unless the precision is ``"16-mixed"``."""
        return torch.amp.GradScaler(self._device_type, enabled=self.precision == "16-mixed")

    @classmethod
    @override
    def from_settings(cls, settings: PrecisionPlan, context: BuildContext) -> Self:
        return cls(settings.mode, context.host)

    @override
    def forecast(self, host: Host) -> Forecast:
        words = f"{self.precision}: {self._reason}"
        if self._setting == "auto":
            return Forecast(self.precision != "32-true", f"`{self.precision}`", words)
        as_asked = self.precision == self._setting
        return Forecast(as_asked, "yes" if as_asked else "no", self._reason if as_asked else words)

    @override
    def arms(self) -> Iterable[Arm]:
        # float16 needs its scaler, and with it a step of another kind: that stays as the rules have it.
        if self._setting == "auto" and self.precision == "bf16-mixed":
            yield Arm(self.name, (self.precision,), self._set_choice)

    def _set_choice(self, choice: str) -> None:
        self._autocast_to = DTYPES.get(choice)

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast_to is None else self._autocast(self._autocast_to)

    @contextmanager
    def _autocast(self, dtype: torch.dtype) -> Iterator[None]:
        # Without the cast cache, as Lightning does: a cast made under no_grad would be reused where gradients are due.
        with (
            without_mha_fast_path(self._device_type),
            torch.autocast(self._device_type, dtype=dtype, cache_enabled=False),
        ):
            yield
