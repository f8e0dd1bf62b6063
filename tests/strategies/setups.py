"""What the strategies make of models, on two CPU processes; each rank writes what a scenario returns.

Run by a test in a process of its own: python setups.py FOLDER
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.host import Host
from lightning_accel.memory.offload import Offloader
from lightning_accel.strategies import AccelDDPStrategy, AccelFSDPStrategy
from lightning_models import Supervised, Transformer, cnn, images, tokens, vectors
from strategies.forks import in_ranks

SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(work: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[work.__name__] = work
    return work


def fit(module: LightningModule, data: Any, strategy: Any, *callbacks: Callback, **options: Any) -> Trainer:
    settings = {"precision": "32-true", "flash_attention": "off", "log": False, **options.pop("plugin", {})}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given: dict[str, Any] = {"max_steps": 3, "plugins": [AccelPlugin(**settings)], **options}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=list(callbacks),
        enable_model_summary=False,
        **quiet,
        **given,
    )
    trainer.fit(module, data)
    return trainer


def transformer() -> Supervised:
    seed_everything(0, verbose=False)
    return Supervised(Transformer(dropout=0.0))


def whole_weights(module: nn.Module) -> Tensor:
    values = (v.full_tensor() if isinstance(v, DTensor) else v for v in module.state_dict().values())
    return torch.cat([value.detach().flatten().float() for value in values])


# -- accel_ddp ---------------------------------------------------------------------------------------------------------


class Wrappers(Callback):
    """How the model is wrapped at the end of every step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        model: Any = trainer.strategy.model
        graph = "static" if getattr(model, "static_graph", False) else "searched"
        graph = (
            graph if getattr(model, "static_graph", False) or getattr(model, "find_unused_parameters", False) else ""
        )
        self.seen.append(f"{type(model).__name__} {graph}".strip())


class Wayward(Supervised):
    """Uses its spare layer in the steps, and on the ranks, that it is told."""

    def __init__(self, uses: Callable[[int, int], bool]) -> None:
        seed_everything(0, verbose=False)
        super().__init__(Transformer(dropout=0.0))
        self.spare = nn.Linear(16, 16)
        self.uses = uses

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return (
            loss + self.spare.weight.sum() * 1e-3 + self.spare.bias.sum()
            if self.uses(batch_idx, self.global_rank)
            else loss
        )


def wrapped(module: LightningModule, strategy: Any = "accel_ddp", **options: Any) -> dict[str, Any]:
    wrappers = Wrappers()
    fit(module, tokens(8), strategy, wrappers, **options)
    return {"wrappers": wrappers.seen, "weights": whole_weights(module)}


@scenario
def every_parameter_is_used() -> Any:
    return wrapped(transformer())


@scenario
def every_parameter_is_used_and_gradients_accumulate() -> Any:
    return wrapped(transformer(), max_steps=2, accumulate_grad_batches=2)


@scenario
def a_parameter_is_unused() -> Any:
    return wrapped(Wayward(lambda step, rank: False))


@scenario
def a_parameter_is_unused_on_rank_1() -> Any:
    return wrapped(Wayward(lambda step, rank: rank == 0))


@scenario
def a_parameter_is_unused_in_the_second_step() -> Any:
    return wrapped(Wayward(lambda step, rank: step != 1), max_steps=4)


@scenario
def a_parameter_is_unused_in_the_third_step() -> Any:
    return wrapped(Wayward(lambda step, rank: step < 2))


@scenario
def a_parameter_is_unused_now_and_then_and_it_was_said() -> Any:
    return wrapped(Wayward(lambda step, rank: step < 2), AccelDDPStrategy(find_unused_parameters=True))


@scenario
def a_static_graph_was_said() -> Any:
    return wrapped(transformer(), AccelDDPStrategy(static_graph=True))


@scenario
def gradients_travel_in_bfloat16() -> Any:
    return wrapped(transformer(), AccelDDPStrategy(gradient_compression="bf16"))


@scenario
def gradients_travel_in_float16() -> Any:
    return wrapped(transformer(), AccelDDPStrategy(gradient_compression="fp16"))


# -- accel_fsdp --------------------------------------------------------------------------------------------------------


class Dtypes(Callback):
    """The dtypes in which a layer's weight is computed with, kept, and stepped by."""

    def __init__(self, layer: str) -> None:
        self.layer, self.gathered, self.kept, self.gradient = layer, "", "", ""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        layer = pl_module.get_submodule(self.layer)
        layer.register_forward_pre_hook(lambda layer, _: setattr(self, "gathered", str(layer.weight.dtype)))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        weight: Any = pl_module.get_submodule(self.layer).weight
        self.kept, self.gradient = str(weight.dtype), str(weight.grad.dtype)


def sharded(
    module: LightningModule, *callbacks: Callback, strategy: Any = None, data: Any = None, **options: Any
) -> Any:
    trainer = fit(module, data or tokens(8), strategy or AccelFSDPStrategy(), *callbacks, **options)
    assert isinstance(trainer.strategy, AccelFSDPStrategy)
    shards = {name: isinstance(p, DTensor) and tuple(p.to_local().shape) for name, p in module.named_parameters()}
    sharding = trainer.strategy.sharding
    return {
        "shards": shards,
        "sharding": sharding and dataclasses.asdict(sharding),
        "weights": whole_weights(module),
        "losses": getattr(module, "losses", []),
        "techniques": trainer.precision_plugin.report.to_dict()["techniques"],  # type: ignore[attr-defined]
        "notes": trainer.precision_plugin.report.notes,  # type: ignore[attr-defined]
    }


@scenario
def blocks_are_sharded() -> Any:
    return sharded(transformer())


@scenario
def named_blocks_are_sharded() -> Any:
    return sharded(transformer(), strategy=AccelFSDPStrategy(blocks=["net.blocks.1", "Embedding"]))


@scenario
def bfloat16() -> Any:
    seed_everything(0, verbose=False)
    dtypes = Dtypes("net.1.0")
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
    net = nn.Sequential(nn.Embedding(11, 16), *blocks, nn.Linear(16, 11))
    said = sharded(Supervised(net), dtypes, plugin={"precision": "bf16-mixed"})
    return said | {"gathered": dtypes.gathered, "kept": dtypes.kept, "gradient": dtypes.gradient}


@scenario
def bfloat16_and_a_batch_norm() -> Any:
    seed_everything(0, verbose=False)
    dtypes = Dtypes("net.1")
    said = sharded(Supervised(cnn()), dtypes, data=images(8), plugin={"precision": "bf16-mixed"})
    return said | {"gathered": dtypes.gathered}


@scenario
def bfloat16_and_a_norm_of_float32_inputs() -> Any:
    seed_everything(0, verbose=False)
    blocks = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
    module = Supervised(nn.Sequential(*blocks, nn.Linear(8, 4)))
    return sharded(module, data=vectors(8), plugin={"precision": "bf16-mixed"})


class Positioned(nn.Module):
    """Adds a float32 buffer between layers, as models that are written for autocast do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 11)
        self.register_buffer("positions", torch.linspace(0, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x)) + self.positions)


@scenario
def bfloat16_and_a_float32_buffer() -> Any:
    seed_everything(0, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sharded(Supervised(Positioned()), plugin={"precision": "bf16-mixed"})


@scenario
def offloading_leaves_gathered_weights_alone() -> Any:
    parameters: list[str] = []
    pack = Offloader.pack

    def watched(mover: Any, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            parameters.append(str(tuple(tensor.shape)))
        return pack(mover, tensor)

    with mock.patch.object(Offloader, "pack", watched):
        said = sharded(transformer(), plugin={"activation_offloading": {"to": "host", "min_bytes": 1}})
    return said | {"offloaded_parameters": parameters}


@scenario
def checkpointed_and_compiled() -> Any:
    return sharded(transformer(), plugin={"gradient_checkpointing": "full", "compile": "on"})


@scenario
def techniques_that_cannot_be() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = sharded(transformer(), plugin={"gradient_checkpointing": {"budget": "1MiB"}, "memory_format": "auto"})
    return said | {"warnings": [str(warning.message) for warning in caught]}


class Samples(Callback):
    """Calls the module outside of its steps, as callbacks that draw samples do."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with torch.no_grad():
            self.shape = tuple(pl_module(torch.zeros(1, 4, dtype=torch.long)).shape)


@scenario
def the_module_is_called_between_epochs() -> Any:
    samples = Samples()
    return sharded(transformer(), samples, max_epochs=2, max_steps=-1) | {"shape": samples.shape}


class Sharding(Supervised):
    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        for block in self.net.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


@scenario
def configure_model_shards_by_itself() -> Any:
    seed_everything(0, verbose=False)
    return sharded(Sharding(Transformer(dropout=0.0)))


@scenario
def lightning_s_own_strategy_and_configure_model() -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    seed_everything(0, verbose=False)
    module = Sharding(Transformer(dropout=0.0))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = fit(module, tokens(8), strategy, plugin={"gradient_checkpointing": "full", "compile": "on"})
    techniques = trainer.precision_plugin.report.to_dict()["techniques"]  # type: ignore[attr-defined]
    return {"losses": module.losses, "techniques": techniques}


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


@scenario
def a_scalar_parameter() -> Any:
    return sharded(Extra(nn.Parameter(torch.ones(()))))


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


# -- all strategies ----------------------------------------------------------------------------------------------------


@scenario
def more_processes_than_samples() -> Any:
    one = TensorDataset(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    return fit(transformer(), DataLoader(one), "accel_ddp")


@scenario
def different_types_of_devices() -> Any:
    """Rank 1 simulates a GPU."""
    return simulated({"kind": "cuda"} if is_rank_1() else {})


@scenario
def different_precisions() -> Any:
    """Rank 1 simulates a CPU without bfloat16."""
    return simulated({"native_bf16": not is_rank_1()}, plugin={"precision": "auto"})


def simulated(changes: dict[str, Any], **options: Any) -> Any:
    """A fit on a host that says of itself what it is not."""
    detect = Host.detect
    with mock.patch.object(Host, "detect", lambda device=None: dataclasses.replace(detect(device), **changes)):
        return fit(transformer(), tokens(8), "accel_ddp", **options)


def is_rank_1() -> bool:
    return os.environ["RANK"] == "1"


class Stubborn(nn.ReLU):
    """Cannot be set in place on rank 1."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "inplace" and value and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise RuntimeError("not on this machine")
        super().__setattr__(name, value)


@scenario
def a_rank_that_cannot_follow() -> Any:
    seed_everything(0, verbose=False)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Stubborn(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    return fit(Supervised(net), images(8), "accel_ddp", plugin={"memory_format": "preserve"})


def main(folder: Path, names: list[str]) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    in_ranks(lambda rank: run(names or list(SCENARIOS), folder), world_size=2, patience_s=200)


def run(names: list[str], folder: Path) -> None:
    """One after another in the same processes: what fails on every rank alike leaves them able to go on."""
    for name in names:
        said: Any
        try:
            said = SCENARIOS[name]()
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        torch.save(said, folder / f"{name}.{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
