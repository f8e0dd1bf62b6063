"""The precision of float32 products: TF32 on NVIDIA's cards, bfloat16 by oneDNN on CPUs.

https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from lightning_accel.core.hidden_warnings import hidden_warnings
from lightning_accel.core.host import SLOW_BF16, Host
from lightning_accel.core.isolation import is_trial
from lightning_accel.core.patch import AttributePatch, Patch, PatchSet, applied
from lightning_accel.core.torch_private.compilation import graphs_captured
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import Forecast, Verdict, Verdicts

MatmulPrecisionSetting = Literal["off", "auto", "high", "medium"]

_FORMATS = {"cuda": "TF32", "cpu": "bfloat16"}
_BACKENDS: Any = torch.backends  # whose types lack some of these names
_UNSET = ("none", "none", "none")
_ADVICE = "Please use the new API settings"  # of torch 2.9, to break whoever reads the older one


def possible_on(host: Host) -> tuple[str, ...]:
    """The precisions below float32 that products of float32 matrices can have on ``host``, the first of them first."""
    if host.kind == "cuda" and host.capability is not None and host.capability >= (8, 0):
        return ("high", "medium")  # both are TF32: torch 2.11 to 2.13 have nothing between that and bfloat16
    return ("medium",) if host.kind == "cpu" and host.native_bf16 else ()


def why_not_on(host: Host) -> str:
    """Why a host has none, or not the one that was asked for."""
    if host.kind == "cuda":
        return f"{host.device_name} has no TF32, which came with compute capability 8.0"
    if host.kind == "cpu":
        return "CPUs have no TF32: precision.matmul='medium' multiplies in bfloat16" if host.native_bf16 else SLOW_BF16
    return f"not measured on {host.kind}"


class MatmulPrecisionPatch(Patch):
    """Sets the precision for this process; undone where nobody has set another one since.

    It can rest in between: what is in force then is the user's own.

    By the older of torch's two interfaces, which sets the newer one, too: once only the newer one is set, the older one
    raises when it is read, and Lightning reads it at every Trainer.
    """

    def __init__(self, choice: str, change: str) -> None:
        super().__init__("", change)
        self.variants = (choice,)
        self._before = "highest", _UNSET
        self._ours: tuple[str, ...] = ()
        self._rests = False

    @property
    @override
    def settle(self) -> int:  # type: ignore[override]
        # What is compiled is guarded by this precision: each side of it is compiled once.
        return int(graphs_captured() > 0)

    def rest(self, rests: bool) -> None:
        """Has what the user has in force, or ours again; nothing where somebody has set another one since."""
        if not self.is_applied or rests == self._rests:
            return
        if rests:
            self._rests = self._restore()
        else:
            self._rests = False
            if in_force() == self._before[1]:
                _set_older(self.variants[0])

    @override
    def _apply(self) -> None:
        self._before = _older(), in_force()
        _set_older(self.variants[0])
        self._ours = in_force()
        self._rests = False

    @override
    def _undo(self) -> None:
        if not self._rests:
            self._restore()

    def _restore(self) -> bool:
        """Has what was in force before, and returns whether it has: not where somebody has set another one since."""
        if in_force() != self._ours:
            return False
        older, newer = self._before
        _set_older(older)
        # "none", which is nobody's choice, is what the older interface cannot set.
        _BACKENDS.cuda.matmul.fp32_precision = newer[1]
        _BACKENDS.mkldnn.matmul.fp32_precision = newer[2]
        return True


def in_force() -> tuple[str, str, str]:
    """What is set for everything, for products on NVIDIA's cards, and for those of oneDNN; ``"none"``: nothing."""
    matmuls = _BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul
    return _BACKENDS.fp32_precision, matmuls[0].fp32_precision, matmuls[1].fp32_precision


def _older() -> str:
    try:
        with hidden_warnings(_ADVICE):
            return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer interface alone was used: the older one is as it was when torch was loaded
        return "highest"


def _set_older(choice: str) -> None:
    with hidden_warnings(_ADVICE):
        torch.set_float32_matmul_precision(choice)


def _with_autocast() -> set[str]:
    return {kind for kind in _FORMATS if torch.is_autocast_enabled(kind)}


# After precision, on which it hangs; before a compiler, whose graphs are guarded by it.
@register(
    "matmul_precision",
    options=MatmulPrecisionSetting,
    default="auto",
    after="precision",
    before="compile",
    exactness="precision",
)
class MatmulPrecision(Technique):
    """Has float32 products computed in TF32 or bfloat16 while the run lasts.

    By ``"auto"`` while it trains: from the beginning of a training step to that of a step which does not train, a
    validation step say. What the user computes after that, metrics at the end of an epoch say, is theirs in float32.

    Under autocast most products are in half precision already, and what is left are those outside of it: of the
    optimizer, of the loss. A model that switches autocast off within its forward pass wants float32 there (rotary
    positions beyond 2,048 have no room in TF32): where the first step shows one, ``"auto"`` leaves everything alone.
    """

    traits = Traits(remembers=False)

    def __init__(self, settings: MatmulPrecisionSetting, context: BuildContext) -> None:
        self._setting = settings
        self._precision = context.settings["precision"]
        self._patch: MatmulPrecisionPatch | None = None
        self.traits = replace(self.traits, applied_before_trial=self._setting != "auto")
        choice = (*possible_on(context.host), "")[0] if self._setting == "auto" else self._setting
        where = " unless the model switches autocast off in places" if self._setting == "auto" else ""
        # Where it is not possible, precision says as much.
        words = f"{self._in_words(context.host, choice)}{where}"
        self.run.forecast = Forecast(True, "yes", words, is_missed=False)

    @override
    def unavailable(self, host: Host) -> str | None:
        if self._setting == "auto" and self._precision != "auto":
            return (
                f"precision={self._precision!r} was asked for by name, and so must this be: "
                "precision.matmul='high' (TF32) or 'medium'"
            )
        is_possible = bool(possible_on(host)) if self._setting == "auto" else self._setting in possible_on(host)
        return None if is_possible else why_not_on(host)

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterator[Patch]:
        if self._setting == "auto" and in_force() != _UNSET:
            yield Site("", why_not="the program has set the precision of float32 products itself")
            return
        # Where each rank decides alone, the same step would round otherwise on each.
        if self._setting == "auto" and not self.run.decides_alone:
            self.run.live = Live()
        choice = possible_on(host)[0] if self._setting == "auto" else self._setting
        self._patch = MatmulPrecisionPatch(choice, self._in_words(host, choice))
        yield self._patch

    def _in_words(self, host: Host, choice: str) -> str:
        return f"float32 products → {_FORMATS.get(host.device_type)} ({choice})"

    @override
    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        return self._watched(patches) if self._setting == "auto" else super().trial(patches)

    @contextmanager
    def _watched(self, patches: PatchSet) -> Iterator[Verdicts]:
        verdicts = {patch.site: Verdict("kept") for patch in patches}
        switch, leaves = torch.set_autocast_enabled, torch.autocast.__exit__.__code__

        def switched(*args: Any, **kwargs: Any) -> None:
            on_before = _with_autocast()
            switch(*args, **kwargs)
            is_left = sys._getframe(1).f_code is leaves  # a region ends in which it was on
            if on_before - _with_autocast() and not is_left and not is_trial():
                why = "the model switches autocast off to compute in float32, which TF32 and bfloat16 are not"
                verdicts.update({site: Verdict("refused", why) for site in verdicts})

        # By which regions of torch.autocast switch, too.
        with applied(AttributePatch("", "watched", torch, "set_autocast_enabled", switched)):
            yield verdicts

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        if self._setting == "auto" and self._patch is not None:
            self._patch.rest(stage != "train")
        return nullcontext()
