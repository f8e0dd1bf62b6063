"""A Gaussian head with a full covariance: how blood measurements, and the course of diabetes, hang together.

    python examples/gaussian_head.py             # under ten seconds on 2 cores
    python examples/gaussian_head.py --epochs 100 --accelerator cpu

From age, sex, body mass index and blood pressure of scikit-learn's 442 patients, a small network predicts the
distribution of seven numbers at once: six serum measurements and the progression of the disease a year later. It is
trained twice, with a covariance and with independent variances, and judged by the likelihood of patients it has not
seen. The densities are `lightning_accel.ops.gaussian`'s, checked against SciPy's at the end.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from scipy.stats import multivariate_normal
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.ops import gaussian

GIVEN, TARGETS = 4, 7
TRAINING_PATIENTS = 342


class GaussianHead(LightningModule):
    """A network that answers with a normal distribution.

    Args:
        full: Whether its features may be correlated; else, they are independent of each other.
        width: Of the hidden layer.
        lr: Learning rate.
    """

    def __init__(self, full: bool = True, width: int = 32, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("below", torch.tril_indices(TARGETS, TARGETS, offset=-1) if full else None)
        numbers = TARGETS * (TARGETS + 3) // 2 if full else 2 * TARGETS
        self.net = nn.Sequential(nn.Linear(GIVEN, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, numbers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Patients ``(N, 4)`` to means ``(N, 7)`` and covariances ``(N, 7, 7)``."""
        numbers = self.net(x).float()  # of 16 bits under autocast
        mean, scale, entries = numbers.tensor_split((TARGETS, 2 * TARGETS), dim=-1)
        factor = torch.diag_embed(F.softplus(scale) + 0.05)
        if self.below is not None:
            factor[:, self.below[0], self.below[1]] = entries
        # L Lᵀ by hand: as a matrix product, autocast would round it to 16 bits.
        return mean, (factor[:, :, None, :] * factor[:, None, :, :]).sum(-1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = -gaussian.log_prob(y, *self(x)).mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val/nll", -gaussian.log_prob(y, *self(x)).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)


def patients(seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """To train on, and held out: what is given and what is asked for, in standard deviations from the mean."""
    found = load_diabetes(scaled=False)
    numbers = torch.tensor(np.column_stack([found.data, found.target]), dtype=torch.float32)
    numbers = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))]
    std, mean = torch.std_mean(numbers[:TRAINING_PATIENTS], dim=0)
    given, targets = ((numbers - mean) / std).split((GIVEN, TARGETS), dim=1)
    training, held_out = slice(TRAINING_PATIENTS), slice(TRAINING_PATIENTS, None)
    return TensorDataset(given[training], targets[training]), TensorDataset(given[held_out], targets[held_out])


def train(
    *, full: bool = True, plain: bool = False, epochs: int = 25, seed: int = 0, **trainer_options: Any
) -> Trainer:
    """Trains, and returns the Trainer; ``trainer_options`` go to it as they are."""
    seed_everything(seed, verbose=False)
    training, held_out = patients(seed)
    plugins = [] if plain else [AccelPlugin(report=False)]  # the one line
    trainer = Trainer(
        plugins=plugins, max_epochs=epochs, check_val_every_n_epoch=epochs, log_every_n_steps=5, **trainer_options
    )
    order = torch.Generator().manual_seed(seed)
    trainer.fit(
        GaussianHead(full),
        DataLoader(training, batch_size=32, shuffle=True, generator=order),
        DataLoader(held_out, batch_size=len(held_out)),
    )
    return trainer


def difference_to_scipy(model: GaussianHead, data: TensorDataset) -> float:
    """The largest, of log-densities of the patients, to what SciPy computes in float64 of the same distributions."""
    x, y = data.tensors
    with torch.no_grad():
        mean, cov = model.cpu().eval()(x)
    ours = gaussian.log_prob(y, mean, cov).numpy()
    theirs = [multivariate_normal(*of).logpdf(at) for *of, at in zip(mean.double(), cov.double(), y, strict=True)]
    return float(np.abs(ours - theirs).max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Gaussian head, with and without covariance.")
    parser.add_argument("--plain", action="store_true", help="train without lightning-accel")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the order")
    parser.add_argument("--accelerator", default="auto", help="as in Lightning's Trainer: cpu, gpu, auto, …")
    args = parser.parse_args()
    for full in (True, False):
        trainer = train(
            full=full,
            plain=args.plain,
            epochs=args.epochs,
            seed=args.seed,
            accelerator=args.accelerator,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        name = "full covariance" if full else "independent variances"
        print(f"{name}: held-out negative log-likelihood {trainer.callback_metrics['val/nll']:.3f} nats a patient")
        off = difference_to_scipy(trainer.lightning_module, patients(args.seed)[1])
        print(f"    largest difference to SciPy's log-densities: {off:.1e}")


if __name__ == "__main__":
    main()
