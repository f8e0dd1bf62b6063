"""Runs on two CPU processes that are broken off: by kill -9 of one of them, and by SLURM, which requeues the job.

Run by a test in a process of its own: python faults.py FOLDER quick|slow. The ranks are forks of that process, as in
``ranks.py``; each writes what it got to ``<run>.<rank>.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_accel import AccelDDPStrategy, AccelFSDPStrategy, AccelPlugin, AccelStrategy
from support.strategies.forks import Ranks, as_torchrun_does
from support.strategies.ranks import weights
from support.strategies.zoo import make

TIMEOUT_S = 30  # of the process group: how long a rank waits for one that does not answer
TIMEOUT = timedelta(seconds=TIMEOUT_S)
STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {  # on how many processes, and what the Trainer gets
    "accel": (1, AccelStrategy),
    "accel_ddp": (2, lambda: AccelDDPStrategy(timeout=TIMEOUT)),
    "accel_fsdp": (2, lambda: AccelFSDPStrategy(timeout=TIMEOUT)),
}
BATCHES = 8  # in two epochs
STEPS_TO_A_CHECKPOINT = 3  # the first in mid-epoch
JOB_ID = "4711"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How a run is broken off in mid-step.

    Attributes:
        strategy: Under which it runs.
        killed: The rank that dies by SIGKILL.
        requeue_signal: With what SLURM tells all ranks that it is about to take the machine away.
        variant: How the model is trained.
        during: Batch, counted from the beginning of the run.
        is_late: Whether the signal reaches the last rank a step after it reaches the first.
        is_slow: Whether it is left to `make test-slow`.
    """

    strategy: str
    killed: int | None = None
    requeue_signal: Literal["SIGUSR1", "SIGTERM"] | None = None
    variant: str = "plain"
    during: int = 5
    is_late: bool = False
    is_slow: bool = False

    def __str__(self) -> str:
        what = self.requeue_signal or f"kill -9 of rank {self.killed}"
        late = ", and a step later" if self.is_late else ""
        return f"{self.strategy}, {self.variant}, {what} during batch {self.during}{late}"

    @property
    def undisturbed(self) -> str:
        return f"{self.strategy}, {self.variant}"


KILLS = [
    Fault(strategy="accel_ddp", killed=0),
    Fault(strategy="accel_ddp", killed=1, is_slow=True),
    Fault(strategy="accel_fsdp", killed=0, is_slow=True),
    Fault(strategy="accel_fsdp", killed=1),
]
REQUEUES = [
    Fault(strategy="accel", requeue_signal="SIGUSR1"),
    Fault(strategy="accel_ddp", requeue_signal="SIGUSR1", is_late=True),
    Fault(strategy="accel_ddp", requeue_signal="SIGTERM", is_slow=True),
    Fault(strategy="accel_ddp", requeue_signal="SIGTERM", variant="accumulation", during=4, is_slow=True),
    Fault(strategy="accel_ddp", requeue_signal="SIGTERM", during=3, is_slow=True),  # the last of an epoch
    Fault(strategy="accel_fsdp", requeue_signal="SIGTERM"),
]


# -- a run -------------------------------------------------------------------------------------------------------------


class Breaks(Callback):
    """Sends this process a signal in the middle of a step: while others wait for it."""

    def __init__(self, number: int, during: int, hook: Literal["on_before_backward", "on_after_backward"]) -> None:
        self.number, self.during = number, during
        setattr(self, hook, self._break)

    def _break(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.during:
            os.kill(os.getpid(), self.number)


def breaks(fault: Fault, rank: int) -> list[Callback]:
    """What breaks off this rank, if anything does. The signals of SLURM reach no two ranks at the same place."""
    if fault.requeue_signal is not None:
        number = signal.Signals[fault.requeue_signal]
        if rank == 0:
            return [Breaks(number, fault.during, "on_before_backward")]
        return [Breaks(number, fault.during + fault.is_late, "on_after_backward")]
    return [Breaks(signal.SIGKILL, fault.during, "on_before_backward")] if rank == fault.killed else []


def train(fault: Fault, folder: Path, callbacks: list[Callback], **fit: Any) -> dict[str, Any]:
    """Trains the transformer of the zoo for two epochs, or until it is broken off; checkpoints go to ``folder``."""
    module, data, options = make("transformer", fault.variant)
    world_size, strategy = STRATEGIES[fault.strategy]
    plugins: list[Any] = [
        AccelPlugin(precision="32-true", techniques={"flash_attention": "off", "memory_format": "off"})
    ]
    if fault.requeue_signal is not None:
        plugins.append(SLURMEnvironment(requeue_signal=signal.Signals[fault.requeue_signal]))
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy(),
        plugins=plugins,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=STEPS_TO_A_CHECKPOINT), *callbacks],
        default_root_dir=folder,
        max_epochs=2,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    said: dict[str, Any] = {}
    try:
        trainer.fit(module, data, weights_only=False, **fit)
    except BaseException as error:
        said["error"] = f"{type(error).__name__}: {error}"
    else:
        said["weights"] = weights(module)
    said["gave handlers back"] = handlers == {number: signal.getsignal(number) for number in handlers}
    return said | {"losses": module.losses}


# -- processes ---------------------------------------------------------------------------------------------------------


def as_srun_does(world_size: int, folder: Path, ends_job: bool) -> list[dict[str, str]]:
    """The environment of each task of a job of SLURM, with an ``scontrol`` that writes down how it is called.

    With ``ends_job`` it then ends the job that it requeues, as SLURM does: by SIGTERM to its tasks.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    scontrol = programs / "scontrol"
    end = f'kill -TERM $(cat "{folder}"/*.pid)\n' if ends_job else ""
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/scontrol.txt"\n{end}')
    scontrol.chmod(0o755)
    first = as_torchrun_does(world_size)[0]
    job = {name: first[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    job |= {"SLURM_JOB_ID": JOB_ID, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": str(world_size), "SLURM_NNODES": "1"}
    job |= {"SLURM_NTASKS_PER_NODE": str(world_size), "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1"}
    job |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    return [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(world_size)]


def run(name: str, fault: Fault, folder: Path, work: Callable[[int], Any]) -> None:
    """Starts the ranks of a run and waits for their end; ``work`` is given the rank."""
    world_size, _ = STRATEGIES[fault.strategy]
    is_slurm = fault.requeue_signal is not None
    if is_slurm:
        environments = as_srun_does(world_size, folder / str(fault), ends_job=fault.requeue_signal != "SIGTERM")
    else:
        environments = as_torchrun_does(world_size)

    def task(rank: int) -> None:
        os.chdir(folder)
        if is_slurm:
            (folder / str(fault) / f"{rank}.pid").write_text(f"{os.getpid()}\n")
        try:
            said = work(rank)
        except BaseException as error:
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {error}"}
        torch.save(said, folder / f"{name}.{rank}.pt")

    def log(rank: int) -> Path:
        return folder / f"{name}.{rank}.log"

    Ranks(task, environments, patience_s=2 * TIMEOUT_S, log=log).wait()


def break_and_resume(fault: Fault, folder: Path) -> None:
    checkpoints = folder / str(fault)
    # A requeued job finds what SLURM's signal made it save by itself.
    start = {} if fault.requeue_signal is not None else {"ckpt_path": "last"}
    run(f"{fault}, broken", fault, folder, lambda rank: train(fault, checkpoints, breaks(fault, rank)))
    run(f"{fault}, resumed", fault, folder, lambda rank: train(fault, checkpoints, [], **start))


def main(folder: Path, which: str) -> None:
    faults = [fault for fault in KILLS + REQUEUES if fault.is_slow == (which == "slow")]
    for fault in {fault.undisturbed: fault for fault in faults}.values():
        undisturbed = Fault(strategy=fault.strategy, variant=fault.variant)
        run(fault.undisturbed, undisturbed, folder, lambda rank, fault=undisturbed: train(fault, folder / "whole", []))  # type: ignore[misc]
    for fault in faults:
        break_and_resume(fault, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
