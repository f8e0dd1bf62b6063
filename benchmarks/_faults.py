"""Eight small trainings with a fault each, and the same with the fault mended; for :mod:`diagnosis`.

Apart from its fault each computes as fast as it can: else float32, where it is slower, would be a fault of all of them.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from lightning_accel.core.host import Host, usable_cores

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from bytes_gpt import BytesGPT

CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on what, and with which options of the Trainer."""

    module: LightningModule
    data: DataLoader[Any]
    options: dict[str, Any] = field(default_factory=dict)
    logger: type[CSVLogger] = CSVLogger


Build = Callable[[int, bool], Training]  # of so many steps an epoch; whether the fault is mended


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is planted.

    Attributes:
        title: In a table.
        finding: What :func:`~lightning_accel.evidence.diagnosis.diagnose` calls it; empty: there is nothing to find.
        steps: Of a turn of one to two seconds.
        build: Makes the training.
        traceml: TraceML's names for what would be a find, generously.
        is_of_bfloat16: Whether it is one only where the device computes in bfloat16.
    """

    title: str
    finding: str
    steps: int
    build: Build
    traceml: tuple[str, ...] = ()
    is_of_bfloat16: bool = False


class Classifies(LightningModule):
    """``net`` on pairs of inputs and labels, with AdamW; what a fault is goes into :meth:`seen`."""

    def __init__(self, net: nn.Module, seen: Callable[[Classifies, Tensor, Tensor], None] | None = None) -> None:
        super().__init__()
        self.net, self.seen = net, seen
        self.kept: list[Any] = []

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        scores = self.net(inputs)
        loss = F.cross_entropy(scores.flatten(0, -2).float(), labels.flatten())
        if self.seen is not None:
            self.seen(self, scores, loss)
        self.log("loss", loss.detach())
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def cnn(width: int = 32) -> nn.Module:
    """(B, 3, 32, 32) → (B, 10)."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * width, CLASSES)),
    )


def mlp(width: int, depth: int = 3, inputs: int = 64) -> nn.Module:
    """(B, inputs) → (B, 10)."""
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def random_pairs(steps: int, batch_size: int, *shape: int, labels: tuple[int, ...] = ()) -> TensorDataset:
    """So many batches of normal inputs and labels."""
    count = steps * batch_size
    return TensorDataset(torch.randn(count, *shape), torch.randint(CLASSES, (count, *labels)))


# -- the faults --------------------------------------------------------------------------------------------------------


def fast() -> dict[str, Any]:
    """Options of a Trainer that computes as fast as this machine does, so that there is nothing to find."""
    return {"precision": "bf16-mixed" if Host.detect("cpu").native_bf16 else "32-true"}


def healthy_cnn(steps: int, mended: bool) -> Training:
    data = DataLoader(random_pairs(steps, 32, 3, 32, 32), batch_size=32)
    return Training(module=Classifies(cnn()), data=data, options=fast())


def healthy_gpt(steps: int, mended: bool) -> Training:
    text = torch.randint(256, (steps * 8, 129))
    gpt = BytesGPT(dim=128, depth=2, num_heads=4, seq_len=128)
    data = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8)
    return Training(module=gpt, data=data, options=fast())


def healthy_mlp(steps: int, mended: bool) -> Training:
    data = DataLoader(random_pairs(steps, 256, 64), batch_size=256)
    return Training(module=Classifies(mlp(512)), data=data, options=fast())


class Packed(Dataset[tuple[Tensor, int]]):
    """Pictures that are unpacked, turned to floats and blurred when they are asked for."""

    def __init__(self, count: int) -> None:
        noise = np.random.default_rng(0)
        pictures = [noise.integers(0, 32, (96, 96, 3), dtype=np.uint8).tobytes() for _ in range(16)]
        self._packed = [zlib.compress(picture, 1) for picture in pictures]
        self._count = count

    def __len__(self) -> int:
        return self._count

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        packed = self._packed[index % len(self._packed)]
        picture = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(96, 96, 3).astype(np.float32) / 255
        small = picture.reshape(32, 3, 32, 3, 3).mean((1, 3))
        return torch.from_numpy(small.transpose(2, 0, 1).copy()), index % CLASSES


def slow_loader(steps: int, mended: bool) -> Training:
    data = DataLoader(Packed(steps * 32), batch_size=32)
    if mended and torch.get_num_threads() < usable_cores():
        data = DataLoader(Packed(steps * 32), batch_size=32, num_workers=1, persistent_workers=True)
    elif mended:  # a worker would take a core from those that compute
        pictures = Packed(16)
        unpacked = [pictures[index] for index in range(16)]
        data = DataLoader(cast("Dataset[Any]", [unpacked[index % 16] for index in range(steps * 32)]), batch_size=32)
    return Training(module=Classifies(cnn()), data=data, options=fast())


def asks_for_numbers(steps: int, mended: bool) -> Training:
    def asks(module: Classifies, scores: Tensor, loss: Tensor) -> None:
        module.kept[:] = [loss.item()]

    return Training(
        module=Classifies(cnn(), None if mended else asks),
        data=DataLoader(random_pairs(steps, 32, 3, 32, 32), batch_size=32),
        options=fast(),
    )


def tiny_batches(steps: int, mended: bool) -> Training:
    size = 16 if mended else 2
    data = DataLoader(random_pairs(steps, size, 64), batch_size=size)
    return Training(module=Classifies(mlp(128)), data=data, options=fast())


class Scales(nn.Module):
    """Series ``(B, T, C)`` seen at several scales by depthwise convolutions, as by Inception; → (B, 10)."""

    def __init__(self, channels: int, contiguous: bool) -> None:
        super().__init__()
        self.contiguous = contiguous
        self.branches = nn.ModuleList(
            nn.Conv1d(channels, channels, size, padding=size // 2, groups=channels) for size in (1, 3, 5, 7)
        )
        self.head = nn.Linear(channels * len(self.branches), CLASSES)

    @override
    def forward(self, series: Tensor) -> Tensor:
        rows = series.transpose(1, 2)
        if self.contiguous:
            rows = rows.contiguous()
        return self.head(torch.cat([branch(rows).relu().amax(-1) for branch in self.branches], 1))


def strided_input(steps: int, mended: bool) -> Training:
    module = Classifies(Scales(64, contiguous=mended))
    data = DataLoader(random_pairs(steps, 32, 512, 64), batch_size=32)
    return Training(module=module, data=data, options=fast())


class Lengths(Dataset[tuple[Tensor, Tensor]]):
    """Batches of series, nearly each of another length than all before."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = int(torch.randint(200, 2200, ()))
        return torch.randn(4, length, 64), torch.randint(CLASSES, (4, length))


def recompiles(steps: int, mended: bool) -> Training:
    """By what captures, and no compiler behind it: that would take many seconds for each."""
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, limit, 10_000)  # as its warnings say that one may; else it would give up midway
    net = torch.compile(mlp(256), backend="eager", dynamic=mended)
    return Training(module=Classifies(net), data=DataLoader(Lengths(steps), batch_size=None), options=fast())


def float32(steps: int, mended: bool) -> Training:
    options = fast() if mended else {}
    data = DataLoader(random_pairs(steps, 256, 64), batch_size=256)
    return Training(module=Classifies(mlp(1024)), data=data, options=options)


def leaks(steps: int, mended: bool) -> Training:
    def keeps(module: Classifies, scores: Tensor, loss: Tensor) -> None:
        error = (scores.softmax(-1) - 1 / CLASSES).pow(2).mean()  # of no backward pass, which would free its graph
        module.kept.append(error.detach() if mended else error)

    module = Classifies(mlp(256), keeps)
    data = DataLoader(random_pairs(steps, 16, 256, 64, labels=(256,)), batch_size=16)
    return Training(module=module, data=data, options=fast())


class Remote(CSVLogger):
    """Tells a server, too, and waits until it has heard."""

    @override
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.015)
        super().log_metrics(*args, **kwargs)


def logs_each_step(steps: int, mended: bool) -> Training:
    return Training(
        module=Classifies(cnn()),
        data=DataLoader(random_pairs(steps, 32, 3, 32, 32), batch_size=32),
        options={**fast(), "log_every_n_steps": 50 if mended else 1},
        logger=Remote,
    )


_RESIDUAL = ("RESIDUAL_HEAVY",)
FAULTS = {
    "loader": Fault(title="slow loader", finding="loader", steps=64, build=slow_loader, traceml=("INPUT_BOUND",)),
    "item": Fault(title="`.item()` each step", finding="waits", steps=64, build=asks_for_numbers, traceml=_RESIDUAL),
    "tiny": Fault(title="tiny batches", finding="tiny batches", steps=400, build=tiny_batches, traceml=_RESIDUAL),
    "strides": Fault(title="non-contiguous input", finding="layouts", steps=48, build=strided_input),
    "recompiling": Fault(title="recompiling each step", finding="recompiling", steps=64, build=recompiles),
    "float32": Fault(
        title="float32 where bfloat16 would do",
        finding="precision",
        steps=64,
        build=float32,
        traceml=("COMPUTE_BOUND",),
        is_of_bfloat16=True,
    ),
    "leak": Fault(
        title="a memory leak", finding="leak", steps=192, build=leaks, traceml=("CREEP_EARLY", "CREEP_CONFIRMED")
    ),
    "logging": Fault(title="logging each step", finding="logging", steps=64, build=logs_each_step, traceml=_RESIDUAL),
}
HEALTHY = {
    "cnn": Fault(title="healthy: a CNN", finding="", steps=64, build=healthy_cnn),
    "gpt": Fault(title="healthy: a GPT", finding="", steps=48, build=healthy_gpt),
    "mlp": Fault(title="healthy: an MLP", finding="", steps=200, build=healthy_mlp),
}
TRAININGS = {**FAULTS, **HEALTHY}
