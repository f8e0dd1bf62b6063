"""What to change in a run whose steps wait for data, each with the line to write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accel.data.pipeline import DevicePipeline
from lightning_accel.data.tuned_loader import TunedLoader

WORTH_ADVICE = 0.1  # of the training time spent waiting


def has_images(values: Iterable[Any]) -> bool:
    """Whether one of the tensors of a batch holds images: four dimensions, as many channels as images have."""
    shapes = [tuple(value.shape[1:]) for value in values if isinstance(value, Tensor) and value.dim() == 4]
    return any(sizes[at] in (1, 3, 4) and min(sizes[1], sizes[2 - at]) > 1 for sizes in shapes for at in (0, 2))


def waiting_advice(
    loaders: Sequence[Any],
    data_wait_frac: float,
    device: torch.device,
    *,
    preprocesses: bool,
    cores: int,
    makes_loaders: bool = True,
    has_images: bool = True,
) -> list[str]:
    """Lines of advice for a training that spent a part of its time, from 0 to 1, waiting for its loaders.

    Empty where it hardly did. ``preprocesses``: whether the run has transforms, which bring pinned memory of their own;
    ``cores``: how many this process may use; ``makes_loaders``: whether the user's own code makes the loaders, whose
    arguments are else not theirs to give; ``has_images``: whether there are images in a batch.
    """
    if data_wait_frac <= WORTH_ADVICE:
        return []
    inner = [(one, one.loader if isinstance(one, DevicePipeline) else one) for one in loaders]
    tuned = [loader for loader, within in inner if isinstance(within, TunedLoader)]
    known = [loader for loader in loaders if isinstance(loader, DataLoader) and loader not in tuned]
    theirs = known if makes_loaders else []
    pipelines = [loader for loader in loaders if isinstance(loader, DevicePipeline)]
    fetch_s, prepare_s = (sum(loader.seconds[part] for loader in pipelines) for part in (0, 1))
    # A core is left to the training, which on a CPU takes what it can get.
    workers = max(1, min(cores - 1, 8))
    with_workers = f"DataLoader(..., num_workers={workers}, persistent_workers=True)"
    lines = [f"{data_wait_frac:.0%} of the training time was spent waiting for data."]
    if prepare_s > fetch_s:
        return [
            *lines,
            f"Preparing batches took {prepare_s:.1f} s of the epoch, fetching them {fetch_s:.1f} s: it waits for the"
            " transforms. Move those that work on single samples into the dataset, and load with workers:"
            f" {with_workers}; or leave some out.",
        ]
    if any(loader.num_workers == 0 for loader in known) and not makes_loaders:
        lines.append('Have AccelPlugin(loader="auto") find, between two epochs, how many processes are to load.')
    if any(loader.num_workers == 0 for loader in theirs):
        lines.append(
            f"Load in other processes, while the model computes: {with_workers} instead of num_workers=0; or have"
            ' AccelPlugin(loader="auto") find how many, between two epochs.'
        )
    if tuned:
        lines.append('loader="auto" tries from the next epoch on what is faster; the report says what came of it.')
    short = [loader.num_workers for loader in theirs if 0 < loader.num_workers < workers]
    if short:
        lines.append(f"Load in more processes: DataLoader(..., num_workers={workers}) instead of {min(short)}.")
    if any(loader.num_workers > 0 and not loader.persistent_workers for loader in theirs):
        lines.append(
            "Keep the processes from epoch to epoch: DataLoader(..., persistent_workers=True); without it they are"
            " started anew, and their first batches waited for, in each."
        )
    if device.type == "cuda" and not preprocesses and any(not loader.pin_memory for loader in theirs):
        lines.append("Let the GPU fetch batches by itself, while it computes: DataLoader(..., pin_memory=True).")
    if has_images and not preprocesses:
        lines.append(
            "Leave images as uint8 in the dataset, and transform whole batches on the device:"
            " AccelPlugin(preprocess=[Normalize(mean, std), ...]), from lightning_accel.data."
        )
    if len(lines) == 1 and not makes_loaders:
        return []  # there is nothing to be done about it
    if len(lines) == 1:
        lines.append(
            f"Workers and their settings are as they should be on {cores} cores: what is left is the dataset's own"
            " __getitem__, its disk, or more cores."
        )
    return lines
