"""The ``nn.MultiheadAttention`` modules of a model, alone and inside ``nn.Transformer`` and its layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.activation import MultiheadAttention  # a program may replace it in torch.nn
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from lightning_accel.techniques.flash_attention.backend_trial import Rehearsal
from lightning_accel.techniques.flash_attention.backends import Backend
from lightning_accel.techniques.flash_attention.discards import caller_discards_weights
from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention, multihead_forward
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward
from lightning_accel.techniques.site import Site


class MultiheadSite(AttentionSite):
    """An ``nn.MultiheadAttention``, or a subclass that leaves its forward pass as it is."""

    what = "nn.MultiheadAttention"
    module: MultiheadAttention

    def __init__(self, site: str, module: MultiheadAttention) -> None:
        super().__init__(site, module)
        self._has_weights = False

    @override
    def run(self, by: Backend | Rehearsal, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(by, Rehearsal):
            # All of it is torch's own code, down to the projections, which are done otherwise too.
            judged = (lambda outputs: outputs[0]) if caller_discards_weights() else (lambda outputs: outputs)
            self.rehearse_whole(by, original, args, kwargs, judged=judged)
            return original(self.module, *args, **kwargs)
        outputs = multihead_forward(self.module, *args, **kwargs, backend=by)
        self._has_weights = outputs[1] is not None
        return outputs

    @override
    def nothing_found(self) -> str | None:
        return "its attention weights are asked for, and may be read" if self._has_weights else None


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
