"""What a run's record says of where its steps' time goes."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import _phase_sampler
from lightning_accel.callbacks._phase_patch import PARTS
from lightning_accel.evidence.phase_names import BACKWARD, COMMUNICATION, DATA, LOGGING, REST
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.evidence.render import to_markdown
from lightning_accel.evidence.report_model import page_of
from support.measured_runs import Folder, Model, Vectors, fit, loader
from support.scripts import SUPPORT, run_script
from support.traced_runs import names, read

STEPS = 50  # three of which are looked at
FEW_STEPS = 12
SLEEP_S = 0.02


@pytest.fixture
def looks_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps have to sleep."""
    monkeypatch.setattr(_phase_sampler, "EVERY", 1)


def sleep(*_: Any) -> None:
    time.sleep(SLEEP_S)


class SleepsBackward(Model):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        sleep()
        super().backward(loss, *args, **kwargs)


class SleepsInOptimizer(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(sleep)
        return optimizer


class SleepsInTransfer(Model):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        sleep()
        return batch


class SleepsBetween(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        sleep()


class Manual(Model):
    """Steps by hand, and sleeps where ``where`` says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.where = where

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.layer(batch).sum()
        if self.where == "forward":
            sleep()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.where == "backward":
            sleep()
        super().backward(loss, *args, **kwargs)


def recorded(folder: Path, model: Model, data: Any = None, **options: Any) -> Record:
    fit(model, data or loader(STEPS), logger=Folder(folder), **options)
    return read_record(folder)


SLEEPERS = {
    DATA: lambda: {"model": Model(), "data": loader(data=Vectors(FEW_STEPS, sleep))},
    PARTS["batch_to_device"]: lambda: {"model": SleepsInTransfer()},
    PARTS["training_step"]: lambda: {"model": Model(sleep)},
    PARTS["backward"]: lambda: {"model": SleepsBackward()},
    PARTS["optimizer_step"]: lambda: {"model": SleepsInOptimizer()},
    REST: lambda: {"model": Model(), "callbacks": [SleepsBetween()]},
}


@pytest.mark.usefixtures("looks_at_every_step")
@pytest.mark.parametrize("plugins", [[], [AccelPlugin]], ids=["plain", "accelerated"])
@pytest.mark.parametrize("part", SLEEPERS)
def test_time_goes_to_the_part_that_takes_it(part: str, plugins: Any, tmp_path: Path) -> None:
    run = {"data": loader(FEW_STEPS), **SLEEPERS[part]()}
    found = recorded(tmp_path, **run, plugins=[make() for make in plugins]).parts_ms()
    assert max(found, key=lambda name: found[name]) == part
    assert found[part] >= 1e3 * SLEEP_S


@pytest.mark.usefixtures("looks_at_every_step")
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_manual_optimization_has_parts_too(part: str, tmp_path: Path) -> None:
    found = recorded(tmp_path, Manual(part), loader(FEW_STEPS)).parts_ms()
    assert max(found, key=lambda name: found[name]) == part


def test_parts_are_of_every_sixteenth_step(tmp_path: Path) -> None:
    (some,) = recorded(tmp_path, Model()).steps
    assert some.looked_at == STEPS // 16


def test_a_look_that_validation_has_spoilt_is_taken_at_the_next_step(tmp_path: Path) -> None:
    fits = {"val_dataloaders": loader(1)}
    (some,) = recorded(tmp_path, Model(), val_check_interval=1, fit_options=fits).steps
    assert some.looked_at == STEPS // 16
    assert set(some.parts_ms) == {DATA, REST, *PARTS.values()}


@pytest.mark.medium
def test_what_comes_in_every_fourth_step_is_seen_in_a_fourth_of_them(tmp_path: Path) -> None:
    record = recorded(tmp_path, SleepsInOptimizer(), loader(256), accumulate_grad_batches=4)
    (some,) = record.steps
    steps = some.parts_ms["optimizer"] / (1e3 * SLEEP_S)  # in which an optimizer has slept
    assert 0.1 < steps / some.looked_at < 0.45


def test_a_strategy_that_takes_no_edit_costs_the_parts_and_not_the_run(tmp_path: Path) -> None:
    class Sealed(SingleDeviceStrategy):
        is_sealed = False

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            self.is_sealed = True

        def __setattr__(self, name: str, value: Any) -> None:
            if self.is_sealed and name in PARTS:
                raise TypeError("sealed")
            super().__setattr__(name, value)

    record = recorded(tmp_path, Model(), strategy=Sealed("cpu"))
    assert (record.status, record.parts_ms()) == ("finished", {})


@pytest.mark.usefixtures("looks_at_every_step")
def test_logging_is_a_part_of_its_own(tmp_path: Path) -> None:
    class Slow(CSVLogger):
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            sleep()
            super().log_metrics(*args, **kwargs)

    class Logs(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            self.log("one", 1.0)
            return super().training_step(batch, batch_idx)

    fit(Logs(), loader(FEW_STEPS), logger=Slow(tmp_path), log_every_n_steps=1)
    assert read_record(tmp_path).parts_ms()[LOGGING] >= 1e3 * SLEEP_S


def computes() -> None:
    until = time.thread_time() + SLEEP_S
    while time.thread_time() < until:
        pass


@pytest.mark.usefixtures("looks_at_every_step")
def test_loading_that_computes_is_told_from_loading_that_waits(tmp_path: Path) -> None:
    (waiting,) = recorded(tmp_path / "waits", Model(), loader(data=Vectors(FEW_STEPS, sleep))).steps
    (computing,) = recorded(tmp_path / "computes", Model(), loader(data=Vectors(FEW_STEPS, computes))).steps
    assert waiting.loading_cpu_ms < 0.5 * waiting.parts_ms[DATA]
    assert computing.loading_cpu_ms >= 1e3 * SLEEP_S * computing.looked_at


def test_the_strategy_is_left_as_it_was(tmp_path: Path) -> None:
    strategies: list[Any] = []

    class Looks(Callback):
        def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
            strategies.append(trainer.strategy)

    recorded(tmp_path, Model(), callbacks=[Looks()])
    assert not PARTS.keys() & vars(strategies[0]).keys()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    run_script(SUPPORT / "callbacks" / "two_recorded_ranks.py", folder)
    return folder


@pytest.mark.medium
def test_what_ranks_of_ddp_wait_for_each_other_is_communication(two_ranks: Path) -> None:
    found = read_record(two_ranks / "ddp").parts_ms()
    assert found[COMMUNICATION] > 0.5 * (found[BACKWARD] + found[COMMUNICATION])
    assert found[COMMUNICATION] > 5


@pytest.mark.medium
def test_what_ranks_of_fsdp_wait_for_each_other_is_communication(two_ranks: Path) -> None:
    """The first rank asks for the weights that the second, which sleeps before its step, is to send."""
    found = read_record(two_ranks / "fsdp").parts_ms()
    assert max(found, key=lambda name: found[name]) == COMMUNICATION
    assert found[COMMUNICATION] > 5


@pytest.mark.medium
def test_a_trace_of_fsdp_names_its_communication(two_ranks: Path) -> None:
    (trace,) = two_ranks.rglob("trace-*-rank0.json.gz")
    inside = {"forward", "backward"}
    assert {COMMUNICATION, *inside} <= set(names(read(trace)))


@pytest.mark.medium
def test_the_page_names_the_rank_that_holds_up_the_others(two_ranks: Path) -> None:
    page = page_of(read_record(two_ranks / "ddp"))
    (epoch,) = page.epochs
    assert epoch["stragglers_latest_rank"] == 1
    heads, _, (row, *_) = table_of(to_markdown(page), "last rank at backward")
    assert row[heads.index("last rank at backward")] == "1"


def table_of(text: str, head: str) -> tuple[list[str], list[str], list[list[str]]]:
    """The first table of a page in Markdown with such a head: its heads, the line below them, and its rows."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("|") and head in line)
    heads, rule, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in itertools.takewhile(lambda line: line.startswith("|"), lines[begin:])
    )
    return heads, rule, rows
