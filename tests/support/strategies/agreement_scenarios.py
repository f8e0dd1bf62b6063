"""Ranks that are not alike, on two CPU processes."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.core.host import Host
from support.lightning_models import Supervised, images, tokens
from support.strategies.scenarios import fit, is_rank_1, scenario, transformer


@scenario
def more_processes_than_samples() -> Any:
    one = TensorDataset(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    return fit(transformer(), DataLoader(one), "accel_ddp")


@scenario
def different_types_of_devices() -> Any:
    """Rank 1 simulates a GPU."""
    return simulated({"kind": "cuda"} if is_rank_1() else {})


@scenario
def different_precisions() -> Any:
    """Rank 1 simulates a CPU without bfloat16."""
    return simulated({"native_bf16": not is_rank_1()}, plugin={"precision": "auto"})


def simulated(changes: dict[str, Any], **options: Any) -> Any:
    """A fit on a host that says of itself what it is not."""
    detect = Host.detect
    with mock.patch.object(Host, "detect", lambda device=None: dataclasses.replace(detect(device), **changes)):
        return fit(transformer(), tokens(8), "accel_ddp", **options)


@scenario
def a_rank_without_a_compiler() -> Any:
    return simulated({"compiler": None} if is_rank_1() else {}, plugin={"compile": "auto"})


class Stubborn(nn.ReLU):
    """Its forward cannot be bound anew on rank 1."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise RuntimeError("not on this machine")
        super().__setattr__(name, value)


@scenario
def a_rank_that_cannot_follow() -> Any:
    seed_everything(0, verbose=False)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Stubborn(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    return fit(Supervised(net), images(8), "accel_ddp", plugin={"memory_format": "off"})
