"""Tensors in 8 bits by blocks of 256, as optimizer states are kept: torchao's codes, written in one pass.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), https://arxiv.org/abs/2110.02861.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_accel.core.torchao import load

BLOCK = 256
LEAST_ELEMENTS = 4096
"""Smaller tensors stay as they are, as the paper has it: there is nothing to gain."""

MODULE = "torchao.optim.subclass_8bit"


def is_possible(tensor: Tensor) -> bool:
    """Whether a tensor is of a kind and size that is kept in 8 bits."""
    has_blocks = tensor.numel() >= LEAST_ELEMENTS and tensor.numel() % BLOCK == 0
    return has_blocks and tensor.layout == torch.strided and tensor.dtype in (torch.float32, torch.bfloat16)


def is_packed(value: Any) -> bool:
    """Whether a value is in 8 bits."""
    return type(value).__name__ == "OptimState8bit"


def zeros_like(tensor: Tensor, *, signed: bool) -> Any:
    """Zeros in 8 bits, in the shape and on the device of ``tensor``, to unpack to its dtype.

    Where there cannot be negative values (not ``signed``), the others are twice as fine.
    """
    return load(MODULE).OptimState8bit.zeros(tensor.shape, signed, BLOCK, tensor.device, tensor.dtype)


def write(packed: Any, values: Tensor) -> None:
    """Rounds ``values`` to the nearest codes of ``packed``, block by block.

    torchao's own ``copy_`` looks for each code in twenty passes, which are one where they are compiled.
    """
    blocks = values.float().reshape(-1, BLOCK)
    scale = blocks.abs().amax(dim=-1).clamp(min=1e-12)
    halfway = (packed.qmap[1:] + packed.qmap[:-1]) / 2
    codes = torch.bucketize(blocks / scale[:, None], halfway, right=True, out_int32=True)
    packed.codes.copy_(codes.view(packed.codes.shape))
    packed.scale.copy_(scale)


def read(packed: Any, like: Tensor) -> Tensor:
    """What ``packed`` holds, to its rounding, in the dtype and the strides of ``like``.

    Fused optimizers walk parameter and state by their addresses.
    """
    return torch.empty_like(like).copy_(packed.dequantize())


def packed_bytes(packed: Any) -> int:
    """What it takes: a byte an element, and four a block."""
    return int(packed.codes.nbytes + packed.scale.nbytes + packed.qmap.nbytes)
