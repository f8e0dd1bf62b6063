"""What :mod:`rivals` trains: six models, each in a size for two slow cores and in one for a large GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _rivals_models import GPT, Batch, Encoder, LanguageLSTM, ResidualCNN, brackets, images, masks, mlp, texts, unet
from torch import Tensor, nn
from torch.nn import functional as F


def of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss where classes are in the second place: (B, C, …)."""
    return F.cross_entropy(logits.float(), labels)


def of_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss where they are in the last one: (B, T, C)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of a model, of its batches, and about how long a plain step takes on two slow cores or on a large GPU."""

    net: dict[str, Any]
    batch: dict[str, int]
    step_ms: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what it learns.

    Attributes:
        title: In the table.
        net: Makes the model.
        batches: Makes so many batches.
        loss: Of logits and labels.
        sizes: By the type of the device.
        needs: A package that it is from; empty if it needs none.
    """

    title: str
    net: Callable[..., nn.Module]
    batches: Callable[..., list[Batch]]
    loss: Callable[[Tensor, Tensor], Tensor]
    sizes: dict[str, Size]
    needs: str = ""

    def built(self, device: str, count: int) -> tuple[nn.Module, list[Batch]]:
        """The model with its first weights, and so many batches."""
        torch.manual_seed(0)
        size = self.sizes[device]
        return self.net(**size.net), self.batches(count, **size.batch)


def _sizes(cpu: Size, cuda: Size) -> dict[str, Size]:
    return {"cpu": cpu, "cuda": cuda}


CASES = {
    "gpt": Case(
        title="a GPT with attention written by hand",
        net=GPT,
        batches=texts,
        loss=of_tokens,
        sizes=_sizes(
            Size(
                net={"dim": 96, "depth": 2, "num_heads": 4, "seq_len": 256},
                batch={"batch": 2, "seq_len": 256},
                step_ms=18,
            ),
            Size(
                net={"dim": 768, "depth": 6, "num_heads": 12, "seq_len": 512},
                batch={"batch": 16, "seq_len": 512},
                step_ms=60,
            ),
        ),
    ),
    "cnn": Case(
        title="a residual CNN",
        net=ResidualCNN,
        batches=images,
        loss=of_classes,
        sizes=_sizes(
            Size(net={"width": 16, "stages": 2}, batch={"batch": 16, "size": 24}, step_ms=18),
            Size(net={"width": 64, "stages": 4}, batch={"batch": 128, "size": 64}, step_ms=40),
        ),
    ),
    "encoder": Case(
        title="transformers' BERT",
        net=Encoder,
        batches=brackets,
        loss=of_classes,
        needs="transformers",
        sizes=_sizes(
            Size(
                net={"dim": 128, "depth": 2, "num_heads": 4, "seq_len": 64},
                batch={"batch": 8, "seq_len": 64},
                step_ms=15,
            ),
            Size(
                net={"dim": 768, "depth": 6, "num_heads": 12, "seq_len": 128},
                batch={"batch": 64, "seq_len": 128},
                step_ms=50,
            ),
        ),
    ),
    "unet": Case(
        title="a U-Net",
        net=unet,
        batches=masks,
        loss=of_classes,
        sizes=_sizes(
            Size(net={"width": 8, "levels": 2}, batch={"batch": 4, "size": 64}, step_ms=18),
            Size(net={"width": 32, "levels": 4}, batch={"batch": 16, "size": 256}, step_ms=60),
        ),
    ),
    "mlp": Case(
        title="an MLP",
        net=mlp,
        batches=images,
        loss=of_classes,
        sizes=_sizes(
            Size(net={"width": 1024}, batch={"batch": 128, "size": 16}, step_ms=10),
            Size(net={"width": 4096}, batch={"batch": 4096, "size": 16}, step_ms=10),
        ),
    ),
    "lstm": Case(
        title="an LSTM",
        net=LanguageLSTM,
        batches=texts,
        loss=of_tokens,
        sizes=_sizes(
            Size(net={"width": 128}, batch={"batch": 32, "seq_len": 32}, step_ms=15),
            Size(net={"width": 1024}, batch={"batch": 64, "seq_len": 128}, step_ms=40),
        ),
    ),
}
