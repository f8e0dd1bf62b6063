"""Launchers of others start two processes on this machine, which come to the same weights: make test-launchers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ("--epochs=1", "--width=4", "--size=16")
STEPS = 1797 * 4 // 5 // 64 // 2  # of an epoch of the digits, in each of two processes
RANK = re.compile(r"rank (\d) of 2: (\d+) steps, weights (\S+)")

pytestmark = pytest.mark.slow


def printed(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def has_slurm() -> bool:
    """Whether jobs can be handed in: there is an ``sbatch`` in many images, and no controller that it reaches."""
    return shutil.which("sbatch") is not None and subprocess.run(["sinfo"], capture_output=True).returncode == 0


def train_alike(said: str) -> bool:
    """Both ranks have taken the steps of one of two, and hold the same weights."""
    found = {rank: (int(steps), weights) for rank, steps, weights in RANK.findall(said)}
    return found.keys() == {"0", "1"} and len(set(found.values())) == 1 and found["0"][0] == STEPS


def test_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29611"]
    script = [EXAMPLES / "fsdp.py", "--accelerator=cpu", "--devices=2", "--epochs=1", "--batch-size=1"]
    said = printed(*torchrun, *script, f"--folder={tmp_path}", folder=tmp_path)
    for rank in (0, 1):
        assert f"rank {rank} holds 25.6 MiB of 51.2 MiB: 50%" in said


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_ray_train(tmp_path: Path) -> None:
    assert train_alike(printed(sys.executable, EXAMPLES / "ray_train.py", *SMALL, folder=tmp_path))


@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_submitit(tmp_path: Path, cluster: str) -> None:
    if cluster == "slurm" and not has_slurm():
        pytest.skip("there is no SLURM here")
    submit = [sys.executable, EXAMPLES / "submit.py", f"--cluster={cluster}", "--accelerator=cpu", *SMALL]
    assert train_alike(printed(*submit, folder=tmp_path))


def test_slurm(tmp_path: Path) -> None:
    """The job of examples/fsdp.slurm, on one node of two processors."""
    if not has_slurm():
        pytest.skip("there is no SLURM here")
    job = tmp_path / "job.slurm"
    asked = f"{sys.executable} {EXAMPLES / 'fsdp.py'} --accelerator cpu --devices 2 --epochs 1 --batch-size 1"
    job.write_text(
        textwrap.dedent(f"""\
            #!/bin/bash
            #SBATCH --nodes=1
            #SBATCH --ntasks-per-node=2
            #SBATCH --job-name=fsdp
            #SBATCH --output={tmp_path}/log
            srun {asked} --folder {tmp_path}/run
            """)
    )
    subprocess.run(["sbatch", "--wait", job], timeout=300, cwd=tmp_path)
    said = (tmp_path / "log").read_text()
    for rank in (0, 1):
        assert f"rank {rank} holds 25.6 MiB of 51.2 MiB: 50%" in said, said
