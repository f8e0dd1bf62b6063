"""`loader` under a Trainer, with real workers: the same run, to the bit, whoever loads its batches."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_accel import AccelPlugin, Plan, accelerate
from lightning_accel.data import Map
from lightning_accel.data.loader_proxy import StandIn

pytestmark = [pytest.mark.numbers, pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many")]


BY_WORKERS = multiprocessing.Value("i")  # samples; no part of a dataset, which must not change as it is read


class Slow(Dataset[Any]):
    """A sample takes a while to load."""

    def __init__(self, seconds: float = 0.004) -> None:
        self.samples, self.seconds = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        if get_worker_info() is not None:
            with BY_WORKERS.get_lock():
                BY_WORKERS.value += 1
        return self.samples[index]


class Augmented(Slow):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(4)


class Dropping(LightningModule):
    """Draws random numbers in each of its steps, so that one that was drawn elsewhere shows in all that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch if isinstance(batch, Tensor) else batch[0]
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(data: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(data or Slow(), 4, shuffle=True, **options)


def fit(plan: dict[str, Any], loaders: Any, *callbacks: Callback, **options: Any) -> tuple[Trainer, Dropping]:
    seed_everything(1, verbose=False)
    module = Dropping()
    off = {"trust": "unchecked", "report": False, "inplace_activations": "off", "flash_attention": "off"}
    trainer = Trainer(
        plugins=[AccelPlugin.from_plan(Plan().replace(precision="32-true", memory_format="off", **off, **plan))],
        callbacks=list(callbacks),
        **{"max_epochs": 4, "accelerator": "cpu", **options},
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
    )
    trainer.fit(module, loaders)
    return trainer, module


def said(trainer: Trainer) -> str:
    plugin = trainer.precision_plugin
    assert isinstance(plugin, AccelPlugin)
    return plugin.report.of("loader").status


@pytest.mark.medium
def test_a_run_with_workers_is_the_run_without_them_to_the_bit() -> None:
    _, plain = fit({}, loader())
    after = torch.rand(1)
    BY_WORKERS.value = 0
    _, tuned = fit({"loader": "auto"}, loader())
    assert BY_WORKERS.value >= 40  # an epoch at least
    assert tuned.losses == plain.losses
    assert torch.equal(torch.rand(1), after)  # the run's random stream has come as far


def test_the_trainer_shows_a_dataloader_and_gets_the_users_own_back() -> None:
    own, seen = loader(), []

    class Look(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            shown = trainer.train_dataloader
            seen.append((isinstance(shown, StandIn), isinstance(shown, DataLoader), shown.dataset is own.dataset))

    trainer, _ = fit({"loader": "auto"}, own, Look(), max_epochs=3)
    assert seen == [(True, True, True)] * 3
    assert trainer.train_dataloader is own


def _doubled(xp: Any, batch: Any) -> Any:
    return batch * 2


@pytest.mark.medium
def test_behind_a_pipeline_it_is_the_same_run() -> None:
    settings = {"preprocess": [Map(_doubled)]}
    _, plain = fit(settings, loader())
    BY_WORKERS.value = 0
    _, tuned = fit({"loader": "auto", **settings}, loader())
    assert BY_WORKERS.value >= 40
    assert tuned.losses == plain.losses


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (lambda: loader(Augmented()), {}, "draw random numbers"),
        (lambda: [loader(), loader()], {"max_epochs": 2}, "one of several"),
        (lambda: loader(Slow(0.0)), {"max_epochs": 1}, "`lightning-accel tune` finds its workers before a run"),
        (lambda: loader(Slow(0.0)), {"reload_dataloaders_every_n_epochs": 2}, "made anew every 2 epochs"),
    ],
)
def test_what_is_left_has_its_reason_in_the_report(make: Callable[[], Any], options: dict[str, Any], why: str) -> None:
    trainer, _ = fit({"loader": "auto"}, make(), **{"max_epochs": 2, **options})
    assert why in said(trainer)
    plugin = trainer.precision_plugin
    assert isinstance(plugin, AccelPlugin)
    assert why in plugin.report.refused("loader")["train_dataloader"]


def test_a_plain_loops_loader_is_its_own_affair() -> None:
    handle = accelerate(nn.Linear(2, 2), Plan(loader="auto"))
    assert "no loader of a Trainer" in handle.report.of("loader").status
    handle.undo()
