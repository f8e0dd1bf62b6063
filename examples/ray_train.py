"""The digits of digits.py on workers that Ray Train starts, each with AccelPlugin.

    pip install 'ray[train]'
    python examples/ray_train.py --workers 2                       # on this machine
    python examples/ray_train.py --workers 8 --accelerator gpu     # on the cluster that RAY_ADDRESS names

What Ray asks of a Lightning script is its strategy, its environment and `prepare_trainer`. AccelPlugin is one plugin
more.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
from lightning.pytorch import Trainer, seed_everything
from ray.train import ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

from digits import Digits, DigitsNet
from lightning_accel import AccelPlugin


def train(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    seed_everything(0)
    model = DigitsNet(width=settings["width"])
    trainer = Trainer(
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment(), AccelPlugin()],  # the one line
        accelerator=settings["accelerator"],
        devices="auto",
        max_epochs=settings["epochs"],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(model, datamodule=Digits(size=settings["size"]))
    weights = sum(float(parameter.detach().abs().sum()) for parameter in model.parameters())
    # As one string: the workers print at the same time.
    print(
        f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps, weights {weights!r}\n",
        end="",
        flush=True,
    )
    ray.train.report({name: float(value) for name, value in trainer.callback_metrics.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a residual network on handwritten digits, under Ray Train.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "gpu"], help="gpu: one for each worker")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=int, default=32, help="channels of the network's first stage")
    parser.add_argument("--size", type=int, default=64, help="to which images are scaled up")
    args = parser.parse_args()
    workers = ScalingConfig(num_workers=args.workers, use_gpu=args.accelerator == "gpu")
    result = TorchTrainer(train, train_loop_config=vars(args), scaling_config=workers).fit()
    for name, value in (result.metrics or {}).items():
        print(f"{name} {value:.4f}")


if __name__ == "__main__":
    main()
