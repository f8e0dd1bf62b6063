"""An NVIDIA card as NVML knows it: the right one, whatever numbers CUDA gives it, and what it can be asked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits that NVML calls reasons, without those that are no throttling: idling, and clocks that somebody has set."""

_SM, _GPU = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU


class NoCardError(RuntimeError):
    """There is no card to be asked; it says why, and what to do."""


class Card:
    """One card, or one instance of a card that MIG divides.

    What an instance has of its own is its memory. Clocks and temperature are those of the whole card, and so are power,
    energy and utilisation, which others are part of: these are not known of an instance.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.is_mig = bool(self._ask(lambda: nvml.nvmlDeviceIsMigDeviceHandle(handle).value))  # of ctypes
        self._whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if self.is_mig else handle

    @classmethod
    def open(cls, device: torch.device) -> Card:
        """The card that torch calls ``device``.

        Raises:
            NoCardError: There is none, or NVML does not tell of it.
        """
        if device.type != "cuda" or torch.version.hip is not None:
            raise NoCardError(f"this run is on {device.type}, and NVML knows NVIDIA's cards only")
        return cls.find(str(torch.cuda.get_device_properties(device).uuid), device.index or 0)

    @classmethod
    def find(cls, uuid: str, index: int) -> Card:
        """The card with a UUID: NVML knows nothing of CUDA_VISIBLE_DEVICES, and counts in another order.

        Args:
            uuid: As CUDA has it.
            index: Its number in this process.

        Raises:
            NoCardError: NVML is not there, or does not tell of it.
        """
        try:
            import pynvml
        except ImportError as error:
            raise NoCardError("nvidia-ml-py is not installed: pip install nvidia-ml-py") from error
        try:
            pynvml.nvmlInit()
        except Exception as error:  # no driver, say
            raise NoCardError(f"NVML does not start: {error}") from error
        # Of an instance CUDA may have the UUID of its card. It is then named by its own in the variable.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        named = visible[index].strip() if index < len(visible) else ""
        why: object = None
        for name in [named] * named.startswith("MIG-") + [f"GPU-{uuid}", f"MIG-{uuid}"]:
            try:
                card = cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name))
            except Exception as failed:
                why = why or failed
                continue
            if card.is_mig or not card.is_divided:
                return card
            why = "MIG divides it; name the instance in CUDA_VISIBLE_DEVICES=MIG-..."
        pynvml.nvmlShutdown()
        raise NoCardError(f"NVML does not tell of the card with UUID {uuid}: {why}")

    @property
    def is_divided(self) -> bool:
        """Whether MIG divides the card into instances, of which a process has one."""
        return bool(self._ask(lambda: self._nvml.nvmlDeviceGetMigMode(self._whole)[0]))

    def utilisation_percent(self) -> float | None:
        """Of the time since the driver last looked, a second at most, how much had a kernel running."""
        return self._of_all(lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._whole).gpu)

    def memory_mib(self) -> float | None:
        """In use, by all processes."""
        return self._ask(lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used / 2**20)

    def power_w(self) -> float | None:
        return self._of_all(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._whole) / 1e3)

    def energy_j(self) -> float | None:
        """Since the driver was loaded (Volta and later)."""
        return self._of_all(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._whole) / 1e3)

    def sm_clock_mhz(self) -> float | None:
        return self._ask(lambda: self._nvml.nvmlDeviceGetClockInfo(self._whole, _SM))

    def temperature_c(self) -> float | None:
        return self._ask(lambda: self._nvml.nvmlDeviceGetTemperature(self._whole, _GPU))

    def throttled_by(self) -> list[str] | None:
        """Why clocks are lower than they could be; empty: they are not."""
        bits = self._ask(lambda: self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._whole))
        if bits is None:  # its name before driver 535
            bits = self._ask(lambda: self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._whole))
        return None if bits is None else [name for bit, name in _REASONS.items() if int(bits) & bit]

    def close(self) -> None:
        self._ask(self._nvml.nvmlShutdown)

    def _of_all(self, ask: Callable[[], Any]) -> float | None:
        return None if self.is_mig else self._ask(ask)

    def _ask(self, ask: Callable[[], Any]) -> float | None:
        try:
            answer = ask()
        except Exception:  # an older card or driver, or one that has been taken away: no reason to end the user's run
            return None
        return None if answer is None else float(answer)


class EnergyMeter:
    """The card's energy counter, read when training starts, stops, pauses; without a card nothing is known."""

    def __init__(self, card: Card | None = None) -> None:
        self._card = card
        self._began_j: float | None = None
        self._spent_j = 0.0

    @classmethod
    def open(cls, device: torch.device) -> EnergyMeter:
        try:
            return cls(Card.open(device))
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
        if self._card is not None:
            self._card.close()

    def _read_j(self) -> float:
        joules = None if self._card is None else self._card.energy_j()
        return math.nan if joules is None else joules
