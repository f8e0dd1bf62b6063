"""Tensors in 8 bits, in blocks of 256 elements, for optimizer states: torchao's codes, written in one pass.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), https://arxiv.org/abs/2110.02861.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_accel.core.torchao import load

BLOCK = 256
LEAST_ELEMENTS = 4096
"""Smaller tensors are not packed, as in the paper: they would save little."""

MODULE = "torchao.optim.subclass_8bit"


def is_possible(tensor: Tensor) -> bool:
    """Returns whether the kind and size of a tensor allow 8 bits."""
    has_blocks = tensor.numel() >= LEAST_ELEMENTS and tensor.numel() % BLOCK == 0
    return has_blocks and tensor.layout == torch.strided and tensor.dtype in (torch.float32, torch.bfloat16)


def is_packed(value: Any) -> bool:
    """Returns whether a value is stored in 8 bits."""
    return type(value).__name__ == "OptimState8bit"


def zeros_like(tensor: Tensor, *, signed: bool) -> Any:
    """Returns 8-bit zeros with the shape, device and unpacked dtype of ``tensor``.

    Without negative values (not ``signed``), the resolution is twice as fine.
    """
    return load(MODULE).OptimState8bit.zeros(tensor.shape, signed, BLOCK, tensor.device, tensor.dtype)


def write(packed: Any, values: Tensor) -> None:
    """Rounds ``values`` to the nearest codes of ``packed``, block by block.

    torchao's own ``copy_`` needs twenty passes to find the codes, unless they are compiled into one.
    """
    blocks = values.float().reshape(-1, BLOCK)
    scale = blocks.abs().amax(dim=-1).clamp(min=1e-12)
    halfway = (packed.qmap[1:] + packed.qmap[:-1]) / 2
    codes = torch.bucketize(blocks / scale[:, None], halfway, right=True, out_int32=True)
    packed.codes.copy_(codes.view(packed.codes.shape))
    packed.scale.copy_(scale)


def read(packed: Any, like: Tensor) -> Tensor:
    """Returns the rounded values of ``packed`` in the dtype and strides of ``like``.

    Fused optimizers go through parameter and state by memory address.
    """
    return torch.empty_like(like).copy_(packed.dequantize())


def packed_bytes(packed: Any) -> int:
    """Returns the memory of ``packed``: one byte per element, four per block, and the code table."""
    return int(packed.codes.nbytes + packed.scale.nbytes + packed.qmap.nbytes)
