"""Attention of Hugging Face transformers, found and replaced through transformers' own attention interface."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_accel.core.patch import AttributePatch, Patch
from lightning_accel.techniques.base import Refusal
from lightning_accel.techniques.flash_attention.backends import Backend
from lightning_accel.techniques.flash_attention.huggingface_interface import (
    EAGER_MASKS,
    OWN_MASKS,
    Registration,
    Request,
    all_without_mask,
    eager_function,
)
from lightning_accel.techniques.flash_attention.rehearsal import Rehearsal
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward

_registration = Registration()


def find_huggingface(model: nn.Module) -> Iterator[HuggingFaceSite | Refusal]:
    """The modules of ``model`` whose attention goes through transformers' interface; those fused already as refusals.

    Modules of transformers that compute attention by hand are none of these.
    """
    for site, module in _interface_modules(model):
        name = _implementation(module)
        if name not in ("eager", OWN_MASKS):
            yield Refusal(site, f"fused already: its config says attn_implementation={name!r}")
        elif _is_listened_to(module):
            yield Refusal(site, "a forward hook on it may read the attention weights, which fused attention never has")
        else:
            yield HuggingFaceSite(site, module)


class HuggingFaceSite(AttentionSite):
    """An attention module of transformers."""

    what = "transformers attention"

    def __init__(self, site: str, module: nn.Module) -> None:
        super().__init__(site, module)
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        self._weights_at = names.index("output_attentions") if "output_attentions" in names else sys.maxsize
        self._missed: str | None = None

    @override
    def fused(self, backend: Backend, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._with_request(Request(backend), original, args, kwargs)

    @override
    def rehearsed(self, rehearsal: Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._with_request(Request(rehearsal), original, args, kwargs)

    def _with_request(self, request: Request, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.module
        name = _implementation(module)
        self._missed = self._why_not(name, args, kwargs)
        if self._missed is not None:
            return original(module, *args, **kwargs)
        if name in (OWN_MASKS, EAGER_MASKS):
            return self._requested(request, original, args, kwargs)
        config: Any = module.config
        attribute = _attribute(config)
        _registration.hold()
        try:
            setattr(config, attribute, EAGER_MASKS)
            return self._requested(request, original, args, kwargs)
        finally:
            setattr(config, attribute, name)
            _registration.release()

    def _requested(self, request: Request, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        setattr(self.module, Request.NAME, request)
        try:
            return original(self.module, *args, **kwargs)
        finally:
            delattr(self.module, Request.NAME)
            self._missed = request.missed

    @override
    def nothing_found(self) -> str | None:
        return self._missed

    def _why_not(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if name not in ("eager", OWN_MASKS, EAGER_MASKS):
            return f"its config now says attn_implementation={name!r}"
        asked = args[self._weights_at] if len(args) > self._weights_at else kwargs.get("output_attentions")
        if asked or getattr(self.module.config, "output_attentions", False) or _weights_are_collected():
            return "its attention weights are asked for"
        return None


class ModelSwitch(AttributePatch):
    """Has a model's masks built for fused attention: none where it is plainly causal.

    Args:
        site: The model whose config it is.
        config: The config; that one only, and not, as transformers' own setter would, those below it.
    """

    def __init__(self, site: str, config: Any) -> None:
        super().__init__(site, "masks of eager attention → of fused attention", config, _attribute(config), OWN_MASKS)

    @override
    def _apply(self) -> None:
        _registration.hold()
        super()._apply()

    @override
    def _undo(self) -> None:
        super()._undo()
        _registration.release()


def model_switches(model: nn.Module, kept_sites: set[str]) -> list[Patch]:
    """A switch for every config all of whose attention modules were kept.

    Left out are configs that belong to no model (nobody builds masks by them), that ask for attention weights, or a
    module of which would take a missing mask for a causal one.
    """
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for site, module in _interface_modules(model):
        users.setdefault(id(module.config), []).append((site, module))
    owners = _config_owners(model) if users else {}
    switches: list[Patch] = []
    for key, modules in users.items():
        config: Any = modules[0][1].config
        all_kept = all(site in kept_sites and module not in all_without_mask for site, module in modules)
        is_eager = _implementation(modules[0][1]) == "eager" and not getattr(config, "output_attentions", False)
        if all_kept and is_eager and key in owners:
            switches.append(ModelSwitch(owners[key], config))
    return switches


def _interface_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if "transformers.modeling_utils" not in sys.modules:  # then there is no class of transformers to have one of
        return
    for site, module in model.named_modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation") and eager_function(type(module)) is not None:
            yield site, module


def _config_owners(model: nn.Module) -> dict[int, str]:
    pretrained: Any = sys.modules["transformers.modeling_utils"]
    owners: dict[int, str] = {}
    for site, module in model.named_modules():
        if isinstance(module, pretrained.PreTrainedModel):
            owners.setdefault(id(module.config), site)
    return owners


def _implementation(module: nn.Module) -> str:
    config: Any = module.config
    # None in a config that no model was made from: transformers runs eager attention then.
    return config._attn_implementation or "eager"


def _attribute(config: Any) -> str:
    # The public property sets the configs below it as well.
    internal = "_attn_implementation_internal"
    return internal if internal in vars(config) else "_attn_implementation"


def _is_listened_to(module: nn.Module) -> bool:
    # transformers' own hooks do nothing until weights are asked for, which a site notices.
    return any(
        not getattr(hook, "__module__", "").startswith("transformers.") for hook in module._forward_hooks.values()
    )


def _weights_are_collected() -> bool:
    """Whether transformers 5 has been asked for attention weights that its hooks collect from the outputs."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    collected = collector.get() if collector is not None else None
    return any("attentions" in key for key in collected or ())
