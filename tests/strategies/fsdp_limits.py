"""Where accel_fsdp begins from nothing, leaves blocks alone, or refuses, on two CPU processes."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from lightning_accel.strategies import AccelFSDPStrategy
from lightning_models import Supervised, Transformer, tokens
from strategies.fsdp_scenarios import Positioned, sharded
from strategies.scenarios import fit, is_rank_1, scenario, transformer, whole_weights


class Tied(Transformer):
    """GPT-2's way to start: every matrix from one normal distribution, the head the embedding."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.25)


@scenario
def made_on_the_meta_device() -> Any:
    torch.manual_seed(1 + is_rank_1())
    with torch.device("meta"):
        module = Supervised(Tied())
    said = sharded(module, max_steps=1, plugin={"gradient_checkpointing": "full"})
    net: Any = module.net
    return said | {
        "is_tied": net.head.weight is net.embedding.weight,
        "std": net.embedding.weight.full_tensor().std().item(),
        "norm": net.blocks[0].norm1.weight.full_tensor().tolist(),
    }


class Unnamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Extra(Supervised):
    def __init__(self, extra: nn.Module | nn.Parameter) -> None:
        seed_everything(0, verbose=False)
        super().__init__(Transformer(dropout=0.0))
        self.extra = extra


class Manual(Extra):
    def __init__(self, extra: nn.Module | nn.Parameter) -> None:
        super().__init__(extra)
        self.automatic_optimization = False


class Sharing(Transformer):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.blocks[2].mlp[0].weight = self.blocks[1].mlp[0].weight  # type: ignore[index, union-attr]


class Iterating(nn.Module):
    """Repeated blocks whose own forward nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            for layer in block:  # type: ignore[attr-defined]
                x = layer(x)
        return self.head(x)


@scenario
def a_block_shares_its_weight() -> Any:
    seed_everything(0, verbose=False)
    return sharded(Supervised(Sharing()))


@scenario
def nothing_is_repeated() -> Any:
    seed_everything(0, verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = sharded(Supervised(Positioned()))
    return said | {"warnings": [str(warning.message) for warning in caught]}


@scenario
def a_block_is_not_called() -> Any:
    return sharded(Supervised(Iterating()))


class Scaled(Extra):
    """Its outputs are scaled by a learned number, and by one in a block."""

    def __init__(self) -> None:
        super().__init__(nn.Parameter(torch.tensor(1.5)))
        self.net.blocks[0].gate = nn.Parameter(torch.tensor(0.5))  # type: ignore[index, union-attr]
        self.unused = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.extra * self.net.blocks[0].gate  # type: ignore[index, union-attr]


@scenario
def scalar_parameters() -> Any:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    alone = Scaled()
    fit(alone, tokens(8), "accel_ddp", **options)
    return sharded(Scaled(), **options) | {"weights of accel_ddp": whole_weights(alone)}


@scenario
def a_lazy_module() -> Any:
    return sharded(Extra(nn.LazyLinear(3)))


@scenario
def a_meta_module_without_a_start() -> Any:
    with torch.device("meta"):
        extra = Unnamed()
    return sharded(Extra(extra))


@scenario
def a_parameter_of_a_manual_module_itself() -> Any:
    return sharded(Manual(nn.Parameter(torch.ones(3))))


@scenario
def a_module_without_parameters() -> Any:
    class Empty(Supervised):
        def configure_optimizers(self) -> Any:
            return None

    return sharded(Empty(nn.Identity()))


@scenario
def a_block_that_does_not_exist() -> Any:
    return sharded(transformer(), strategy=AccelFSDPStrategy(blocks=["Blok"]))


@scenario
def a_checkpoint_of_another_model() -> Any:
    module = transformer()
    trainer = fit(module, tokens(8), "accel_fsdp")
    path = trainer.strategy.broadcast(f"{tempfile.mkdtemp()}/other.ckpt")
    trainer.save_checkpoint(path)
    seed_everything(0, verbose=False)
    other = Supervised(Transformer(dim=32, blocks=2, dropout=0.0))
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy="accel_fsdp",
        logger=False,
        enable_progress_bar=False,
        max_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(other, tokens(8), ckpt_path=path)
