"""Devices: where a module is, when it has finished, and its random streams."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter; the CPU without any."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def own_rng(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn inside leaves the random streams of the host, and of ``device`` if that is a GPU, as they were."""
    devices = [device] if device.type in ("cuda", "mps") else []
    return torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")


def seed_streams(seed: int, device: torch.device) -> None:
    """Seeds the random streams of the host, and of ``device`` if that is a GPU.

    ``torch.manual_seed`` also has devices that are not in use yet keep the seed for later, with the stack of the call:
    that takes longer than many a trial.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
