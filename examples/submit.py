"""The digits of digits.py as a job that submitit hands to SLURM, or starts on this machine.

    pip install submitit
    python examples/submit.py --devices 8 --nodes 2                # sbatch, from Python
    python examples/submit.py --cluster local --accelerator cpu    # without SLURM, two processes

A task is a device: submitit starts as many processes on each node, and Lightning starts none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import submitit

EXAMPLES = Path(__file__).parent.resolve()


def train(accelerator: str, devices: int, nodes: int, epochs: int, width: int, size: int) -> str:
    """What each task runs; what it returns comes back to whoever handed the job in."""
    # Address, port and rank, which Lightning reads. Under SLURM it would find its own; what it finds is the same.
    submitit.helpers.TorchDistributedEnvironment().export()
    sys.path.insert(0, str(EXAMPLES))  # tasks have the function, not the folder of its script
    from lightning.pytorch import Trainer, seed_everything

    from digits import Digits, DigitsNet
    from lightning_accel import AccelPlugin

    seed_everything(0)
    model = DigitsNet(width=width)
    trainer = Trainer(
        strategy="accel_ddp",
        plugins=[AccelPlugin()],
        accelerator=accelerator,
        devices=devices,
        num_nodes=nodes,
        max_epochs=epochs,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(model, datamodule=Digits(size=size))
    weights = sum(float(parameter.detach().abs().sum()) for parameter in model.parameters())
    return f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps, weights {weights!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a residual network on handwritten digits, as a submitted job.")
    parser.add_argument(
        "--cluster", default=None, choices=["slurm", "local"], help="default: slurm, where there is one"
    )
    parser.add_argument("--accelerator", default="auto", help="as in Lightning's Trainer: cpu, gpu, auto, …")
    parser.add_argument("--devices", type=int, default=2, help="processes on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=int, default=32, help="channels of the network's first stage")
    parser.add_argument("--size", type=int, default=64, help="to which images are scaled up")
    parser.add_argument(
        "--folder", type=Path, default=Path("submitted"), help="where submitit keeps jobs and their logs"
    )
    args = parser.parse_args()
    executor = submitit.AutoExecutor(folder=args.folder, cluster=args.cluster)
    gpus = 0 if args.accelerator == "cpu" else args.devices
    executor.update_parameters(nodes=args.nodes, tasks_per_node=args.devices, gpus_per_node=gpus, timeout_min=60)
    job = executor.submit(train, args.accelerator, args.devices, args.nodes, args.epochs, args.width, args.size)
    print("\n".join(job.results()))


if __name__ == "__main__":
    main()
