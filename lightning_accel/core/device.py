"""Devices: where a module is, and when its device has finished."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ROUNDED = {"bf16": torch.bfloat16, "tf32": torch.float16}  # the coarser first


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter; the CPU without any."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def with_index(device: torch.device) -> torch.device:
    """The device as it is told from others of its kind: of CUDA, torch means the current one where it has no index."""
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


def dtype_of_products(device: torch.device, *, convolves: bool = False) -> torch.dtype | None:
    """As what the run allows float32 to be multiplied, in convolutions too where it ``convolves``.

    TF32, which torch's own default allows cuDNN, rounds as float16 does.
    """
    backends: Any = torch.backends
    is_cuda = device.type == "cuda"
    allowed = [(backends.cuda if is_cuda else backends.mkldnn).matmul.fp32_precision]
    if convolves:
        allowed.append((backends.cudnn if is_cuda else backends.mkldnn).conv.fp32_precision)
    allowed = [backends.fp32_precision if own == "none" else own for own in allowed]
    return next((dtype for name, dtype in _ROUNDED.items() if name in allowed), None)


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
