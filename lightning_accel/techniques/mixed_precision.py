"""Mixed precision: which one suits the device, and the number format of a step.

Micikevicius et al., "Mixed Precision Training" (2018), https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accel.core.host import SLOW_BF16, Host
from lightning_accel.core.patch import temporarily
from lightning_accel.core.report import Report
from lightning_accel.techniques.arms import OFF, Arm, Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.grad_scaler import CountingGradScaler
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.technique_context import Forecast
from lightning_accel.techniques.technique_events import Event, Switched

ResolvedPrecision = Literal["32-true", "16-mixed", "bf16-mixed"]
PrecisionSetting = Literal["auto", "32-true", "16-mixed", "bf16-mixed"]
DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def resolve_precision(setting: PrecisionSetting, host: Host) -> tuple[ResolvedPrecision, str]:
    """The precision that ``setting`` comes to on ``host``, and the reason in words.

    It differs from a setting other than ``"auto"`` only if the host cannot compute in that.
    """
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
            remark = f"; {host.device_name} is no faster in bfloat16 than in float32"
        return setting, f"as asked{remark}"
    if host.native_bf16 and host.kind in ("cuda", "rocm", "cpu"):
        return "bf16-mixed", "the device computes in bfloat16 natively"
    if host.kind in ("cuda", "rocm"):
        return "16-mixed", "the device has no native bfloat16: float16 with a gradient scaler"
    if host.kind == "cpu":
        return "32-true", SLOW_BF16
    return "32-true", f"not measured on {host.kind} yet; set precision='bf16-mixed' to try it"


def without_mha_fast_path(device_type: str) -> AbstractContextManager[None]:
    """Keeps ``nn.TransformerEncoder`` and its parts on their ordinary path, on CPU.

    Their inference fast path checks for autocast on CUDA only. Under CPU autocast, a padding mask sends it into a
    nested-tensor kernel that fails with "expected scalar type Float but found BFloat16" (torch 2.11 to 2.13).
    """
    if device_type != "cpu":
        return nullcontext()
    return temporarily(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False)


class Autocast:
    """The number format of steps: the autocast region and, for float16, the gradient scaler.

    Args:
        precision: The precision at first.
        device: The type of the device that computes.
        is_chosen: Whether this library chose the precision. A step may then run in float32 after all; a precision that
            the user asked for by name is never left.
    """

    precision: Any  # the one in force, a ResolvedPrecision; Lightning's Precision declares more
    scaler: CountingGradScaler | None = None  # with "16-mixed"

    def __init__(self, precision: ResolvedPrecision, device: str, *, is_chosen: bool) -> None:
        self.device = device
        self._is_chosen = is_chosen
        self.set_precision(precision)

    def set_precision(self, precision: ResolvedPrecision) -> None:
        """Sets the precision of the steps that follow."""
        self.precision, self._runs_in_float32 = precision, False
        if precision != "16-mixed":
            self.scaler = None
        elif self.scaler is None or self.scaler.device != self.device:
            self.scaler = CountingGradScaler(self.device)

    def give_up(self, report: Report, reason: str) -> None:
        """Sets float32 for the rest of the run, unless the user asked for another precision by name."""
        if self.chosen_dtype is not None:
            self.set_precision("32-true")
            record = report.of("precision")
            record.is_on, record.status = False, f"32-true: {reason}"

    # -- around a step -----------------------------------------------------------------------------------------

    def forward_context(self) -> AbstractContextManager[Any]:
        """What others compute in, outside of steps (a model summary): float32, unless the user chose the precision."""
        return nullcontext() if self.is_ours else self.step_context()

    def step_context(self) -> AbstractContextManager[Any]:
        """The region in which forward and loss of a step compute."""
        if self._runs_in_float32 or self.precision == "32-true":
            return nullcontext()
        return self._autocast()

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        with without_mha_fast_path(self.device), self.autocast_context_manager():
            yield

    def autocast_context_manager(self) -> torch.autocast:
        """The autocast region alone, by the name that it has in Lightning's ``MixedPrecision``."""
        # Autocast's cache would use a cast that was made under no_grad again where a gradient is due.
        return torch.autocast(self.device, dtype=DTYPES[self.precision], cache_enabled=False)

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Runs a step in float32, unless the user asked for another precision by name."""
        before, self._runs_in_float32 = self._runs_in_float32, self._is_chosen or self._runs_in_float32
        try:
            yield
        finally:
            self._runs_in_float32 = before

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that the backward pass starts from."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    # -- what others ask ---------------------------------------------------------------------------------------

    @property
    def is_ours(self) -> bool:
        """Whether the next step runs in a precision below float32 that this library chose."""
        return self._is_chosen and self.precision != "32-true" and not self._runs_in_float32

    @property
    def chosen_dtype(self) -> torch.dtype | None:
        """The dtype below float32 that this library chose; None if the user chose, or if the run is in float32."""
        return DTYPES.get(self.precision) if self._is_chosen else None

    @property
    def image_dtype(self) -> torch.dtype:
        """The dtype for preprocessed images. They are made ahead, so it is float32 if a step may return to that."""
        return torch.float32 if self._is_chosen else DTYPES.get(self.precision, torch.float32)

    def arms(self) -> list[Arm]:
        """The choices of live trials. Float16 is none: its scaler makes the step another kind of step."""
        if self._is_chosen and self.precision == "bf16-mixed":
            return [Arm("precision", ("bf16-mixed",), self.switch)]
        return []

    def switch(self, choice: str) -> None:
        """Has the next steps run in its precision or, with ``"off"``, in float32."""
        self._runs_in_float32 = choice == OFF


@register(
    "precision", options=PrecisionSetting, default="auto", off="32-true", after="preprocess", exactness="precision"
)
class MixedPrecision(Technique):
    """Autocast around every step of a plain PyTorch loop. Under Lightning, its precision plugin does this."""

    traits = Traits(acts_without_sites=True)

    def __init__(self, settings: PrecisionSetting, context: BuildContext) -> None:
        setting, host = settings, context.host
        self.precision, reason = resolve_precision(setting, host)
        self.run.status = f"{self.precision}: {reason}"
        if setting not in ("auto", self.precision):
            self.run.warn(f"precision={setting!r}: {reason}")
        self._device_type, self._is_chosen = host.device_type, setting == "auto"
        if self._is_chosen and self.precision == "bf16-mixed":
            self.run.live = Live(variants=(self.precision,))
        if setting == "auto":
            self.run.forecast = Forecast(self.precision != "32-true", f"`{self.precision}`", self.run.status)
        else:  # live trials may leave a precision that we chose, and batches are made ahead
            context.dtype = DTYPES.get(self.precision, torch.float32)
            is_had = self.precision == setting
            self.run.forecast = Forecast(is_had, "yes" if is_had else "no", reason if is_had else self.run.status)

    @cached_property
    def autocast(self) -> Autocast:
        """What the steps run in."""
        return Autocast(self.precision, self._device_type, is_chosen=self._is_chosen)

    @override
    def on(self, event: Event) -> None:
        if isinstance(event, Switched):
            self.autocast.switch(event.variant)

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        return self.autocast.step_context()
