"""The parts of a step add up to its time, whatever the loop. The clock is simulated: its time passes where a test says.

Lightning's own work takes none of it, so that nothing but what a loop does decides what is where, to the millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_accel.callbacks import _fit_timeline, _phase_sampler
from lightning_accel.callbacks._phase_patch import PARTS
from lightning_accel.core.clocks import HostClock
from lightning_accel.evidence.phase_names import BACKWARD, DATA, FORWARD, OPTIMIZER, TRANSFER
from lightning_accel.evidence.record_reader import read_record
from support.measured_runs import BATCH_SIZE, Folder, Model, Vectors, fit, loader

STEPS = 14
MS = {DATA: 1.0, TRANSFER: 2.0, FORWARD: 4.0, BACKWARD: 8.0, OPTIMIZER: 16.0}

_now_ms = [0.0]


def passes(part: str) -> None:
    _now_ms[0] += MS[part]


class SimulatedClock(HostClock):
    unit_ms = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.mark = lambda: _now_ms[0]


class Loop(Model):
    """Each of its parts takes its time; validation takes long."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            passes(TRANSFER)
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        passes(FORWARD)
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        passes(BACKWARD)
        super().backward(loss, *args, **kwargs)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        _now_ms[0] += 1000.0

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.layer)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        optimizer.register_step_pre_hook(lambda *_: passes(OPTIMIZER))
        return optimizer


class TwoByHand(Loop):
    """Manual optimization: each of two optimizers has a forward and a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(8, 2)

    def configure_optimizers(self) -> Any:
        return [self.optimizer(self.layer), self.optimizer(self.other)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer, layer in zip(optimizers, (self.layer, self.other), strict=True):
            self.toggle_optimizer(optimizer)
            passes(FORWARD)
            self.manual_backward(layer(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class Fetches(Loop):
    """Takes its batches itself, in the midst of a step, and moves them to no device."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        passes(TRANSFER)
        passes(FORWARD)
        return self.layer(batch).sum()


class LineSearch(Loop):
    """Its optimizer calls forward and backward three times in a step."""

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.LBFGS(module.parameters(), lr=1e-9, max_iter=3, tolerance_grad=0, tolerance_change=0)
        optimizer.register_step_pre_hook(lambda *_: passes(OPTIMIZER))
        return optimizer


class Endless(IterableDataset[Tensor]):
    """Has no length."""

    def __iter__(self) -> Iterator[Tensor]:
        for sample in range(STEPS * BATCH_SIZE):
            if sample % BATCH_SIZE == 0:
                passes(DATA)
            yield torch.ones(8)


def batches(steps: int = STEPS) -> DataLoader[Any]:
    return loader(data=Vectors(steps, lambda: passes(DATA)))


def skips(module: Model, batch_idx: int) -> Any:
    return "skip" if batch_idx % 3 == 1 else None


EVERY_THIRD = {"check_val_every_n_epoch": None, "val_check_interval": 3, "num_sanity_val_steps": 0}
VALIDATED = {"fit_options": {"val_dataloaders": loader(1)}}
TWICE = {FORWARD: 8.0, BACKWARD: 16.0, OPTIMIZER: 32.0}
INSIDE = {TRANSFER: 0.0, FORWARD: 6.0}
THRICE = {FORWARD: 12.0, BACKWARD: 24.0}

LOOPS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, float] | None]] = {
    "as usual": (lambda: {"model": Loop()}, {}),
    "two optimizers by hand": (lambda: {"model": TwoByHand()}, TWICE),
    "steps that return nothing": (lambda: {"model": Loop(skips)}, None),
    "gradients are accumulated": (lambda: {"model": Loop(), "accumulate_grad_batches": 4}, None),
    "validation within an epoch": (lambda: {"model": Loop(), "val_check_interval": 3, **VALIDATED}, {}),
    "validation across epochs": (
        lambda: {"model": Loop(), "data": batches(4), "max_epochs": 3, **EVERY_THIRD, **VALIDATED},
        {},
    ),
    "no length": (lambda: {"model": Loop(), "data": DataLoader(Endless(), batch_size=BATCH_SIZE)}, None),
    "steps that fetch": (lambda: {"model": Fetches()}, INSIDE),
    "a line search": (lambda: {"model": LineSearch()}, THRICE),
    "few steps an epoch": (lambda: {"model": Loop(), "limit_train_batches": 2, "max_epochs": 6}, {}),
}


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`", "ignore:`training_step` returned `None`")
@pytest.mark.parametrize("loop", LOOPS)
def test_parts_add_up_to_all_of_a_step(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the steps is looked at, but for the first and the one that is taken apart."""
    monkeypatch.setattr(_fit_timeline, "clock_for", lambda _: SimulatedClock())
    monkeypatch.setattr(_phase_sampler, "EVERY", 1)
    make, parts_ms = LOOPS[loop]
    fit(**{"data": batches(), **make()}, logger=Folder(tmp_path))
    record = read_record(tmp_path)
    looked_at, timed = (sum(getattr(some, name) for some in record.steps) for name in ("looked_at", "timed"))
    assert looked_at == timed - 1 >= 9
    in_parts_ms = sum(ms for some in record.steps for ms in some.parts_ms.values())
    cycles_ms = [ms for some in record.steps for ms in some.cycle_ms]
    assert in_parts_ms == pytest.approx(sum(cycles_ms[1:]))
    if parts_ms is not None:  # the same in each step; else some have no optimizer's, or, at the end, no fetch
        expected = {part: ms for part, ms in {**MS, **parts_ms}.items() if ms}
        found = {part: ms for part, ms in record.parts_ms().items() if ms}
        assert found == pytest.approx(expected)


def test_runs_without_a_record_look_at_no_step(tmp_path: Path) -> None:
    """Such as ``barebones``, a trial run, and those that do not train; what strategies do is not edited there."""
    from lightning.pytorch import Trainer

    quiet: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    bare = Trainer(accelerator="cpu", barebones=True, max_epochs=1, default_root_dir=tmp_path)
    bare.fit(Model(), loader(2))
    rehearsed = Trainer(fast_dev_run=True, logger=False, default_root_dir=tmp_path, **quiet)
    rehearsed.fit(Model(), loader(2))
    for trainer in (bare, rehearsed):
        assert not PARTS.keys() & vars(trainer.strategy).keys()
    assert not list(tmp_path.rglob("*.jsonl"))
