"""What the plugin and its logger add to a step that they do nothing for: counted in calls, not in microseconds."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger, _instruments
from lightning_accel.callbacks._summary_logger import Teller
from lightning_accel.settings import Plan
from support.technique_table import off

FIRST, LAST = 10, 20  # of the steps that are counted: past the trials, and past the logger's count of FLOPs
OFF: dict[str, Any] = {**off(), "memory": {"on_oom": "off"}}


class Counted(LightningModule):
    """Counts every function, Python's or C's, that is entered between the ends of two steps."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.calls: Counter[str] = Counter()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            sys.setprofile(self._count)
        elif batch_idx == LAST:
            sys.setprofile(None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            self.calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            self.calls[arg.__name__] += 1


def linear() -> nn.Module:
    """Nothing in it is a site of any technique."""
    return nn.Linear(8, 2)


def with_sites() -> nn.Module:
    """Activations in place, and running statistics."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def added_calls(
    make_trainer: Callable[..., Any], net: Callable[[], nn.Module], *, alone: Any = None, **options: Any
) -> float:
    """How many calls a step makes beyond those of Lightning alone, which has the options in ``alone``."""
    data = DataLoader(TensorDataset(torch.ones(4 * (LAST + 2), 8)), batch_size=4)

    def calls(**options: Any) -> int:
        module = Counted(net())
        try:
            make_trainer(max_epochs=1, **options).fit(module, data)
        finally:
            sys.setprofile(None)
        return sum(module.calls.values())

    plain = calls(**(alone or {}))
    assert plain > 1000 * (LAST - FIRST)  # Lightning's own: else nothing was counted
    return (calls(**options) - plain) / (LAST - FIRST)


def test_with_everything_off_a_step_is_lightnings_own(make_trainer: Callable[..., Any]) -> None:
    assert added_calls(make_trainer, linear, plugins=[AccelPlugin.from_plan(Plan().replace(report=False, **OFF))]) < 25


def test_a_step_that_is_not_about_to_run_out_of_memory_is_looked_at_and_has_no_net(
    make_trainer: Callable[..., Any],
) -> None:
    options = {"precision": "32-true", "report": False, **OFF, "memory": {"on_oom": "answer"}}
    assert added_calls(make_trainer, linear, plugins=[AccelPlugin.from_plan(Plan().replace(**options))]) < 50


@pytest.mark.parametrize("net", [linear, with_sites])
def test_the_defaults_cost_a_step_an_eighth_of_lightnings_own(
    make_trainer: Callable[..., Any], net: Callable[[], nn.Module]
) -> None:
    assert added_calls(make_trainer, net, plugins=[AccelPlugin(precision="32-true")]) < 225


def test_the_logger_costs_little_more_than_its_two_hooks(make_trainer: Callable[..., Any]) -> None:
    assert added_calls(make_trainer, linear, callbacks=[SpeedMemoryLogger()]) < 80


def test_the_plugins_own_logger_costs_a_step_a_few_calls(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """With a folder for a record, too, which so short a run cannot pay for."""
    plain, ours = (CSVLogger(tmp_path, version=version) for version in (0, 1))
    without = {"logger": plain, "plugins": [AccelPlugin.from_plan(Plan().replace(report=False, **OFF))]}
    assert (
        added_calls(
            make_trainer, linear, alone=without, logger=ours, plugins=[AccelPlugin.from_plan(Plan().replace(**OFF))]
        )
        < 60
    )


def test_the_record_costs_a_few_dozen_more(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def added() -> float:
        plain, measured = (CSVLogger(tmp_path, version=next(versions)) for _ in range(2))
        options = {"logger": measured, "callbacks": [SpeedMemoryLogger()]}
        return added_calls(make_trainer, linear, alone={"logger": plain}, **options)

    versions = itertools.count()
    with_record = added()
    monkeypatch.setattr(_instruments, "record_folder", lambda *_: None)
    monkeypatch.setattr(Teller, "open", lambda *_: None)
    assert 0 < with_record - added() < 50  # of one of these ten steps it reads how much memory is held


def test_without_techniques_there_is_nothing_around_a_step(make_trainer: Callable[..., Any]) -> None:
    """Not even a search for trials that are due, which is over only when there was something to try."""
    entered: list[str] = []

    class Watched(AccelPlugin):
        def train_step_context(self) -> Any:
            context = super().train_step_context()
            entered.append(type(context).__name__)
            return context

    make_trainer(max_steps=3, plugins=[Watched.from_plan(Plan().replace(report=False, **OFF))]).fit(
        Counted(linear()), DataLoader(TensorDataset(torch.ones(12, 8)), batch_size=4)
    )
    assert entered == ["nullcontext"] * 3
