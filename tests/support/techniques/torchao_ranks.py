"""Two processes under DistributedDataParallel train with float8 layers and moments in 8 bits; each writes what it got.

Run by a test in a process of its own: python torchao_ranks.py FOLDER
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_accel.core.host import Host
from lightning_accel.core.ranks import gather
from lightning_accel.engine import Engine
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.float8 import Float8
from lightning_accel.techniques.optimizer_8bit import Optimizer8bit, state_bytes
from support.strategies.forks import in_ranks

HOST = Host(kind="cuda", device_name="a card, simulated", capability=(9, 0))


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)  # so that no clock decides: emulated, nothing is faster
    found = {
        "plain": trained(rank, []),
        "both": trained(rank, [Float8("tensorwise", emulate=True), Optimizer8bit("off", None)]),  # type: ignore[arg-type]
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def trained(rank: int, techniques: list[Technique]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))
    engine = Engine(model, HOST, techniques, gather=gather)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine.add_optimizers([optimizer])
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(20):
        inputs = torch.randn(32, 32, generator=generator)
        with engine.step():
            loss = (wrapped(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    states = optimizer.state_dict()["state"].values()
    found = {
        "losses": losses,
        "weights": [float(parameter.double().sum()) for parameter in model.parameters()],
        "in float8": engine.report.applied("float8"),
        "bytes": state_bytes(optimizer),
        "saved": sorted({type(value).__name__ for state in states for value in state.values()}),
    }
    engine.undo()
    return found


if __name__ == "__main__":
    in_ranks(functools.partial(main, Path(sys.argv[1])), 2, patience_s=200)
