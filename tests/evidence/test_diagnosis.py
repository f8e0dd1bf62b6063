"""What is found in small real runs: what slows them down or fills memory, and nothing in a healthy one."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_accel.evidence.record import Record
from lightning_accel.evidence.record_reader import read_record
from support.made_up_records import found, names
from support.measured_runs import Folder, Vectors, fit, loader

SLEEP_S = 0.02


class Trains(LightningModule):
    """``net`` on batches as they come, or what ``loss`` makes of them."""

    def __init__(self, net: nn.Module, loss: Callable[[Trains, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self.kept: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean() if self.loss is None else self.loss(self, batch)
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


def batches(count: int, *shape: int) -> DataLoader[Tensor]:
    return DataLoader([torch.randn(shape)] * count, batch_size=None)  # type: ignore[arg-type]


def trained(folder: Path, module: LightningModule, data: Any, **options: Any) -> Record:
    fit(module, data, **{"logger": Folder(folder), **options})
    return read_record(folder)


def test_nothing_is_found_in_a_healthy_run(tmp_path: Path) -> None:
    run = trained(tmp_path, Trains(wide()), batches(50, 512, 256))
    assert names(replace(run, header=replace(run.header, native_bf16=False))) == set()


@pytest.mark.medium
def test_a_slow_loader_is_found(tmp_path: Path) -> None:
    data = loader(data=Vectors(40, lambda: time.sleep(SLEEP_S)))
    run = trained(tmp_path, Trains(nn.Linear(8, 2)), data)
    assert found(run, "loader").says.startswith("waiting for data takes")


@pytest.mark.medium
def test_logging_at_every_step_is_found(tmp_path: Path) -> None:
    class Slow(CSVLogger):
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(SLEEP_S)
            super().log_metrics(*args, **kwargs)

    run = trained(tmp_path, Trains(wide()), batches(40, 8, 256), logger=Slow(tmp_path), log_every_n_steps=1)
    assert found(run, "logging").says.startswith("logging every 1 step takes")


@pytest.mark.medium
def test_a_slow_callback_is_found(tmp_path: Path) -> None:
    class Sleeps(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            time.sleep(SLEEP_S)

    assert "callbacks" in names(trained(tmp_path, Trains(wide()), batches(40, 8, 256), callbacks=[Sleeps()]))


@pytest.fixture
def forgetful_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1000):
        yield
    torch._dynamo.reset()


@pytest.mark.medium
@pytest.mark.usefixtures("forgetful_compiler")
def test_recompiling_is_found(tmp_path: Path) -> None:
    data = DataLoader([torch.randn(length, 256) for length in range(2, 34)], batch_size=None)  # type: ignore[arg-type]
    run = trained(tmp_path, Trains(torch.compile(wide(), backend="eager", dynamic=False)), data)  # type: ignore[arg-type]
    assert (found(run, "recompiling").speedup or 0) > 1


def test_float32_is_found_where_the_machine_computes_in_bfloat16(tmp_path: Path) -> None:
    run = trained(tmp_path, Trains(wide()), batches(50, 512, 256))
    run = replace(run, header=replace(run.header, native_bf16=True))
    assert "precision" in names(run)
    assert "precision" not in names(replace(run, header=replace(run.header, precision="bf16-mixed")))


def test_tiny_batches_are_found(tmp_path: Path) -> None:
    def runs() -> Iterator[Record]:
        # A pause of the machine in the one step that is taken apart looks like work: then another run tells.
        for folder in ("first", "second", "third"):
            yield trained(tmp_path / folder, Trains(nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))), loader(20))

    run = next(run for run in runs() if "tiny batches" in names(run))
    assert "batches of 32" in found(run, "tiny batches").action


def transposed(convolve: nn.Module, steps: int, folder: Path, *, is_in_order: bool) -> Record:
    """Pictures whose rows and columns have changed places, to be convolved four times."""

    def loss(module: Trains, pictures: Tensor) -> Tensor:
        turned = pictures.transpose(2, 3)
        turned = turned.contiguous() if is_in_order else turned
        return sum((module.net(turned).mean() for _ in range(4)), torch.zeros(()))

    return trained(folder, Trains(convolve, loss), batches(steps, 8, 8, 64, 64))


def test_strides_that_a_convolution_copies_within_itself_are_seen_with_the_line_that_made_them(tmp_path: Path) -> None:
    depthwise = nn.Conv2d(8, 8, 1, groups=8)
    odd = transposed(depthwise, 3, tmp_path / "odd", is_in_order=False).anatomy
    in_order = transposed(depthwise, 3, tmp_path / "in order", is_in_order=True).anatomy
    assert odd is not None
    assert in_order is not None
    lines = {copy.made_by.partition(":")[0].partition(" at ")[0] for copy in odd.copies if copy.made_by}
    assert lines == {"transpose"}
    assert sum(copy.count for copy in odd.copies if copy.made_by) >= 4
    assert sum(copy.count for copy in in_order.copies if copy.made_by) <= 1


def test_results_that_are_asked_for_are_found_with_their_line(tmp_path: Path) -> None:
    def loss(module: Trains, batch: Tensor) -> Tensor:
        value = module.net(batch).mean()
        module.kept.append(value.item())
        return value

    assert f"{__file__}:" in found(trained(tmp_path, Trains(wide(), loss), batches(5, 8, 256)), "waits").says


def test_logits_are_found(tmp_path: Path) -> None:
    def loss(module: Trains, batch: Tensor) -> Tensor:
        return F.cross_entropy(module.net(batch), torch.zeros(len(batch), dtype=torch.long))

    run = trained(tmp_path, Trains(nn.Linear(8, 4096), loss), batches(5, 512, 8))
    assert found(run, "logits").freed_bytes > 4096 * 512 * 4


def test_a_leak_is_found(tmp_path: Path) -> None:
    def loss(module: Trains, batch: Tensor) -> Tensor:
        pages = mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        module.kept.append(torch.frombuffer(pages, dtype=torch.float32).fill_(1))
        return module.net(batch).mean()

    # Pages of their own, for which no gap of the heap can be used that other tests have left; and gaps that are given
    # back now, not in the midst.
    ctypes.CDLL(None).malloc_trim(0)
    one = found(trained(tmp_path, Trains(nn.Linear(8, 2), loss), batches(160, 4, 8)), "leak")
    assert 120 * 2**20 < one.freed_bytes < 200 * 2**20
