"""What every kind of attention site offers to the trial, and those that say themselves how to be switched.

Those are ``nn.MultiheadAttention``, alone and inside ``nn.Transformer`` and its layers; attention in the style of timm:
modules that carry a switch, ``fused_attn``, between their own and torch's attention; and attention of Hugging Face
transformers, which is replaced through transformers' own attention interface.
"""

from __future__ import annotations

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.activation import MultiheadAttention  # a program may replace it in torch.nn
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from lightning_accel.core.module_copies import silent_copy
from lightning_accel.core.patch import AttributePatch, Patch, applied
from lightning_accel.core.torch_private.modules import hooks_of, hooks_on_all_modules
from lightning_accel.techniques.flash_attention.backend_trial import Rehearsal
from lightning_accel.techniques.flash_attention.backends import TORCH_KERNELS, Backend
from lightning_accel.techniques.flash_attention.discards import caller_discards_weights
from lightning_accel.techniques.flash_attention.huggingface_interface import (
    EAGER_MASKS,
    OWN_MASKS,
    ModelSwitch,
    Request,
    all_without_mask,
    called_by_eager_attention,
    implementation,
    interface_modules,
    weights_are_collected,
)
from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention, multihead_forward
from lightning_accel.techniques.site import Site

Forward = Callable[..., Any]


class AttentionSite(ABC):
    """A module whose attention another backend may compute."""

    what: str  # was found there, for the report: "nn.MultiheadAttention"
    ignored: tuple[str, ...] = ("torch.", "transformers.", "lightning_accel.")  # whose hooks read no attention weights

    def __init__(self, site: str, module: nn.Module) -> None:
        self.site = site  # its qualified name in the model
        self.module = module
        self._parts = list(module.modules())[1:]  # that the original calls, and another attention may not
        self._missed: str | None = None  # why the last run had nothing to fuse

    @abstractmethod
    def run(self, by: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward pass of these arguments, with its attention through a backend.

        Given a rehearsal, as the original computes it, and each of its attentions is rehearsed. ``original`` is the
        module's own ``forward``, as a function of ``(module, *args, **kwargs)``. No code of the user's runs more often
        than it would without.
        """

    def nothing_found(self) -> str | None:
        """After a run: why there was nothing to fuse in it; None if there was."""
        return self._missed

    def watched(self) -> str | None:
        """Why its parts have to be called as the original calls them; None if nobody would miss a call."""
        hooks = hooks_on_all_modules() if self._parts else []
        for part in self._parts:
            for kind in hooks_of(part):
                hooks += kind.values()
        owners = [str(getattr(hook, "__module__", "")) for hook in hooks]
        is_watched = not all(owner.startswith(self.ignored) for owner in owners)
        return "a hook on its parts, or on all modules, is to see them called" if is_watched else None

    def given_up(self) -> str | None:
        """Why it should be run no more; None if it should."""
        return None

    def close(self) -> None:  # noqa: B027  # most have captured nothing
        """Forgets what was captured."""

    def is_named(self, names: Iterable[str]) -> bool:
        """Whether one of ``names`` is its class, its path or the path of a module around it."""
        return any(
            name in (type(self.module).__name__, self.site) or self.site.startswith(f"{name}.") for name in names
        )

    def rehearse_whole(
        self, rehearsal: Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], **how: Any
    ) -> None:
        """Tries backends on all that the module computes: for a module whose code nobody watches."""

        def by(backend: Backend) -> Forward:
            return lambda *args, **kwargs: self.run(backend, original, args, kwargs)

        rehearsal.rehearse(functools.partial(original, self.module), by, args, kwargs, module=self.module, **how)


# -- nn.MultiheadAttention ------------------------------------------------------------------------------------------


class MultiheadSite(AttentionSite):
    """An ``nn.MultiheadAttention``, or a subclass that leaves its forward pass as it is."""

    what = "nn.MultiheadAttention"
    module: MultiheadAttention

    @override
    def run(self, by: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(by, Rehearsal):
            # All of it is torch's own code, down to the projections, which are done otherwise too.
            judged = (lambda outputs: outputs[0]) if caller_discards_weights() else (lambda outputs: outputs)
            self.rehearse_whole(by, original, args, kwargs, judged=judged)
            return original(self.module, *args, **kwargs)
        outputs = multihead_forward(self.module, *args, **kwargs, backend=by)
        self._missed = None if outputs[1] is None else "its attention weights are asked for, and may be read"
        return outputs


def find_multihead(model: nn.Module) -> Iterator[MultiheadSite | Site]:
    """Every ``nn.MultiheadAttention`` in ``model``: a site, or why it is none."""
    for site, module in model.named_modules():
        if not isinstance(module, MultiheadAttention):
            continue
        if isinstance(module, FlashMultiheadAttention):
            yield Site(site, why_not="already fused")
        elif type(module).forward is not MultiheadAttention.forward:
            yield Site(site, why_not=f"{type(module).__name__} computes attention in a forward pass of its own")
        elif is_parametrized(module):
            yield Site(site, why_not="its weights are computed from others by a parametrization, at every call")
        elif "forward" in vars(module):
            yield Site(site, why_not="its forward pass was replaced by another's code")
        else:
            yield MultiheadSite(site, module)


# -- fused_attn -----------------------------------------------------------------------------------------------------


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
        self._missed = self.watched()
        if self._missed is not None:
            return original(self.module, *args, **kwargs)
        if isinstance(by, Rehearsal):
            # The two forms are two branches of the module's own code: they run in a copy of it, which nobody watches.
            FusedAttnSite(self.site, silent_copy(self.module)).rehearse_whole(by, original, args, kwargs)
            return original(self.module, *args, **kwargs)
        with applied(AttributePatch(self.site, "", self.module, "fused_attn", True)), _preferring(by):
            return original(self.module, *args, **kwargs)


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


# -- transformers --------------------------------------------------------------------------------------------------


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
        self._parts = called_by_eager_attention(module)
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    @override
    def run(self, by: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request, config = Request(by), cast(Any, self.module.config)
        name = implementation(config)
        self._missed = self._why_not(name, args, kwargs)
        if self._missed is not None:
            return original(self.module, *args, **kwargs)
        try:
            masks = applied(ModelSwitch(self.site, config, EAGER_MASKS)) if name == "eager" else nullcontext()
            with masks, applied(AttributePatch(self.site, "", self.module, Request.NAME, request)):
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
        return self.watched()


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
