"""What accel_fsdp makes of models, on two CPU processes."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_accel import AccelFSDPStrategy
from lightning_accel.memory.offload import Offloader
from lightning_accel.techniques import compiled_blocks
from support.lightning_models import Supervised, Transformer, cnn, images, tokens, vectors
from support.strategies.scenarios import fit, scenario, slow_scenario, transformer, whole_weights


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


@slow_scenario
def checkpointed_and_compiled() -> Any:
    return sharded(transformer(), plugin={"gradient_checkpointing": "full", "compile": "on"})


@scenario
def checkpointed_and_captured() -> Any:
    """As it is compiled, but for TorchInductor, which takes most of the time: the graphs run as they were captured."""

    def compile_call(module: nn.Module, *_: Any) -> None:
        call = torch.compile(lambda *args, **kwargs: module._call_impl(*args, **kwargs), backend="aot_eager")
        module._compiled_call_impl = call

    with mock.patch.object(compiled_blocks, "compile_call", compile_call):
        return checkpointed_and_compiled()


@scenario
def techniques_that_cannot_be() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = sharded(transformer(), plugin={"memory_budget": "1MiB", "memory_format": "auto"})
    return said | {"warnings": [str(warning.message) for warning in caught]}


class Remembered(Callback):
    """How many calls of blocks the strategy remembers at the end of a validation."""

    calls = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        order: Any = trainer.strategy._order  # type: ignore[attr-defined]
        self.calls = len(order._called)


@scenario
def an_evaluation_between_steps() -> Any:
    module, remembered = transformer(), Remembered()
    module.val_dataloader = lambda: tokens(8)  # type: ignore[method-assign]
    said = sharded(module, remembered, max_epochs=1, max_steps=-1)
    return said | {"calls": remembered.calls}


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


def under_lightning_s_own_strategy(**plugin: Any) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    seed_everything(0, verbose=False)
    module = Sharding(Transformer(dropout=0.0))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = fit(module, tokens(8), strategy, plugin={"gradient_checkpointing": "full", **plugin})
    techniques = trainer.precision_plugin.report.to_dict()["techniques"]  # type: ignore[attr-defined]
    return {"losses": module.losses, "techniques": techniques}


@scenario
def lightning_s_own_strategy_and_configure_model() -> Any:
    return under_lightning_s_own_strategy()


@slow_scenario
def lightning_s_own_strategy_and_compiled() -> Any:
    return under_lightning_s_own_strategy(compile="on")
