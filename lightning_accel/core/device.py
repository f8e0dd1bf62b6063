"""Devices: where a module is, when it has finished, how long it took."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_accel.core.clocks import perf_counter


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


class Span:
    """The time from here to :meth:`stop` on a device; on a GPU between two events, which keeps nobody waiting."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._seconds = 0.0
        if self._stream is None:
            self._start = perf_counter()
        else:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record(self._stream)

    def stop(self) -> None:
        if self._stream is None:
            self._seconds = perf_counter() - self._start
        else:
            self._events[1].record(self._stream)

    def is_over(self) -> bool:
        """Whether the device has come to where it was stopped, asked without waiting."""
        return self._stream is None or self._events[1].query()  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """The time taken; waits for the device when it is not there yet."""
        if self._stream is None:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
