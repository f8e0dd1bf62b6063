"""Every attention of a model, whichever way it was written."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_accel.techniques.base import Refusal
from lightning_accel.techniques.flash_attention.fused_attn import find_fused_attn
from lightning_accel.techniques.flash_attention.hand_finder import find_hand_written
from lightning_accel.techniques.flash_attention.huggingface import find_huggingface
from lightning_accel.techniques.flash_attention.multihead_site import find_multihead
from lightning_accel.techniques.flash_attention.sites import AttentionSite


def find_sites(model: nn.Module) -> Iterator[AttentionSite | Refusal]:
    """The attention sites of ``model``, each once, and what looked like one and is left alone.

    A module that says how to switch its attention (a transformers interface, a ``fused_attn``) is taken at its word;
    of the others the code is read.
    """
    claimed: set[nn.Module] = set()
    for find in (find_multihead, find_huggingface, find_fused_attn):
        for claim in find(model):
            module = model.get_submodule(claim.site)
            if module not in claimed:
                claimed.add(module)
                yield claim
    yield from find_hand_written(model, frozenset(claimed))
