"""All that is private of transformers and used here: its registries, a config's attention, who collects weights.

See https://huggingface.co/docs/transformers/attention_interface. Two names are registered, since transformers builds
masks by the name too. Under :data:`EAGER_MASKS` the masks are those of "eager", floats with everything in them. Under
:data:`OWN_MASKS` there is none where attention is plainly causal. Under either, a module that is given no backend runs
its own eager attention.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_accel.core.torch_private.compilation import register_constant

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


class Registration:
    """Functions of ours, by name, in transformers' registries of attention, there while somebody holds them."""

    def __init__(self, attention: Mapping[str, EagerAttention]) -> None:
        self._attention = attention
        self._holders = 0

    def hold(self) -> None:
        self._holders += 1
        if self._holders == 1:
            attention, masks = _registries()
            attention.update(self._attention)
            masks.update({OWN_MASKS: _mask, EAGER_MASKS: masks["eager"]})

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            for registry in _registries():
                for name in self._attention:
                    registry.pop(name, None)


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


def has_implementation(config: Any) -> bool:
    """Whether a config says which attention is used."""
    return hasattr(config, "_attn_implementation")


def implementation(config: Any) -> str:
    """Which attention a config says: ``"eager"``, ``"sdpa"``, one of our names."""
    return config._attn_implementation or "eager"  # None where no model was made from it: eager attention then


def implementation_attribute(config: Any) -> str:
    """Where a config keeps it; the public property sets the configs below it as well."""
    internal = "_attn_implementation_internal"
    return internal if internal in vars(config) else "_attn_implementation"


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


def may_switch() -> bool:
    """Whether a config may say our name between calls: 4.57 warns of it where attention weights are asked for."""
    return "transformers.utils.output_capturing" in sys.modules


_eager_functions: dict[type[nn.Module], EagerAttention | None] = {}  # Dynamo reads a dict, and no functools.cache


def eager_function(kind: type[nn.Module]) -> EagerAttention | None:
    """The eager attention of modules of this class; None if they do not use the interface in a way known here.

    Their forward names the interface and one eager function. Not taken: a forward that treats "sdpa" in its own way,
    by name, and an eager function with learned sinks.
    """
    if kind not in _eager_functions:
        _eager_functions[kind] = _find_eager_function(kind)
    return _eager_functions[kind]


def is_causal_by_itself(eager: EagerAttention) -> bool:
    """Whether an eager function hides later keys by a buffer of its module's, whatever the mask: GPT-2's of 4.57."""
    return "bias" in inspect.unwrap(eager).__code__.co_names


def _find_eager_function(kind: type[nn.Module]) -> EagerAttention | None:
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names or _names_sdpa(code.co_consts):
        return None
    found = [name for name in code.co_names if name.endswith("eager_attention_forward")]
    eager: EagerAttention | None = forward.__globals__.get(found[0]) if len(found) == 1 else None
    has_sinks = eager is not None and "sinks" in getattr(inspect.unwrap(eager), "__code__", code).co_names
    return None if has_sinks else eager


def _names_sdpa(constants: Any) -> bool:
    return any(each == "sdpa" or (isinstance(each, tuple | frozenset) and _names_sdpa(each)) for each in constants)
