"""Memory and energy over an epoch, from whoever keeps the books: the allocator, the kernel, the card."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

_MIB = 1024.0**2


@dataclass(frozen=True)
class MemoryMeter:
    """The largest amount of memory that was held at one time.

    Attributes:
        source: Whose peak it is, and since when, in words.
        restart: Begins a new window, where the system can.
        peak_mib: The peak of the window.
    """

    source: str
    restart: Callable[[], object]
    peak_mib: Callable[[], float]


def memory_meter_for(device: torch.device) -> MemoryMeter:
    """The closest books on ``device``: torch's allocator's, or else those that the system keeps of this process."""
    if device.type == "cuda":
        return MemoryMeter(
            "device allocator's peak, reset per epoch",
            lambda: torch.cuda.reset_peak_memory_stats(device),
            lambda: torch.cuda.max_memory_allocated(device) / _MIB,
        )
    if may_reset_peak():
        return MemoryMeter("process high-water mark, reset per epoch", _reset_peak, _peak_since_reset_mib)
    return MemoryMeter("process high-water mark since its start", lambda: None, _peak_since_start_mib)


def may_reset_peak() -> bool:
    """Whether this process may reset its own mark, as Linux allows (``man 5 proc``, clear_refs)."""
    try:
        _reset_peak()
        return _peak_since_reset_mib() > 0
    except OSError:
        return False


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_since_reset_mib() -> float:
    mark = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    return int(mark[1]) / 1024 if mark is not None else 0.0


def _peak_since_start_mib() -> float:
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset) / _MIB
    import resource

    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss / _MIB if sys.platform == "darwin" else max_rss / 1024


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
