"""Batch norms on several CPU processes; each writes what it computed into ``<case>.<world_size>.<rank>.pt``.

Run by a test in a process of its own: python batch_norm_ranks.py FOLDER WORLD_SIZE [WORLD_SIZE ...]
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.strategies.sync_batch_norm import AnyDeviceSyncBatchNorm

BATCH_SIZE = 12  # of all ranks together
IMAGES = (3, 5, 4)


@dataclass
class Case:
    """One batch norm, trained for two steps.

    Attributes:
        layer: Makes it.
        shape: Of a sample.
        share: The part of the batch that rank 0 gets; the others have equal parts of the rest.
        change: What is done to the batch.
        run: How the layer is called.
    """

    layer: Callable[[], nn.Module]
    shape: tuple[int, ...] = IMAGES
    share: float | None = None
    dtype: torch.dtype = torch.float32
    change: Callable[[Tensor], Tensor] = field(default=lambda x: x)
    run: Callable[[nn.Module, Tensor], Tensor] = field(default=lambda layer, x: layer(x))


def in_bf16(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x.bfloat16()).float()


IMAGE_NORM = partial(nn.BatchNorm2d, 3)
CASES = {
    "(B, C)": Case(partial(nn.BatchNorm1d, 6), (6,)),
    "(B, C, T)": Case(partial(nn.BatchNorm1d, 3), (3, 7)),
    "(B, C, H, W)": Case(IMAGE_NORM),
    "(B, C, D, H, W)": Case(partial(nn.BatchNorm3d, 2), (2, 3, 2, 4)),
    "channels_last": Case(IMAGE_NORM, change=lambda x: x.contiguous(memory_format=torch.channels_last)),
    "uneven batches": Case(IMAGE_NORM, share=0.6),
    "an empty batch": Case(IMAGE_NORM, share=0.0),
    "a large mean": Case(IMAGE_NORM, change=lambda x: x + 100.0),
    "cumulative average": Case(partial(nn.BatchNorm2d, 3, momentum=None)),
    "no weight and bias": Case(partial(nn.BatchNorm2d, 3, affine=False)),
    "no running statistics": Case(partial(nn.BatchNorm2d, 3, track_running_stats=False)),
    "evaluation": Case(lambda: IMAGE_NORM().eval()),
    "torch's SyncBatchNorm": Case(partial(nn.SyncBatchNorm, 3)),
    "float64": Case(lambda: IMAGE_NORM().double(), dtype=torch.float64),
    "bf16 autocast": Case(IMAGE_NORM, run=in_bf16),
    "checkpointing": Case(IMAGE_NORM, run=partial(checkpoint, use_reentrant=False)),
    "reentrant checkpointing": Case(IMAGE_NORM, run=partial(checkpoint, use_reentrant=True)),
}


def batch_of(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """The global batch and the gradient of its output."""
    generator = torch.Generator().manual_seed(step)
    x, grad = torch.randn(2, BATCH_SIZE, *case.shape, generator=generator, dtype=torch.float64).unbind()
    return case.change((2 * x + 1).to(case.dtype)), grad.to(case.dtype)


def rows_of(case: Case, rank: int, world_size: int) -> slice:
    of_first = round(BATCH_SIZE * (1 / world_size if case.share is None else case.share))
    edges = [0, *(of_first + (BATCH_SIZE - of_first) * others // (world_size - 1) for others in range(world_size))]
    return slice(edges[rank], edges[rank + 1])


def train(case: Case, layer: nn.Module, rows: slice = slice(None)) -> dict[str, Any]:
    """What two steps on those rows of the batch give: outputs, gradients and the layer's state."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    outputs, grads = [], []
    for step in range(2):
        x, grad = (whole[rows] for whole in batch_of(case, step))
        x = x.clone().requires_grad_()
        output = case.run(layer, x)
        output.backward(grad)
        outputs.append(output.detach())
        grads.append(x.grad)
    parameters = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"outputs": outputs, "grads": grads, "parameters": parameters, "state": layer.state_dict()}


def single_value() -> str:
    """What is said when the ranks together have one value per channel; rank 0 has it."""
    layer = AnyDeviceSyncBatchNorm().apply(nn.BatchNorm1d(3))
    try:
        layer(torch.ones(1 if dist.get_rank() == 0 else 0, 3))
    except ValueError as error:
        return str(error)
    return "nothing"


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))
        self.layers: list[type[nn.Module]] = []

    def on_train_start(self) -> None:
        self.layers.append(type(self.net[1]))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(world_size: int, **options: Any) -> Classifier:
    """Trains on batches of 4 on two ranks, or of 8 on one, that hold the same samples."""
    images = torch.randn(16, *IMAGES, generator=torch.Generator().manual_seed(0))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Classifier()
    quiet |= {"enable_model_summary": False, "use_distributed_sampler": False}
    trainer = Trainer(accelerator="cpu", devices=world_size, max_epochs=2, **quiet, **options)
    own = TensorDataset(images[trainer.global_rank :: world_size])
    trainer.fit(module, DataLoader(own, batch_size=8 // world_size))
    return module


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "batch norm", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo", f"file://{folder}/store{world_size}", rank=rank, world_size=world_size)
    for name, case in CASES.items():
        said = train(case, AnyDeviceSyncBatchNorm().apply(case.layer()), rows_of(case, rank, world_size))
        torch.save(said, folder / f"{name}.{world_size}.{rank}.pt")
    torch.save(single_value(), folder / f"single value.{world_size}.{rank}.pt")
    compiled = torch.compile(AnyDeviceSyncBatchNorm().apply(IMAGE_NORM()), backend="eager")
    case = CASES["(B, C, H, W)"]
    said = train(case, compiled, rows_of(case, rank, world_size))
    torch.save(said["outputs"], folder / f"compiled.{world_size}.{rank}.pt")
    if world_size == 2:
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        module = fit(world_size, strategy="ddp", sync_batchnorm=True, plugins=[AnyDeviceSyncBatchNorm()])
        said = {"state": module.state_dict(), "during": str(module.layers), "after": repr(module)}
        torch.save(said, folder / f"fit.{world_size}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # torch and Lightning are imported once
    ranks = [
        fork.Process(target=main, args=(rank, world_size, Path(sys.argv[1])))
        for world_size in map(int, sys.argv[2:])
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
