"""The strategy ``accel``, for one device."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from lightning_accel.lightning.packages import SingleDeviceStrategy, in_use, rank_zero_warn
from lightning_accel.strategies.accelerated import Accelerated


class AccelStrategy(Accelerated, SingleDeviceStrategy):
    """One device, an ``AccelPlugin()`` if no plugin is given, and the device pipeline: ``Trainer(strategy="accel")``.

    Args:
        device: The device to train on. If None, the first that the Trainer found or was given.
        settings: Those of :class:`~lightning.pytorch.strategies.SingleDeviceStrategy`.

    Raises:
        ValueError: The Trainer was given several CPU processes, or several nodes.
    """

    strategy_name = "accel"

    def __init__(self, device: torch.device | str | int | None = None, **settings: Any) -> None:
        in_use()
        super().__init__(device="cpu" if device is None else device, **settings)
        self._is_chosen = device is not None
        self._device = super().root_device

    @property
    @override
    def root_device(self) -> torch.device:
        return self._device

    # Lightning sets these properties, as for its multi-device strategies.

    @property
    def num_nodes(self) -> int:
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes > 1:
            raise ValueError(
                f"Trainer(strategy='accel', num_nodes={num_nodes}): accel trains in one process. Use"
                " strategy='accel_ddp' or 'accel_fsdp' for several."
            )

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if self._is_chosen:
            return
        self._device = torch.device(devices[0])
        if len(devices) == 1:
            return
        if self._device.type == "cpu":
            raise ValueError(
                f"Trainer(strategy='accel', devices={len(devices)}): accel trains in one process. Set devices=1, or"
                " strategy='accel_ddp' for several."
            )
        rank_zero_warn(
            f"accel trains on one device: it takes {self._device}, the first of {len(devices)}."
            " Set devices=1 to say so, or strategy='accel_ddp' to train on all of them."
        )
