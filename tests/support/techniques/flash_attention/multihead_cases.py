"""What the tests of multi-head attention share: sizes, masks, modules with the same weights, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention

EMBED_DIM, NUM_HEADS, BATCH = 12, 3, 2
LAYOUTS = ("batch first", "sequence first", "one sample")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim, vdim": {"kdim": 5, "vdim": 7},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "kdim, bias_kv, zero_attn": {"kdim": 5, "add_bias_kv": True, "add_zero_attn": True},
}
TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}


@dataclass(frozen=True)
class Sizes:
    batch: int
    rows: int
    columns: int
    is_one_sample: bool


def padding(sizes: Sizes) -> Tensor:
    """(B, S) or (S,), True for the last keys of every sample but the first."""
    lengths = sizes.columns - torch.arange(sizes.batch) % sizes.columns
    mask = torch.arange(sizes.columns) >= lengths[:, None]
    return mask[-1] if sizes.is_one_sample else mask


def random_mask(*shape: int) -> Tensor:
    """True at random, and nowhere in the first column, so that every query sees a key."""
    mask = torch.rand(shape) < 0.3
    mask[..., 0] = False
    return mask


def per_head(sizes: Sizes) -> Tensor:
    return random_mask(sizes.batch * NUM_HEADS, sizes.rows, sizes.columns)


def causal(sizes: Sizes) -> Tensor:
    return torch.ones(sizes.rows, sizes.columns, dtype=torch.bool).triu(1)


def as_float(mask: Tensor) -> Tensor:
    """Random numbers on the scores, -inf where the mask is True."""
    return torch.randn(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


MASKS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "no mask": lambda s: {},
    "bool padding": lambda s: {"key_padding_mask": padding(s)},
    "float padding": lambda s: {"key_padding_mask": as_float(padding(s))},
    "bool mask": lambda s: {"attn_mask": random_mask(s.rows, s.columns)},
    "float mask": lambda s: {"attn_mask": as_float(random_mask(s.rows, s.columns))},
    "bool mask per head": lambda s: {"attn_mask": per_head(s)},
    "float mask per head": lambda s: {"attn_mask": as_float(per_head(s))},
    "bool mask and padding": lambda s: {"attn_mask": causal(s), "key_padding_mask": padding(s)},
    "float mask and padding": lambda s: {"attn_mask": as_float(causal(s)), "key_padding_mask": as_float(padding(s))},
    "per head and padding": lambda s: {"attn_mask": per_head(s), "key_padding_mask": padding(s)},
    "causal": lambda s: {"attn_mask": causal(s), "is_causal": True},
    "causal and padding": lambda s: {"attn_mask": causal(s), "is_causal": True, "key_padding_mask": padding(s)},
}


def pair(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.MultiheadAttention, FlashMultiheadAttention]:
    """Torch's module and ours with the same weights, none of them zero."""
    plain = nn.MultiheadAttention(EMBED_DIM, NUM_HEADS, dtype=dtype, **options)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    flash = FlashMultiheadAttention(EMBED_DIM, NUM_HEADS, dtype=dtype, **options)
    flash.load_state_dict(plain.state_dict())
    return plain, flash


def inputs(
    module: nn.MultiheadAttention, layout: str, rows: int, columns: int, kind: str = "own keys"
) -> tuple[list[Tensor], Sizes]:
    """Query, key, value: the same tensor three times, or keys that are values, or three tensors."""
    sizes = Sizes(1 if layout == "one sample" else BATCH, rows, columns, layout == "one sample")

    def tensor(length: int, width: int) -> Tensor:
        shapes = {
            "batch first": (BATCH, length, width),
            "sequence first": (length, BATCH, width),
            "one sample": (length, width),
        }
        return torch.randn(shapes[layout], dtype=module.out_proj.weight.dtype, requires_grad=True)

    query = tensor(rows, EMBED_DIM)
    if kind == "self":
        return [query, query, query], sizes
    key = tensor(columns, module.kdim)
    return [query, key, key if kind == "memory" else tensor(columns, module.vdim)], sizes


def results(module: Any, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Output, weights if there are any, and the gradients of inputs and parameters."""
    outputs = [t for t in module(*tensors, **options) if t is not None]
    torch.manual_seed(1)
    # Not randn_like, which draws in the order of the memory: torch returns a transposed view.
    cotangents = [torch.randn(t.shape, dtype=t.dtype) for t in outputs]
    wanted = [*dict.fromkeys(tensors), *(module.parameters() if isinstance(module, nn.Module) else ())]
    return [*outputs, *torch.autograd.grad(outputs, wanted, cotangents)]


def assert_same(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype = torch.float64) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        if dtype == torch.bfloat16:  # which rounds each of some hundred products in an element: relative to the whole
            assert (ours - theirs).norm() <= 0.02 * theirs.norm() + 1e-3
        else:
            torch.testing.assert_close(ours, theirs, equal_nan=True, **TOLERANCES[dtype])
