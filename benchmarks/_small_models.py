"""Small models of nine kinds for :mod:`never_slower`, :mod:`tuning` and others, and how one is trained in turns.

All learn from what is on every machine: scikit-learn's digits and the text of Python's standard library. The first two
are the demo's, as it sizes them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from _networks import UNet
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.tuning.tuning_result import Tuning

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from _turns import Job
from bytes_gpt import BytesGPT, StdlibText
from digits import Digits, DigitsNet

Task = tuple[LightningModule, Any]  # the module, and its training data


class Supervised(LightningModule):
    """``net`` on pairs of inputs and labels, with AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs).float(), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class LanguageLSTM(nn.Module):
    """(B, T) bytes → (B, 256, T) logits of the bytes that follow."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states).transpose(1, 2)


class BertLogits(nn.Module):
    """transformers' BERT with a classifier: (B, T) bytes → (B, 2)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=256,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=64,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bert(input_ids=tokens).logits


class VitLogits(nn.Module):
    """transformers' ViT with a classifier: (B, 1, 32, 32) → (B, 10), as 64 patches."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            image_size=32,
            patch_size=4,
            num_channels=1,
            num_labels=10,
            hidden_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=384,
        )
        self.vit = ViTForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        return self.vit(pixel_values=images).logits


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    """(1797, 1, 8, 8) float32 between 0 and 1, (1797,) int64."""
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(found.target)


@functools.cache
def _windows(seq_len: int) -> tuple[Tensor, Tensor]:
    """Stretches of text and the bytes that follow, both (N, seq_len) int64."""
    text = StdlibText(seq_len=seq_len)
    text.setup("fit")
    count = min(4096, len(text.train_set))
    tokens, following = zip(*(text.train_set[index] for index in range(count)), strict=True)
    return torch.stack(tokens), torch.stack(following)


def _pairs(batch_size: int, *tensors: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, drop_last=True, shuffle=True)


def cnn() -> Task:
    return DigitsNet(), Digits(size=40, batch_size=32)


def small_cnn() -> Task:
    return DigitsNet(width=16), Digits(size=20, batch_size=16)


def demo_gpt() -> Task:
    return BytesGPT(seq_len=512), StdlibText(seq_len=512, batch_size=4)


def small_gpt() -> Task:
    return BytesGPT(dim=96, depth=2, num_heads=4, seq_len=256), StdlibText(seq_len=256, batch_size=4)


def gpt_1024() -> Task:
    return BytesGPT(dim=64, depth=2, num_heads=2, seq_len=1024), StdlibText(seq_len=1024, batch_size=1)


def vit() -> Task:
    images, labels = _digits()
    return Supervised(VitLogits()), _pairs(16, F.interpolate(images, size=32, mode="bilinear"), labels)


def bert() -> Task:
    tokens, _ = _windows(64)
    return Supervised(BertLogits()), _pairs(8, tokens, (tokens == ord("(")).any(1).long())


def mlp(batch_size: int = 64, width: int = 512) -> Task:
    images, labels = _digits()
    drops = (nn.Dropout(0.1), nn.Dropout(0.1))
    net = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), drops[0], nn.Linear(width, width), nn.ReLU(), drops[1]),
        nn.Linear(width, 10),
    )
    return Supervised(net), _pairs(batch_size, images, labels)


def lstm(batch_size: int = 16, seq_len: int = 32, width: int = 128) -> Task:
    return Supervised(LanguageLSTM(width)), _pairs(batch_size, *_windows(seq_len))


def unet() -> Task:
    images, _ = _digits()
    large = F.interpolate(images[:256], size=64, mode="bilinear")
    noisy = large + 0.3 * torch.randn(large.shape, generator=torch.Generator().manual_seed(0))
    return Supervised(UNet(width=16, levels=2)), _pairs(4, noisy, (large[:, 0] > 0.5).long())


@dataclass(frozen=True, kw_only=True)
class Small:
    """A model, and how many steps make a turn of one to three seconds on two slow cores."""

    title: str
    task: Callable[[], Task]
    steps: int


MODELS = {
    "cnn": Small(title="the demo's residual CNN, 40x40 digits", task=cnn, steps=10),
    "small_cnn": Small(title="a residual CNN, 16 digits of 20x20", task=small_cnn, steps=100),
    "demo_gpt": Small(title="the demo's GPT, 4 x 512 bytes", task=demo_gpt, steps=4),
    "small_gpt": Small(title="a GPT, 4 x 256 bytes, two blocks of 96", task=small_gpt, steps=30),
    "gpt_1024": Small(title="a GPT, 1 x 1,024 bytes, two blocks of 64", task=gpt_1024, steps=15),
    "vit": Small(title="transformers' ViT, 16 digits of 32x32, three blocks of 96", task=vit, steps=15),
    "bert": Small(title="transformers' BERT, 8 x 64 bytes, two blocks of 128", task=bert, steps=60),
    "mlp": Small(title="an MLP with dropout, 64 digits", task=mlp, steps=300),
    "lstm": Small(title="an LSTM, 16 x 32 bytes", task=lstm, steps=60),
    "unet": Small(title="a U-Net, 4 digits of 64x64", task=unet, steps=15),
}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the steps of a turn measured.

    Attributes:
        step_ms: The median from the start of one training step to the start of the next.
        peak_mib: The most that the process held in memory in the turn.
        resident_mib: What it holds after the last step.
        faults: The median number of minor page faults of a step.
        is_settled: Whether live trials, where there are some, have come to an end.
    """

    step_ms: float
    peak_mib: float
    resident_mib: float
    faults: float
    is_settled: bool


class Turns(Callback):
    """Trains for ``steps`` steps when told to, and tells what they measured. Neither side carries anything else."""

    def __init__(self, pipe: Connection, steps: int) -> None:
        self._pipe, self._steps = pipe, steps
        self._memory = PeakMemory(torch.device("cpu"))
        self._starts: list[float] = []
        self._faults: list[int] = []

    def on_train_start(self, *args: Any) -> None:
        self._wait(None)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._starts.append(time.perf_counter())
        self._faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        if len(self._starts) > self._steps:
            plugin = trainer.precision_plugin
            tuning = plugin.tuning if isinstance(plugin, AccelPlugin) else Tuning(is_settled=True)
            self._wait(self._measured(tuning is not None and tuning.is_settled))

    def _measured(self, is_settled: bool) -> Turn:
        def median(found: list[Any]) -> float:
            return statistics.median(after - before for before, after in itertools.pairwise(found))

        return Turn(
            step_ms=1e3 * median(self._starts),
            peak_mib=self._memory.peak_bytes() / 2**20,
            resident_mib=psutil.Process().memory_info().rss / 2**20,
            faults=median(self._faults),
            is_settled=is_settled,
        )

    def _wait(self, told: Turn | None) -> None:
        self._pipe.send(told)
        self._pipe.recv()
        self._memory.restart()
        self._starts.clear()
        self._faults.clear()


def train(job: Job, pipe: Connection) -> None:
    """``MODELS[job.name]`` in turns, with or without the one line; until its process is ended."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")
    seed_everything(0, verbose=False)
    small = MODELS[job.name]
    module, data = small.task()
    trainer = Trainer(
        plugins=[] if job.mode == "plain" else [AccelPlugin()],
        max_epochs=10_000,  # until it is ended; the schedule of one model asks for a number
        accelerator=job.accelerator,
        callbacks=[Turns(pipe, small.steps)],
        limit_val_batches=0,
        default_root_dir=job.folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
