"""Runs in which one rank is lost; what the others are told of it goes into ``FOLDER/<run>.<rank>.txt``.

Run by a test in a process of its own: python lost_ranks_runs.py FOLDER
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_accel.resilience.lost_ranks import Roster, name_lost_ranks

LOST = 1
TIMEOUT_S = 2


def all_reduce() -> None:
    dist.all_reduce(torch.ones(4))


def wait_for_one_another() -> None:
    """Rank 0 waits for the lost one, and each after it for the one before: they break off one by one."""
    before = {0: LOST, 2: 0, 3: 2}[dist.get_rank()]
    dist.recv(torch.ones(4), src=before)


def be_killed(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(folder: Path) -> None:
    raise ValueError("the user's own")


def hang(folder: Path) -> None:
    give_up_at = time.monotonic() + 20
    while len(list(folder.glob("hung.*.txt"))) < 2 and time.monotonic() < give_up_at:
        time.sleep(0.1)


RUNS: dict[str, tuple[int, Callable[[Path], None], Callable[[], None]]] = {
    "killed": (3, be_killed, all_reduce),
    "killed, seen late": (4, be_killed, wait_for_one_another),
    "failed": (3, fail, all_reduce),
    "hung": (3, hang, all_reduce),
}


def run(name: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    world_size, lose, work = RUNS[name]
    timeout = timedelta(seconds=TIMEOUT_S if name == "hung" else 60)
    dist.init_process_group("gloo", f"file://{folder}/{name}.store", timeout, world_size, rank)
    roster = Roster.gather()
    all_reduce()
    try:
        if rank == LOST:
            lose(folder)
        else:
            work()
    except RuntimeError as error:
        name_lost_ranks(error, roster, patience_s=1.0 if name == "hung" else 10.0)
        ranks = {f"{member.rank}": member.pid for member in roster.members}
        (folder / f"{name}.{rank}.txt").write_text(f"{ranks[str(LOST)]}\n{error}")
        os._exit(1)  # as a process that breaks off does, its connections with it


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # torch and Lightning are imported once
    for name, (world_size, _, _) in RUNS.items():
        ranks = [fork.Process(target=run, args=(name, rank, Path(sys.argv[1]))) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
