"""Lightning callbacks, imported as :mod:`lightning_accel.callbacks`."""

from lightning_accel.callbacks._epoch import EpochSpeed, Stragglers
from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger

__all__ = ["EpochSpeed", "SpeedMemoryLogger", "Stragglers"]
