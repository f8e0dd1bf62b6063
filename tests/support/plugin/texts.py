"""A training on texts of many lengths, which remembers what its batches were."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.technique_table import off

NUM_TEXTS = 160


class Texts:
    """Texts of 1 to 80 tokens, in no order; all tokens of a text are its number."""

    def __len__(self) -> int:
        return NUM_TEXTS

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [index] * (index * 37 % 80 + 1)}


def collate(texts: list[Any]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(text["input_ids"]) for text in texts], batch_first=True)
    lengths = torch.tensor([len(text["input_ids"]) for text in texts])
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Texts(), collate_fn=collate, **{"batch_size": 4, "shuffle": True, **options})  # type: ignore[arg-type]


class Reader(LightningModule):
    """Remembers of each batch the numbers of its texts, and the length of the longest."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Embedding(NUM_TEXTS, 4)
        self.seen: list[tuple[list[int], int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        self.seen.append((ids[:, 0].tolist(), int(mask.sum(1).max())))
        loss: Tensor = (self.net(ids) * mask[..., None]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(module: Reader, loaders: Any, **options: Any) -> AccelPlugin:
    """Trains with batches grouped by length, all other techniques off."""
    seed_everything(1, verbose=False)
    padding = {"multiple": 8, "group_by_length": True}
    plugin = AccelPlugin.from_plan(
        Plan().replace(**off() | {"padding": padding, "trust": "checked", "report": False, **options.pop("plan", {})})
    )
    trainer = Trainer(
        plugins=[plugin],
        **{"max_epochs": 1, "accelerator": "cpu", **options},
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
    )
    trainer.fit(module, loaders)
    return plugin
