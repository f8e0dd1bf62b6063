"""A byte-level GPT on the source text of Python's standard library, as one would write it without lightning-accel.

    python examples/bytes_gpt.py            # accelerated
    python examples/bytes_gpt.py --plain    # the same run without the one line

The text is on every machine that has Python: a few megabytes of it, read where the interpreter keeps it. Attention is
written by hand, as in most tutorials. It runs unchanged on a GPU.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_accel import AccelPlugin


class CausalSelfAttention(nn.Module):
    """Softmax attention over what came before, in plain matrix products."""

    def __init__(self, dim: int, num_heads: int, seq_len: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.register_buffer("causal", torch.tril(torch.ones(seq_len, seq_len, dtype=torch.bool)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~self.causal[:T, :T], float("-inf"))
        weights = self.attn_dropout(F.softmax(scores, dim=-1))
        return self.resid_dropout(self.proj((weights @ v).transpose(1, 2).reshape(B, T, C)))


class Block(nn.Module):
    """Attention, then a two-layer network at every position, each added to what it read."""

    def __init__(self, dim: int, num_heads: int, seq_len: int, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.attn = CausalSelfAttention(dim, num_heads, seq_len, dropout)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class BytesGPT(LightningModule):
    """Predicts the next byte; 3.3 million parameters with the defaults.

    Args:
        dim: Width of the residual stream.
        depth: Number of blocks.
        num_heads: Attention heads in a block.
        seq_len: Longest context in bytes.
        dropout: Share of activations dropped while training; none, as a run that sees its text once needs none.
        lr: Learning rate after the warm-up.
    """

    def __init__(
        self,
        dim: int = 256,
        depth: int = 4,
        num_heads: int = 8,
        seq_len: int = 256,
        dropout: float = 0.0,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(256, dim)
        self.positions = nn.Embedding(seq_len, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(dim, num_heads, seq_len, dropout) for _ in range(depth)])
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of ``seq_len`` bytes that do not overlap, each with the bytes that follow its own."""

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text = text
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.seq_len : (index + 1) * self.seq_len + 1].long()
        return window[:-1], window[1:]


class StdlibText(LightningDataModule):
    """The modules at the top of Python's standard library, in alphabetical order; the last tenth is held out.

    Args:
        batch_size: Windows a step.
        seq_len: Bytes a window.
        seed: Decides the order of the batches.
    """

    def __init__(self, batch_size: int = 8, seq_len: int = 256, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        split = len(data) * 9 // 10
        self.train_set = ByteWindows(data[:split], self.seq_len)
        self.val_set = ByteWindows(data[split:], self.seq_len)

    def train_dataloader(self) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True, generator=order)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, batch_size=self.batch_size)


def train(
    *,
    plain: bool = False,
    epochs: int = 3,
    batch_size: int = 8,
    seq_len: int = 256,
    depth: int = 4,
    **trainer_options: Any,
) -> Trainer:
    """Trains, and returns the Trainer; ``trainer_options`` go to it as they are."""
    seed_everything(0)
    model = BytesGPT(seq_len=seq_len, depth=depth)
    data = StdlibText(batch_size=batch_size, seq_len=seq_len)
    plugins = [] if plain else [AccelPlugin()]  # the one line
    # A pass over all of the text takes minutes on a CPU: an epoch is a short random part of it.
    options: dict[str, Any] = {"limit_train_batches": 50, "limit_val_batches": 10, **trainer_options}
    trainer = Trainer(plugins=plugins, max_epochs=epochs, log_every_n_steps=5, gradient_clip_val=1.0, **options)
    trainer.fit(model, datamodule=data)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's standard library.")
    parser.add_argument("--plain", action="store_true", help="train without lightning-accel")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of 50 batches")
    parser.add_argument("--max-steps", type=int, default=-1, help="stop after so many steps; -1: after the epochs")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accelerator", default="auto", help="as in Lightning's Trainer: cpu, gpu, auto, …")
    args = parser.parse_args()
    trainer = train(
        plain=args.plain,
        epochs=args.epochs,
        batch_size=args.batch_size,
        max_steps=args.max_steps,
        accelerator=args.accelerator,
        devices=1,
    )
    for name, value in trainer.callback_metrics.items():
        print(f"{name} {value:.4f}")


if __name__ == "__main__":
    main()
