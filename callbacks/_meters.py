"""Memory and energy over an epoch, from whoever keeps the books: the allocator, the kernel, the card."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from typing_extensions import override

_MIB = 1024.0**2


class MemoryMeter:
    """The process's peak since it started: what every system can tell.

    Attributes:
        source: Whose peak it is, and since when, in words.
    """

    source = "process high-water mark since its start"

    def restart(self) -> None:
        """Begins a new window, where the system can."""

    def peak_mib(self) -> float:
        if sys.platform == "win32":
            return float(psutil.Process().memory_info().peak_wset) / _MIB
        import resource

        max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return max_rss / _MIB if sys.platform == "darwin" else max_rss / 1024


class LinuxProcessMemory(MemoryMeter):
    """The process's peak in the window: Linux lets a process reset its own mark (``man 5 proc``, clear_refs)."""

    source = "process high-water mark, reset per epoch"

    @classmethod
    def is_permitted(cls) -> bool:
        try:
            cls().restart()
            return cls().peak_mib() > 0
        except (OSError, ValueError):
            return False

    @override
    def restart(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    @override
    def peak_mib(self) -> float:
        mark = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
        return int(mark[1]) / 1024 if mark is not None else 0.0


class CudaMemory(MemoryMeter):
    """The peak of torch's allocator on one device in the window. Resets the device's peak statistics."""

    source = "device allocator's peak, reset per epoch"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @override
    def peak_mib(self) -> float:
        return torch.cuda.max_memory_allocated(self._device) / _MIB


def memory_meter_for(device: torch.device) -> MemoryMeter:
    """The closest books on ``device``."""
    if device.type == "cuda":
        return CudaMemory(device)
    return LinuxProcessMemory() if LinuxProcessMemory.is_permitted() else MemoryMeter()


def host_rss_mib() -> float:
    """What this process holds in host memory now; its data loader workers are processes of their own."""
    return float(psutil.Process().memory_info().rss) / _MIB


class EnergyMeter:
    """The card's energy counter (NVML, Volta and later), read when training starts, stops, pauses.

    Args:
        nvml: The module ``pynvml``; None where there is no counter, and nothing is known.
        handle: The card's, in it.
    """

    def __init__(self, nvml: Any = None, handle: Any = None) -> None:
        self._nvml = nvml
        self._handle = handle
        self._began_j: float | None = None
        self._spent_j = 0.0

    @classmethod
    def open(cls, device: torch.device) -> EnergyMeter:
        """The counter of ``device``."""
        if device.type != "cuda":
            return cls()
        try:
            import pynvml

            pynvml.nvmlInit()
            # By its UUID: NVML knows nothing of CUDA_VISIBLE_DEVICES.
            uuid = torch.cuda.get_device_properties(device).uuid
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except Exception:  # no pynvml, no driver, no permission: the metric is left out
            return cls()

    def restart(self) -> None:
        self._spent_j = 0.0
        self.resume()

    def resume(self) -> None:
        self._began_j = self._read_j()

    def pause(self) -> None:
        if self._began_j is not None:
            self._spent_j += self._read_j() - self._began_j
            self._began_j = None

    def joules(self) -> float | None:
        """Spent since :meth:`restart`, pauses taken out; None where the counter cannot be read."""
        self.pause()
        return None if math.isnan(self._spent_j) else self._spent_j

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()

    def _read_j(self) -> float:
        if self._nvml is None:
            return math.nan
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except Exception:  # an older card, or one that has been taken away: no reason to end the user's run
            return math.nan
