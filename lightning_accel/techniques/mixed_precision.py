"""Mixed precision: which one suits the device, the autocast region, and a gradient scaler that keeps count.

Micikevicius et al., "Mixed Precision Training" (2018), https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_accel.host import Host
from lightning_accel.plan import PrecisionSetting
from lightning_accel.techniques.base import Technique

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def resolve_precision(setting: PrecisionSetting, host: Host) -> tuple[str, str]:
    """What ``setting`` means on ``host``.

    Returns:
        The precision, one of ``"32-true"``, ``"16-mixed"``, ``"bf16-mixed"``, and the reason in words.
    """
    if setting != "auto":
        emulated = setting == "bf16-mixed" and not host.native_bf16
        return setting, "as asked" + (
            f"; {host.device_name} only emulates bfloat16, expect no speed" if emulated else ""
        )
    if host.native_bf16 and host.kind in ("cuda", "rocm", "cpu"):
        return "bf16-mixed", "the device computes in bfloat16 natively"
    if host.kind in ("cuda", "rocm"):
        return "16-mixed", "the device has no native bfloat16: float16 with a gradient scaler"
    if host.kind == "cpu":
        return "32-true", "this CPU has neither AVX512-BF16 nor AMX: bfloat16 would be emulated, and slower"
    return "32-true", f"not measured on {host.kind} yet; set precision='bf16-mixed' to try it"


@contextmanager
def without_mha_fast_path(device_type: str) -> Iterator[None]:
    """Keeps ``nn.TransformerEncoder`` and its parts on their ordinary path, on CPU.

    Their inference fast path checks for autocast on CUDA only: under CPU autocast a padding mask sends it into a
    nested-tensor kernel that fails with "expected scalar type Float but found BFloat16" (torch 2.11 to 2.13).
    """
    before = torch.backends.mha.get_fastpath_enabled()
    if device_type != "cpu" or not before:
        yield
        return
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class CountingGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` for several optimizers a step, which counts the steps it skipped.

    It differs from torch's in three ways, none of which changes a correct use of it: :meth:`unscale_` may be called
    again (clipping by hand and stepping both need it); a scale left without :meth:`update` after a step is updated
    before it is next used, so that all optimizers of one training step see one scale; skipped steps are counted on
    the device, without a synchronisation.
    """

    def __init__(self, device: str = "cuda", **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._unscaled: set[int] = set()
        self._update_is_due = False
        self._skipped: torch.Tensor | None = None

    @property
    def skipped_steps(self) -> int:
        """How many updates found an overflow and skipped their optimizer step. Synchronises the device."""
        return 0 if self._skipped is None else int(self._skipped.item())

    @override
    def scale(self, outputs: Any) -> Any:
        self.update_if_due()
        return super().scale(outputs)

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            super().unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not _has_gradients(optimizer):
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]  # nothing to unscale or to check
        result = super().step(optimizer, *args, **kwargs)
        self._update_is_due = True
        return result

    @override
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        before = None if self._scale is None else self._scale.clone()
        super().update(new_scale)
        self._unscaled.clear()
        self._update_is_due = False
        if before is not None and self._scale is not None and new_scale is None:
            skipped = (self._scale < before).sum()
            self._skipped = skipped if self._skipped is None else self._skipped + skipped

    def update_if_due(self) -> None:
        """Updates the scale if an optimizer stepped since the last update."""
        if self._update_is_due:
            self.update()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def check_optimizer(optimizer: Optimizer, precision: str) -> None:
    """Raises a ``ValueError`` for an optimizer that cannot work with a gradient scaler."""
    if precision == "16-mixed" and isinstance(optimizer, LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} with precision='16-mixed': it calls its closure several times a step, and"
            " the gradient scaler can neither unscale nor skip in between. Use precision='bf16-mixed' or '32-true'."
        )


class MixedPrecision(Technique):
    """Autocast around every step of a plain PyTorch loop (under Lightning its own ``MixedPrecision`` does this).

    Attributes:
        precision: What the setting came to on this host.
        scaler: The loop's gradient scaler, which does nothing unless the precision is ``"16-mixed"``.
    """

    name: ClassVar[str] = "precision"
    acts_without_sites: ClassVar[bool] = True

    def __init__(self, setting: PrecisionSetting, host: Host) -> None:
        self.precision, reason = resolve_precision(setting, host)
        self.status = f"{self.precision}: {reason}"
        self._device_type = host.device_type
        self.scaler = CountingGradScaler(self._device_type, enabled=self.precision == "16-mixed")

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        dtype = DTYPES.get(self.precision)
        return nullcontext() if dtype is None else self._autocast(dtype)

    @contextmanager
    def _autocast(self, dtype: torch.dtype) -> Iterator[None]:
        # Without the cast cache, as Lightning does: a cast made under no_grad would be reused where gradients are due.
        with (
            without_mha_fast_path(self._device_type),
            torch.autocast(self._device_type, dtype=dtype, cache_enabled=False),
        ):
            yield
