"""The LightningModules that several processes must train as one process does."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from support.lightning_models import Supervised

VOCABULARY, DIM = 11, 16


def adamw(parameters: Any, lr: float = 3e-3) -> torch.optim.AdamW:
    # Adam divides a gradient by its own size: with torch's eps, one that is all rounding error makes a full step.
    return torch.optim.AdamW(parameters, lr=lr, eps=1e-5)


class Learner(Supervised):
    """Its metrics are those of all ranks."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net, adamw)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


# -- a transformer whose head is its embedding -------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        # Without biases: a softmax does not see that of the keys, whose gradient is therefore all rounding error.
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.Sequential(*(Block(DIM) for _ in range(3)))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


class Scheduled(Learner):
    @override
    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), "interval": "step"},
        }


class Frozen(Learner):
    """Fine-tunes: the embedding, which is also the head, and the first block stay as they are."""

    def __init__(self, net: TiedTransformer) -> None:
        super().__init__(net)
        net.embedding.requires_grad_(False)
        net.blocks[0].requires_grad_(False)


class Grouped(Learner):
    """Two parameter groups, vectors without decay, and one frozen bias."""

    def __init__(self, net: TiedTransformer) -> None:
        super().__init__(net)
        net.norm.bias.requires_grad_(False)

    @override
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        vectors = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-3}
        return adamw([{"params": [p for p in trained if p.dim() > 1]}, vectors])


class Unfrozen(Learner):
    """Trains the first block from the second epoch on: after the first step has shown which parameters are trained."""

    @override
    def configure_callbacks(self) -> BaseFinetuning:
        return _UnfreezesFirstBlock()


class _UnfreezesFirstBlock(BaseFinetuning):
    @override
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks[0])

    @override
    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[0], optimizer, lr=1e-3)


class Unused(Learner):
    """A layer that no step calls."""

    def __init__(self, net: TiedTransformer) -> None:
        super().__init__(net)
        self.unused = nn.Linear(DIM, DIM)


class Sometimes(Learner):
    """A layer that only every other step calls: the first step does, and tells nothing of the second."""

    def __init__(self, net: TiedTransformer) -> None:
        super().__init__(net)
        self.extra = nn.Linear(VOCABULARY, VOCABULARY)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x) if batch_idx % 2 else self.extra(self(x))
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        self.losses.append(float(loss.detach()))
        return loss


class IsTheModel(Learner):
    """Holds its layers and a parameter itself, and uses the weight of one layer outside that layer."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(3))
        self.scale = nn.Parameter(torch.full((DIM,), 0.5))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(x * self.scale, self.embedding.weight)


class NeverCalled(IsTheModel):
    """Computes its loss without ``self(...)``: nothing that hooks onto ``forward`` sees its steps."""

    @override
    def loss(self, batch: Any) -> Tensor:
        tokens, y = batch
        return F.cross_entropy(self.forward(tokens).flatten(0, -2), y.flatten())


# -- a residual network with batch normalisation -----------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Classifier(Learner):
    def __init__(self) -> None:
        stem = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        super().__init__(nn.Sequential(*stem, *(Residual(8) for _ in range(3)), nn.Flatten(), nn.Linear(288, 4)))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
