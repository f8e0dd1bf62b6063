"""Attention of Hugging Face transformers, found and replaced through transformers' own attention interface."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, cast

from torch import nn
from typing_extensions import override

from lightning_accel.core.patch import AttributePatch, Patch, applied
from lightning_accel.core.torch_private.modules import hooks_of
from lightning_accel.techniques.flash_attention.backend_trial import Rehearsal
from lightning_accel.techniques.flash_attention.backends import Backend
from lightning_accel.techniques.flash_attention.huggingface_interface import (
    EAGER_MASKS,
    OWN_MASKS,
    ModelSwitch,
    Request,
    all_without_mask,
    implementation,
    interface_modules,
    weights_are_collected,
)
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward
from lightning_accel.techniques.site import Site


def find_huggingface(model: nn.Module) -> Iterator[HuggingFaceSite | Site]:
    """The modules of ``model`` whose attention goes through transformers' interface; those fused already as refusals.

    Modules of transformers that compute attention by hand are none of these.
    """
    for site, module, config in interface_modules(model):
        name = implementation(config)
        # transformers' own hooks do nothing until weights are asked for, which a site notices.
        owners = [getattr(hook, "__module__", "") for hook in hooks_of(module)[0].values()]
        if name not in ("eager", OWN_MASKS):
            yield Site(site, why_not=f"fused already: its config says attn_implementation={name!r}")
        elif not all(owner.startswith("transformers.") for owner in owners):
            yield Site(
                site, why_not="a forward hook on it may read the attention weights, which fused attention never has"
            )
        else:
            yield HuggingFaceSite(site, module)


class HuggingFaceSite(AttentionSite):
    """An attention module of transformers."""

    what = "transformers attention"

    def __init__(self, site: str, module: nn.Module) -> None:
        super().__init__(site, module)
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    @override
    def run(self, by: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request, config = Request(by), cast(Any, self.module.config)
        name = implementation(config)
        self._missed = self._why_not(name, args, kwargs)
        if self._missed is not None:
            return original(self.module, *args, **kwargs)
        try:
            with ExitStack() as stack:
                if name == "eager":
                    stack.enter_context(applied(ModelSwitch(self.site, config, EAGER_MASKS)))
                stack.enter_context(applied(AttributePatch(self.site, "", self.module, Request.NAME, request)))
                return original(self.module, *args, **kwargs)
        finally:
            self._missed = request.missed

    def _why_not(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if name not in ("eager", OWN_MASKS, EAGER_MASKS):
            return f"its config now says attn_implementation={name!r}"
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        asked = given.get("output_attentions") or getattr(self.module.config, "output_attentions", False)
        if asked or weights_are_collected(self.module):
            return "its attention weights are asked for"
        return None


def model_switches(model: nn.Module, kept_sites: set[str]) -> list[Patch]:
    """A switch for every config all of whose attention modules were kept.

    Left out are configs that belong to no model (nobody builds masks by them), that ask for attention weights, or a
    module of which would take a missing mask for a causal one.
    """
    # 4.57 warns of a config that says our name between calls, where attention weights are asked for.
    found = list(interface_modules(model)) if "transformers.utils.output_capturing" in sys.modules else []
    as_it_is = {id(config) for site, module, config in found if site not in kept_sites or module in all_without_mask}
    switched = {id(config) for _, _, config in found} - as_it_is
    switches: dict[int, Patch] = {}
    for site, module in model.named_modules() if switched else ():
        config: Any = getattr(module, "config", None)
        is_model = isinstance(module, sys.modules["transformers.modeling_utils"].PreTrainedModel)
        has_weights = getattr(config, "output_attentions", False)
        if is_model and id(config) in switched and implementation(config) == "eager" and not has_weights:
            switches.setdefault(id(config), ModelSwitch(site, config))
    return list(switches.values())
