"""Lightning callbacks, imported as :mod:`lightning_accel.callbacks`."""

from lightning_accel.callbacks.export_best import ExportBest
from lightning_accel.callbacks.gpu_stats import GpuStats
from lightning_accel.callbacks.speed_memory import SpeedMemoryLogger
from lightning_accel.callbacks.trace import TraceCallback
from lightning_accel.evidence.epoch_speed import EpochSpeed, Stragglers

__all__ = ["EpochSpeed", "ExportBest", "GpuStats", "SpeedMemoryLogger", "Stragglers", "TraceCallback"]
