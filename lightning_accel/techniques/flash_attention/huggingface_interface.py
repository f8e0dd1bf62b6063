"""The attention function that transformers calls by one of our names, and all that is private of transformers.

See https://huggingface.co/docs/transformers/attention_interface. Two names are registered, since transformers builds
masks by the name too. Under :data:`EAGER_MASKS` the masks are those of "eager", floats with everything in them. Under
:data:`OWN_MASKS` there is none where attention is plainly causal. Under either, a module that is given no backend runs
its own eager attention.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.core.module_copies import silent_copy
from lightning_accel.core.patch import AttributePatch
from lightning_accel.core.torch_private.compilation import register_constant
from lightning_accel.techniques.flash_attention.backend_trial import Rehearsal
from lightning_accel.techniques.flash_attention.backends import Backend, attend
from lightning_accel.techniques.flash_attention.call import AttentionCall, Edit
from lightning_accel.techniques.flash_attention.masks import CAUSAL, attend_edited

EagerAttention = Callable[..., tuple[Tensor, Tensor | None]]


class _Name(str):
    """A name that stays behind: deep copies (an averaged model's, say) and pickles of a config say "eager"."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return "eager"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("eager",)


register_constant(_Name)  # for Dynamo of torch 2.11, which takes no key that is a string by inheritance

EAGER_MASKS = _Name("lightning_accel_eager_masks")
OWN_MASKS = _Name("lightning_accel")


_holders: list[ModelSwitch] = []  # of our functions in transformers' registries, there while there are any


class ModelSwitch(AttributePatch):
    """Has a model's masks built for fused attention: none where it is plainly causal.

    By its config alone, and not, as transformers' own setter would, by those below it. The first puts our functions, by
    name, into transformers' registries, and the last takes them out.
    """

    def __init__(self, site: str, config: Any, name: str = OWN_MASKS) -> None:
        internal = "_attn_implementation_internal"  # the public property sets the configs below it as well
        attribute = internal if internal in vars(config) else "_attn_implementation"
        super().__init__(site, "masks of eager attention → of fused attention", config, attribute, name)

    @override
    def _apply(self) -> None:
        _holders.append(self)
        if len(_holders) == 1:
            attention, masks = _registries()
            attention.update({OWN_MASKS: accel_attention, EAGER_MASKS: _with_eager_masks})
            masks.update({OWN_MASKS: _mask, EAGER_MASKS: masks["eager"]})
        super()._apply()

    @override
    def _undo(self) -> None:
        super()._undo()
        _holders.remove(self)
        for registry in () if _holders else _registries():
            registry.pop(OWN_MASKS, None)
            registry.pop(EAGER_MASKS, None)


def _registries() -> tuple[dict[str, Any], dict[str, Any]]:
    # What register() writes to; there is no unregister(). transformers is there, or nobody would ask.
    attention: Any = sys.modules["transformers.modeling_utils"]
    masks: Any = sys.modules["transformers.masking_utils"]
    return attention.AttentionInterface._global_mapping, masks.AttentionMaskInterface._global_mapping


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Transformers' mask for ``scaled_dot_product_attention``; plain padding as (B, 1, 1, S), not (B, 1, T, S)."""
    mask: Tensor | None = _registries()[1]["sdpa"](*args, **kwargs)
    plain = getattr(sys.modules["transformers.masking_utils"], "bidirectional_mask_function", None)
    if mask is not None and plain is not None and kwargs.get("mask_function") is plain:
        return mask[:, :, :1].clone()  # some kernels skip padding; and the whole mask is free to go
    return mask


def interface_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """The modules whose attention goes through transformers' interface: site, module, the config that says which."""
    if "transformers.modeling_utils" not in sys.modules:  # then there is no class of transformers to have one of
        return
    for site, module in model.named_modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation") and eager_function(type(module)) is not None:
            yield site, module, config


def implementation(config: Any) -> str:
    """Which attention a config says: ``"eager"``, ``"sdpa"``, one of our names."""
    return config._attn_implementation or "eager"  # None where no model was made from it: eager attention then


def weights_are_collected(module: nn.Module) -> bool:
    """Whether transformers has been asked for attention weights that it collects from the outputs of modules.

    5 does so by hooks, 4.57 by a forward of its own, on the module for one call of the model.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None:
        forward = vars(module).get("forward")
        return getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.generic"
    collector = getattr(capturing, "_active_collector", None)
    collected = collector.get() if collector is not None else None
    return any("attentions" in key for key in collected or ())


_eager_functions: dict[type[nn.Module], EagerAttention | None] = {}  # Dynamo reads a dict, and no functools.cache


def eager_function(kind: type[nn.Module]) -> EagerAttention | None:
    """The eager attention of modules of this class; None if they do not use the interface in a way known here.

    Their forward names the interface and one eager function. Not taken: a forward that treats "sdpa" in its own way,
    by name, and an eager function with learned sinks.
    """
    if kind not in _eager_functions:
        forward = inspect.unwrap(kind.forward)
        names: tuple[str, ...] = getattr(getattr(forward, "__code__", None), "co_names", ())
        found = [forward.__globals__.get(name) for name in names if name.endswith("eager_attention_forward")]
        is_known = len(found) == 1 and "ALL_ATTENTION_FUNCTIONS" in names
        eager = found[0] if is_known and not _names_sdpa(forward.__code__.co_consts) else None
        _eager_functions[kind] = None if eager is None or _names(eager, "sinks") else eager
    return _eager_functions[kind]


def called_by_eager_attention(module: nn.Module) -> list[nn.Module]:
    """Those of a module's parts that its eager function calls: a dropout, say. Its forward calls the others anyway."""
    eager = eager_function(type(module))
    return [part for name, child in module.named_children() if _names(eager, name) for part in child.modules()]


def _names(function: Any, name: str) -> bool:
    return name in getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())


def _names_sdpa(constants: Any) -> bool:
    return any(each == "sdpa" or (isinstance(each, tuple | frozenset) and _names_sdpa(each)) for each in constants)


# -- the function ----------------------------------------------------------------------------------------------------

all_without_mask: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that call themselves causal and yet, eagerly, were seen to attend to all keys when given no mask."""

_UNSUPPORTED = ("softcap", "sinks", "s_aux", "head_mask", "cache", "indices", "block_indices")


@dataclass(eq=False)
class Request:
    """A call's backend, or rehearsal, left on the module for :func:`accel_attention`, and what became of it.

    On the module, not in a context variable, which torch.compile cannot read.
    """

    NAME: ClassVar[str] = "_accel_request"

    backend: Backend | Rehearsal
    # Why the backend did not compute the attention; None if it did.
    missed: str | None = "its forward did not call transformers' attention interface"


def accel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    *,
    has_eager_masks: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it, through the backend of the module's request.

    Query (B, H, T, D), key (B, G, S, D) and value (B, G, S, Dv), H a multiple of G. ``is_causal`` says what a missing
    mask means; None: as the module says. With ``has_eager_masks``, as under ``EAGER_MASKS``, there is no causality but
    the mask's. Of the options ``position_bias`` is added to the scores.

    Returns:
        (B, T, H, Dv) and no weights; without a request, or where the options ask for more than an
        :class:`AttentionCall` has a place for, what the module's own eager attention returns.
    """
    mask = attention_mask
    if mask is not None and mask.dim() == 4 and mask.shape[-1] > key.shape[2]:
        mask = mask[..., : key.shape[2]]  # made for all that a cache will ever hold
    # As transformers reads it for torch's attention; a single query comes after all its keys.
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = bool(is_causal) and mask is None and query.shape[2] > 1
    eager = eager_function(type(module))
    assert eager is not None
    has_own_causality = _names(eager, "bias")  # a buffer that hides later keys, whatever the mask: GPT-2's of 4.57
    if has_eager_masks:
        if is_causal and not has_own_causality:
            all_without_mask.add(module)
        is_causal = is_causal and has_own_causality
        mask = mask.to(query.dtype) if mask is not None and mask.dtype == torch.bool else mask  # which is added up
    tensors = (query, key, value, mask, options.pop("position_bias", None))
    hides_later_keys = is_causal or (has_own_causality and query.shape[2] == key.shape[2] > 1)

    def eagerly(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any) -> Any:
        given = options if bias is None else {**options, "position_bias": bias}
        mask = _as_eager_mask(mask, query, key, is_causal)
        return eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **given)

    def fused(backend: Backend, query: Tensor, key: Tensor, value: Tensor, mask: Any, bias: Any) -> Any:
        if is_causal and key.shape[2] > query.shape[2]:
            # A cache of fixed size that is not full yet: see transformers' integrations/sdpa_attention.py.
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        query, key, value = _matched(query, key, value)
        lowest = torch.finfo(query.dtype).min
        edits = [Edit("multiply", query.shape[-1] ** -0.5 if scaling is None else scaling)]
        if hides_later_keys:
            edits.append(Edit("band", CAUSAL, lowest))
        if bias is not None:
            edits.append(Edit("add", bias[..., : key.shape[2]]))
        if mask is not None:
            edits.append(Edit("keep" if mask.dtype == torch.bool else "add", mask, lowest, is_added=True))
        dropout_p = dropout if module.training else 0.0
        call = AttentionCall(query=query, key=key, value=value, dropout_p=dropout_p, scale=edits[0].by)
        out = attend_edited(call, edits, lambda call: attend(call, backend), may_wait=True)
        return out.transpose(1, 2).contiguous(), None

    request: Request | None = vars(module).get(Request.NAME)
    if request is not None:
        request.missed = _unsupported(query, key, mask, options)
        by = request.backend
        if request.missed is None and isinstance(by, Backend):
            return fused(by, *tensors)  # type: ignore[no-any-return]
        if request.missed is None and isinstance(by, Rehearsal):
            # The eager function may call modules of the module's, a dropout say: of a copy, which nobody watches.
            plain = functools.partial(eagerly, silent_copy(module))
            # Results of some lie transposed: transformers' code, which takes any attention's, puts heads together anew.
            rest: Any = {"judged": lambda out: out[0], "keeps_strides": False}
            by.rehearse(plain, lambda backend: functools.partial(fused, backend), tensors, **rest)
    return eagerly(module, *tensors)  # type: ignore[no-any-return]


_with_eager_masks = functools.partial(accel_attention, has_eager_masks=True)


def _unsupported(query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> str | None:
    given = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if given:
        return f"its attention has the option {given[0]!r}, which fused attention lacks"
    if options.get("output_attentions"):
        return "its attention weights are asked for"
    if query.dim() != 4 or query.shape[1] % key.shape[1] or (mask is not None and mask.dim() != 4):
        return f"its attention is of another form: queries of {tuple(query.shape)}, keys of {tuple(key.shape)}"
    return None


def _matched(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three with as many heads and samples each, and of one dtype."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if query.shape[0] != key.shape[0]:  # learned queries, the same for all samples
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (t.expand(batch, -1, -1, -1) for t in (query, key, value))
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        # Rotary embeddings leave queries and keys in float32, values not.
        query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
    return query, key, value


def _as_eager_mask(mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> Tensor | None:
    if mask is None and is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), torch.finfo(query.dtype).min)
