"""Run by test_optimizer_steps_ranks.py: two processes whose optimizers step in another way than the user's.

python optimizer_ranks.py FOLDER leaves FOLDER/<rank>.pt: what each scenario found on each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_accel import Plan, accelerate
from lightning_accel.core.host import Host
from support.optimizer_loops import alone, network, operations
from support.strategies.forks import in_ranks
from support.technique_table import off


def whole(model: nn.Module) -> list[Tensor]:
    """The weights, gathered from all ranks."""
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def trained(model: nn.Module, optimizer: Any, setting: str, rank: int) -> dict[str, Any]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    handle = alone(setting, inner, optimizer)
    launched: list[str] = []
    for index in range(4):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * index + rank), dtype=torch.float64)
        optimizer.zero_grad()
        with handle.step():
            loss = model(inputs).square().mean()
        loss.backward()
        launched = operations(optimizer)
    found = {
        "weights": whole(inner),
        "launched": launched,
        "arms": [arm.name for arm in handle.engine.arms()],
        "applied": handle.report.to_text(),
        "flags": {name: optimizer.state_dict()["param_groups"][0][name] for name in ("foreach", "fused")},
    }
    handle.undo()
    return found


def distributed(rank: int) -> dict[str, dict[str, Any]]:
    return {
        setting: trained(model, AdamW(model.parameters(), lr=0.01), setting, rank)
        for setting in ("off", "auto")
        for model in [DistributedDataParallel(network())]
    }


def sharded(rank: int) -> dict[str, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for setting in ("off", "fused", "foreach"):
        for make in (AdamW, SGD, Adagrad):
            model = network()
            for layer in (*(model[index] for index in (0, 2, 4)), model):
                fully_shard(layer, mesh=mesh)
            options: dict[str, Any] = {
                AdamW: {"amsgrad": True, "maximize": True},
                SGD: {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
                Adagrad: {},
            }[make]
            found[f"{make.__name__}, {setting}"] = trained(
                model, make(model.parameters(), lr=0.01, **options), setting, rank
            )
    return found


def half_sharded(rank: int) -> dict[str, dict[str, Any]]:
    """Only the first layer is sharded: a group of plain tensors and distributed ones."""
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for setting in ("off", "foreach"):
        model = network()
        fully_shard(model[0], mesh=mesh)
        found[setting] = trained(model, AdamW(model.parameters(), lr=0.01), setting, rank)
    return found


def products(rank: int) -> dict[str, dict[str, Any]]:
    """On a machine that multiplies in bfloat16, which is simulated where this one does not."""
    model = network(torch.float32)
    plan = Plan().replace(**off() | {"precision": "auto", "matmul_precision": "auto", "trust": "checked"})
    handle = accelerate(model, plan, host=Host(kind="cpu", device_name="a CPU with AMX", native_bf16=True))
    with handle.step():
        loss = model(torch.ones(4, 5)).float().sum()
    loss.backward()
    patches = handle.report.of("matmul_precision").changes
    found = {"auto": {"arms": [arm.name for arm in handle.engine.arms()], "changes": list(patches.values())}}
    handle.undo()
    return found


def run(rank: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    scenarios = {"distributed": distributed, "sharded": sharded, "half sharded": half_sharded, "products": products}
    torch.save({name: scenario(rank) for name, scenario in scenarios.items()}, Path(sys.argv[1]) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    in_ranks(run, 2, patience_s=120)
