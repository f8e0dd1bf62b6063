"""The byte-level GPT of bytes_gpt.py with its parameters, gradients and optimizer state sharded over processes.

    python examples/fsdp.py --accelerator cpu --devices 2           # Lightning starts the processes
    torchrun --nproc-per-node 8 examples/fsdp.py --devices 8        # torchrun does
    sbatch examples/fsdp.slurm                                      # SLURM does, on several nodes

The model is that of bytes_gpt.py as it stands. Every process prints what it holds at the end of the first step. With
--resume the run goes on from its last checkpoint, on the same number of processes or on another.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from bytes_gpt import BytesGPT, StdlibText
from lightning_accel import AccelPlugin  # the import makes the strategies known


class PrintHeld(Callback):
    """Prints, once, how many bytes of parameters, gradients and optimizer state each process holds."""

    def __init__(self) -> None:
        self.is_due = True

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if not (self.is_due and optimizer.state):
            return
        self.is_due = False
        parameters = list(pl_module.parameters())
        gradients = [parameter.grad for parameter in parameters]
        state = [value for values in optimizer.state.values() for value in values.values()]
        held, whole = (sum(size(t) for t in (*parameters, *gradients, *state)) for size in (_held, _whole))
        # As one string: the processes print at the same time.
        print(
            f"rank {trainer.global_rank} holds {held / 2**20:.1f} MiB of {whole / 2**20:.1f} MiB:"
            f" {held / whole:.0%} of parameters, gradients and optimizer state\n",
            end="",
            flush=True,
        )


def _held(tensor: Any) -> int:
    return _whole(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _whole(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0


def train(
    *,
    strategy: str = "accel_fsdp",
    batch_size: int = 8,
    folder: Path = Path("fsdp_run"),
    resume: bool = False,
    **options: Any,
) -> Trainer:
    """Trains, and returns the Trainer; ``options`` go to it as they are."""
    seed_everything(0)
    trainer = Trainer(
        strategy=strategy,
        callbacks=[PrintHeld(), ModelCheckpoint(folder / "checkpoints", save_last=True)],
        default_root_dir=folder,
        limit_train_batches=50,
        limit_val_batches=10,
        gradient_clip_val=1.0,
        **options,
    )
    ckpt_path = folder / "checkpoints" / "last.ckpt" if resume else None
    trainer.fit(BytesGPT(), datamodule=StdlibText(batch_size=batch_size), ckpt_path=ckpt_path, weights_only=False)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a sharded byte-level GPT on Python's standard library.")
    parser.add_argument("--strategy", default="accel_fsdp", help="accel_fsdp, accel_ddp, accel, or one of Lightning's")
    parser.add_argument("--accelerator", default="auto", help="as in Lightning's Trainer: cpu, gpu, auto, …")
    parser.add_argument("--devices", type=int, default=2, help="processes on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument(
        "--epochs", type=int, default=2, help="epochs of 50 batches; with --resume counted from the start"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="windows a step and process")
    parser.add_argument("--folder", type=Path, default=Path("fsdp_run"), help="where checkpoints and logs go")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --folder")
    args = parser.parse_args()
    trainer = train(
        strategy=args.strategy,
        batch_size=args.batch_size,
        folder=args.folder,
        resume=args.resume,
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.nodes,
        max_epochs=args.epochs,
    )
    if trainer.is_global_zero:
        if isinstance(trainer.precision_plugin, AccelPlugin):
            print(trainer.precision_plugin.report.summary())
        print(f"val/loss {trainer.callback_metrics['val/loss']:.4f}")


if __name__ == "__main__":
    main()
