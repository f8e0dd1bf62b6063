"""timm-style attention: modules that carry a switch, ``fused_attn``, between their own and torch's attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from lightning_accel.core.isolation import silent_twin
from lightning_accel.techniques.base import Refusal
from lightning_accel.techniques.flash_attention.backends import Backend
from lightning_accel.techniques.flash_attention.rehearsal import Rehearsal
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward

_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def find_fused_attn(model: nn.Module) -> Iterator[FusedAttnSite | Refusal]:
    """The modules of ``model`` whose forward reads their ``fused_attn``; those that have it on as refusals.

    A switch that a script has frozen, or that is not a plain boolean, is none.
    """
    for site, module in model.named_modules():
        switch = vars(module).get("fused_attn")
        if not isinstance(switch, bool) or not _reads_switch(type(module)):
            continue
        yield Refusal(site, "fused already: its fused_attn is True") if switch else FusedAttnSite(site, module)


class FusedAttnSite(AttentionSite):
    """A module with its ``fused_attn`` off."""

    what = "fused_attn switch"

    @override
    def fused(self, backend: Backend, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _switched_on(self.module, backend, original, args, kwargs)

    @override
    def rehearsed(self, rehearsal: Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The two forms are two branches of the module's own code: they run in a copy of it, which nobody watches.
        twin = silent_twin(self.module)

        def plain(*args: Any, **kwargs: Any) -> Any:
            return original(twin, *args, **kwargs)

        def by(backend: Backend) -> Forward:
            return lambda *args, **kwargs: _switched_on(twin, backend, original, args, kwargs)

        rehearsal.rehearse(plain, by, args, kwargs, module=twin)
        return original(self.module, *args, **kwargs)


def _switched_on(
    module: nn.Module, backend: Backend, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    state: Any = module
    before = state.fused_attn
    try:
        state.fused_attn = True
        with _preferring(backend):
            return original(module, *args, **kwargs)
    finally:
        state.fused_attn = before


def _preferring(backend: Backend) -> AbstractContextManager[Any]:
    """Torch's attention with the backend's kernel first, if it is one of torch's, and the others behind it."""
    kernel = _KERNELS.get(backend.name)
    if kernel is None:
        return nullcontext()
    others = [each for each in (*_KERNELS.values(), SDPBackend.MATH) if each is not kernel]
    return sdpa_kernel([kernel, *others], set_priority=True)


def _reads_switch(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "fused_attn" in code.co_names
