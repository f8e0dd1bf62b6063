"""Devices: where a module is, and when its device has finished."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter; the CPU without any."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def with_index(device: torch.device) -> torch.device:
    """The device as it is told from others of its kind: of CUDA, torch means the current one where it has no index."""
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


def dtype_of_products(device: torch.device) -> torch.dtype | None:
    """As what the run allows float32 to be multiplied; TF32 rounds as float16 does."""
    backends: Any = torch.backends
    own = (backends.cuda if device.type == "cuda" else backends.mkldnn).matmul.fp32_precision
    allowed = backends.fp32_precision if own == "none" else own
    return {"tf32": torch.float16, "bf16": torch.bfloat16}.get(allowed)


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


