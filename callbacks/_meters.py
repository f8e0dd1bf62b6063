"""Host memory and energy over an epoch, from whoever keeps the books: the system, the card."""

from __future__ import annotations

import math
from typing import Any

import psutil
import torch

_MIB = 1024.0**2


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
