"""What SLURM's signals do to a run of one process. Jobs of several, and what they resume to: ``test_faults.py``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer

from lightning_accel import AccelPlugin
from lightning_accel.resilience.requeue import DeferredSignals, is_accumulating
from support.lightning_models import Call, Supervised, cnn, images
from support.strategies.zoo import make


@pytest.fixture
def _job(tmp_path: Path) -> Iterator[None]:
    """A job of SLURM with one task, whose ``scontrol`` does nothing; the handlers that tests set are taken back."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\n")
    scontrol.chmod(0o755)
    one_task = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**one_task, "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train"}.items():
            environment.setenv(name, value)
        environment.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def fit(make_trainer: Callable[..., Trainer], tmp_path: Path) -> Callable[..., Trainer]:
    """Trains for one epoch of four batches under ``accel``, with a function at one hook."""

    def run(auto_requeue: bool = True, **hooks: Callable[..., Any]) -> Trainer:
        module, data, _ = make("transformer", "plain")
        plugins = [AccelPlugin(precision="32-true", report=False), SLURMEnvironment(auto_requeue=auto_requeue)]
        trainer = make_trainer(
            strategy="accel",
            plugins=plugins,
            callbacks=[Call(**hooks)],
            default_root_dir=tmp_path,
            val_check_interval=1,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, data)
        return trainer

    return run


def during(steps: int) -> Callable[..., None]:
    """Sends this process SLURM's signal when it has done so many steps."""

    def send(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == steps:
            os.kill(os.getpid(), signal.SIGUSR1)

    return send


def steps_in_checkpoint(folder: Path) -> int:
    steps: int = torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"]
    return steps


@pytest.mark.usefixtures("_job")
def test_a_signal_in_the_middle_of_a_step_waits_for_its_end(fit: Callable[..., Trainer], tmp_path: Path) -> None:
    fit(on_before_backward=during(1))
    assert steps_in_checkpoint(tmp_path) == 2


@pytest.mark.usefixtures("_job")
def test_a_signal_during_validation_waits_for_the_next_step(fit: Callable[..., Trainer], tmp_path: Path) -> None:
    fit(on_validation_start=during(1))
    assert steps_in_checkpoint(tmp_path) == 2


@pytest.mark.usefixtures("_job")
def test_a_handler_of_the_users_own_acts_at_once(fit: Callable[..., Trainer], tmp_path: Path) -> None:
    received: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    seen_in_step: list[int] = []
    fit(on_before_backward=during(1), on_after_backward=lambda *_: seen_in_step.append(len(received)))
    assert seen_in_step == [0, 1, 1, 1]
    assert not list(tmp_path.glob("hpc_ckpt*"))


@pytest.mark.usefixtures("_job")
@pytest.mark.parametrize("auto_requeue", [True, False])
def test_signals_are_deferred_where_slurm_requeues(fit: Callable[..., Trainer], auto_requeue: bool) -> None:
    seen: list[bool] = []

    def look(trainer: Trainer, *_: Any) -> None:
        seen.append(any(isinstance(callback, DeferredSignals) for callback in trainer.callbacks))

    fit(auto_requeue, on_train_batch_start=look)
    assert set(seen) == {auto_requeue}


@pytest.mark.usefixtures("_job")
def test_callbacks_and_handlers_are_given_back(fit: Callable[..., Trainer]) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    trainer = fit()
    assert not any(isinstance(callback, DeferredSignals) for callback in trainer.callbacks)
    assert {number: signal.getsignal(number) for number in before} == before


def test_whole_steps_are_told_from_parts_of_one(make_trainer: Callable[..., Trainer]) -> None:
    """A job that SLURM requeues would else resume without the gradients of a part of a step."""
    seen: list[bool] = []
    watch = Call(on_train_batch_end=lambda trainer, *_: seen.append(is_accumulating(trainer)))
    trainer = make_trainer(callbacks=[watch], accumulate_grad_batches=3, limit_train_batches=4)
    trainer.fit(Supervised(cnn()), images())
    assert seen == [True, True, False, False]
