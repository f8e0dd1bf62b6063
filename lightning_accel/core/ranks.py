"""Compares the processes of a run, so that they act alike or stop together."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist
from lightning_utilities.core import rank_zero

from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelError

T = TypeVar("T")


def has_ranks() -> bool:
    """Whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather(value: T) -> list[T]:
    """Returns every rank's value, in order of ranks. A collective call; ``[value]`` in a single process."""
    if not has_ranks():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rank_zero_info(line: str) -> None:
    """Logs a line once for all ranks, with Lightning's logger of rank 0, also in runs without Lightning."""
    rank = getattr(rank_zero.rank_zero_only, "rank", None)  # set when Lightning is imported
    if rank is None:
        rank = dist.get_rank() if has_ranks() else 0
    if rank == 0:
        rank_zero.log.info(line)


def check_devices(host: Host, precision: str) -> None:
    """Compares this rank's kind of device and precision with the other ranks'. A collective call.

    Raises:
        ValueError: The kinds or precisions differ. All ranks raise it, with a list of what each rank has.
    """
    ranks = gather((host.kind, precision, host.device_name, socket.gethostname()))
    listed = "; ".join(
        f"rank {rank} has {device} ({kind}, {precision}) on {where}"
        for rank, (kind, precision, device, where) in enumerate(ranks)
    )
    if len({kind for kind, *_ in ranks}) > 1:
        raise ValueError(
            f"The ranks run on different types of devices: {listed}. One run takes one type: start every"
            " process with the same Trainer(accelerator=...), on hosts that have it."
        )
    if len({precision for _, precision, *_ in ranks}) > 1:
        raise ValueError(
            f"precision='auto' comes to different precisions on the devices of the ranks: {listed}."
            " Set the one that all of them are to use: AccelPlugin(precision='16-mixed'), say."
        )


def stay_together(ranks: Sequence[Mapping[str, tuple[set[str], Mapping[str, str], str]]]) -> None:
    """Compares what the ranks do.

    Args:
        ranks: For each rank: technique → (the sites that it edits, its refusals, its status).

    Raises:
        AccelError: A rank does something other than rank 0. The message says where, and why.
    """
    for name, (decided, _, _) in ranks[0].items():
        for rank, techniques in enumerate(ranks):
            if (done := techniques[name][0]) != decided:
                site = min(done ^ decided)
                without, having = (0, rank) if site in done else (rank, 0)
                _, refusals, status = ranks[without][name]
                raise AccelError(
                    f"The ranks do not do the same: rank {without} goes without {name} at {site or 'the model'!r}"
                    f" ({refusals.get(site, status or 'it has no such site')}), rank {having} with it. All of them"
                    f" stop here. Set {name} to 'off', or make their machines alike."
                )
