"""Helpers for devices: where a module is, how float32 products are rounded, and waiting for a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ROUNDED = {"bf16": torch.bfloat16, "tf32": torch.float16}  # the coarser one first


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module's first parameter, or the CPU if it has none."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def with_index(device: torch.device) -> torch.device:
    """Returns the device with its index. CUDA without an index means the current device."""
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


def dtype_of_products(device: torch.device, *, convolves: bool = False) -> torch.dtype | None:
    """Returns the dtype as which the run may round float32 factors; None for full float32.

    ``convolves`` includes convolutions. TF32, which torch allows cuDNN by default, rounds as float16 does.
    """
    backends: Any = torch.backends
    is_cuda = device.type == "cuda"
    allowed = [(backends.cuda if is_cuda else backends.mkldnn).matmul.fp32_precision]
    if convolves:
        allowed.append((backends.cudnn if is_cuda else backends.mkldnn).conv.fp32_precision)
    allowed = [backends.fp32_precision if own == "none" else own for own in allowed]
    return next((dtype for name, dtype in _ROUNDED.items() if name in allowed), None)


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has finished its queued work. A CPU has no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
