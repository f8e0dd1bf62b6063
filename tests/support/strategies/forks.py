"""Runs a function on several ranks, each a fork of this process with the environment that torchrun would give it.

The process that forks imports everything, which takes seconds and is then done once, and touches no tensor: torch's
threads do not survive a fork.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it at its first step, in every rank anew
import torch.distributed.checkpoint
import torch.distributed.fsdp

from lightning_accel.lightning import start_rules

_FORK = multiprocessing.get_context("fork")


def in_ranks(function: Callable[[int], Any], world_size: int, *, patience_s: float = 60) -> None:
    """Runs ``function(rank)`` on ``world_size`` ranks, and waits for them. What it returns is lost.

    Raises:
        RuntimeError: Ranks failed, were killed, or were not done after ``patience_s`` seconds; it says which. They
            print where.
    """
    if wrong := Ranks(function, as_torchrun_does(world_size), patience_s=patience_s).wait():
        raise RuntimeError("; ".join(f"rank {rank} {what}" for rank, what in wrong.items()))


class Ranks:
    """A function at work on several ranks.

    Args:
        function: Is given the rank.
        environments: Variables of each rank.
        patience_s: How long they may take, in seconds; they are killed then, and print where they hang just before.
        log: ``log(rank)`` is the file that takes what the rank prints; None: it prints where this process does.
    """

    def __init__(
        self,
        function: Callable[[int], Any],
        environments: Sequence[Mapping[str, str]],
        *,
        patience_s: float,
        log: Callable[[int], Path] | None = None,
    ) -> None:
        self._deadline = time.monotonic() + patience_s
        self._patience_s = patience_s
        gc.freeze()  # a collection in a fork would copy every page of what this process holds
        self._processes = [
            _FORK.Process(target=_work, args=(function, rank, variables, patience_s, log and log(rank)))
            for rank, variables in enumerate(environments)
        ]
        for process in self._processes:
            process.start()

    def wait(self) -> dict[int, str]:
        """Rank → what went wrong, of those where something did."""
        wrong: dict[int, str] = {}
        for rank, process in enumerate(self._processes):
            process.join(max(0.0, self._deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
                wrong[rank] = f"was not done after {self._patience_s:g} s"
            elif process.exitcode:
                killed = process.exitcode < 0
                how = f"was ended by {signal.Signals(-process.exitcode).name}" if killed else "failed"
                wrong[rank] = how
        return wrong


def as_torchrun_does(world_size: int) -> list[dict[str, str]]:
    """The environment of each rank of a job of ``world_size`` processes on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    job |= {"TORCHELASTIC_RUN_ID": "test"}
    return [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _work(
    function: Callable[[int], Any], rank: int, variables: Mapping[str, str], patience_s: float, log: Path | None
) -> None:
    if log is not None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    faulthandler.dump_traceback_later(0.9 * patience_s)
    torch.set_num_threads(1)
    start_rules.SHORT_ON_RANKS = 0  # tests train for a few steps, which a run of a user's would leave as they are
    try:
        function(rank)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
