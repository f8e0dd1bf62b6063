"""Switches all dropout off while numbers are compared."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_accel.core.engine_var import EngineVar
from lightning_accel.core.patch import AttributePatch, applied

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_FUNCTIONS = frozenset(
    (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
)
_is_off = EngineVar("_is_off", default=False)


def is_dropout_off() -> bool:
    """Returns whether this call is inside :func:`dropout_off`, for kernels that are not torch functions."""
    return _is_off.get()


@contextmanager
def dropout_off(module: nn.Module) -> Iterator[list[float]]:
    """Switches dropout off in the modules inside ``module`` and in all calls of torch's dropout functions.

    Yields:
        The rates that were switched off.
    """
    dropouts = [m for m in module.modules() if isinstance(m, DROPOUTS) and m.training]
    attentions = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention) and m.dropout > 0]
    rates = [m.p for m in dropouts] + [m.dropout for m in attentions if m.training]
    with ExitStack() as stack:
        for dropout in dropouts:
            stack.enter_context(applied(AttributePatch("", "off", dropout, "training", False)))
        for attention in attentions:
            stack.enter_context(applied(AttributePatch("", "off", attention, "dropout", 0.0)))
        stack.enter_context(_is_off.being(True))
        stack.enter_context(_NoDropout(rates))
        yield rates


class _NoDropout(TorchFunctionMode):
    """Makes torch's dropout and attention functions drop nothing."""

    def __init__(self, rates: list[float]) -> None:
        super().__init__()
        self._rates = rates

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FUNCTIONS:
            named = {"training" if name == "train" else name: value for name, value in kwargs.items()}  # torch.dropout
            given = inspect.signature(F.dropout).bind(*args, **named).arguments
            rate, training = given.get("p", 0.5), given.get("training", True)
            if training and rate > 0:
                self._rates.append(rate)
                return given["input"]
        if func is F.scaled_dot_product_attention:
            at = 4  # its position in scaled_dot_product_attention(query, key, value, attn_mask, dropout_p)
            rate = args[at] if len(args) > at else kwargs.pop("dropout_p", 0.0)
            args = (*args[:at], 0.0, *args[at + 1 :]) if len(args) > at else args
            if rate > 0:
                self._rates.append(rate)
        return func(*args, **kwargs)
