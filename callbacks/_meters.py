"""Host memory and energy over an epoch, from whoever keeps the books: the system, the card."""

from __future__ import annotations

import math

import psutil
import torch

from lightning_accel.callbacks._nvml import Card

_MIB = 1024.0**2


def host_rss_mib() -> float:
    """What this process holds in host memory now; its data loader workers are processes of their own."""
    return float(psutil.Process().memory_info().rss) / _MIB


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
        if self._card is not None:
            self._began_j = self._read_j(self._card)

    def pause(self) -> None:
        if self._card is not None and self._began_j is not None:
            self._spent_j += self._read_j(self._card) - self._began_j
            self._began_j = None

    def joules(self) -> float | None:
        """Spent since :meth:`restart`, pauses taken out; None where the counter cannot be read."""
        self.pause()
        return None if self._card is None or math.isnan(self._spent_j) else self._spent_j

    def close(self) -> None:
        if self._card is not None:
            self._card.close()

    def _read_j(self, card: Card) -> float:
        joules = card.energy_j()
        return math.nan if joules is None else joules
