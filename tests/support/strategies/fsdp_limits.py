"""Where accel_fsdp begins from nothing, leaves blocks alone, or refuses, on two CPU processes."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_accel import AccelFSDPStrategy
from support.lightning_models import Supervised, Transformer, tokens, vectors
from support.strategies.fsdp_scenarios import Positioned, sharded
from support.strategies.scenarios import fit, is_rank_1, scenario, transformer, whole_weights


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
def tensor_parallelism_of_nobody() -> Any:
    return sharded(transformer(), strategy=AccelFSDPStrategy(tensor_parallel_size=2))


@scenario
def a_hook_on_a_gradient() -> Any:
    module = transformer()
    module.net.head.weight.register_hook(lambda gradient: gradient / 2)  # type: ignore[union-attr]
    return sharded(module)


@scenario
def two_dtypes_in_a_block() -> Any:
    module = transformer()
    module.net.blocks[1].norm1.double()  # type: ignore[index, union-attr]
    return sharded(module)


@scenario
def a_sparse_gradient() -> Any:
    return sharded(Extra(nn.Embedding(4, 4, sparse=True)))


class Dropping(Transformer):
    """Drops another block on each rank."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if number != is_rank_1():
                x = block(x)
        return self.head(x)


@scenario
def ranks_that_run_other_blocks() -> Any:
    seed_everything(0, verbose=False)
    return sharded(Supervised(Dropping(dropout=0.0)))


class Penalized(Supervised):
    """A penalty on the gradients of what its blocks compute from."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].requires_grad_()
        out = self(inputs)
        (gradient,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        return out.square().mean() + gradient.square().mean()


@scenario
def a_gradient_penalty() -> Any:
    seed_everything(0, verbose=False)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
    return sharded(Penalized(nn.Sequential(*blocks)), data=vectors(8))


@scenario
def an_optimizer_that_shards_do_not_suit() -> Any:
    return sharded(Supervised(Transformer(dropout=0.0), torch.optim.Adafactor))


@scenario
def another_precision_than_before() -> Any:
    seed_everything(0, verbose=False)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
    module = Supervised(nn.Sequential(*blocks, nn.Linear(8, 4)))
    sharded(module, data=vectors(8), plugin={"precision": "bf16-mixed"})
    return sharded(module, data=vectors(8), plugin={"precision": "32-true"})


@scenario
def accel_ddp_after_accel_fsdp() -> Any:
    module = transformer()
    sharded(module)
    return fit(module, tokens(8), "accel_ddp")


def shards_of(module: LightningModule) -> str:
    trainer = fit(module, tokens(8), AccelFSDPStrategy(save_distributed_checkpoint=True))
    path: str = trainer.strategy.broadcast(f"{tempfile.mkdtemp()}/shards.ckpt")
    trainer.save_checkpoint(path)
    return path


def resume(module: LightningModule, strategy: str, path: str) -> None:
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        max_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(module, tokens(8), ckpt_path=path)


def other_transformer() -> Supervised:
    seed_everything(0, verbose=False)
    return Supervised(Transformer(dim=32, blocks=2, dropout=0.0))


@scenario
def shards_for_accel_ddp() -> Any:
    resume(transformer(), "accel_ddp", shards_of(transformer()))


@scenario
def shards_of_another_model() -> Any:
    resume(other_transformer(), "accel_fsdp", shards_of(transformer()))


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
    trainer = fit(transformer(), tokens(8), "accel_fsdp")
    path = trainer.strategy.broadcast(f"{tempfile.mkdtemp()}/other.ckpt")
    trainer.save_checkpoint(path)
    resume(other_transformer(), "accel_fsdp", path)
