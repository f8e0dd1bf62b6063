"""timm-style attention: modules that carry a switch, ``fused_attn``, between their own and torch's attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from lightning_accel.core.module_copies import silent_copy
from lightning_accel.techniques.flash_attention.backend_trial import Rehearsal
from lightning_accel.techniques.flash_attention.backends import TORCH_KERNELS, Backend
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward
from lightning_accel.techniques.site import Site


def find_fused_attn(model: nn.Module) -> Iterator[FusedAttnSite | Site]:
    """The modules of ``model`` whose forward reads their ``fused_attn``; those that have it on as refusals.

    A switch that a script has frozen, or that is not a plain boolean, is none.
    """
    for site, module in model.named_modules():
        switch = vars(module).get("fused_attn")
        if isinstance(switch, bool) and _reads_switch(type(module)):
            yield Site(site, why_not="fused already: its fused_attn is True") if switch else FusedAttnSite(site, module)


class FusedAttnSite(AttentionSite):
    """A module with its ``fused_attn`` off."""

    what = "fused_attn switch"

    @override
    def run(self, by: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module: Any = self.module
        if isinstance(by, Rehearsal):
            # The two forms are two branches of the module's own code: they run in a copy of it, which nobody watches.
            FusedAttnSite(self.site, silent_copy(module)).rehearse_whole(by, original, args, kwargs)
            return original(module, *args, **kwargs)
        before = module.fused_attn
        try:
            module.fused_attn = True
            with _preferring(by):
                return original(module, *args, **kwargs)
        finally:
            module.fused_attn = before


def _preferring(backend: Backend) -> AbstractContextManager[Any]:
    """Torch's attention with the backend's kernel first, if it is one of torch's, and the others behind it."""
    if backend.name not in TORCH_KERNELS:
        return nullcontext()
    first = TORCH_KERNELS[backend.name][0]
    others = [kernel for kernel, _ in TORCH_KERNELS.values() if kernel is not first]
    return sdpa_kernel([first, *others, SDPBackend.MATH], set_priority=True)


def _reads_switch(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "fused_attn" in code.co_names
