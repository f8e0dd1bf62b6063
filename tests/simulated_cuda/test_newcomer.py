"""A first hour with the plugin on a GPU: a run, its page, half precision, a full card, a resume elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from simulated_cuda.waits import SYNCHRONISATIONS

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.numbers]

STEPS = 8


class Digits(LightningModule):
    """Somebody's first model."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 4)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(num_samples: int = STEPS * 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 16, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8, pin_memory=torch.cuda.is_available())


def trained(accelerator: str = "gpu", plugin: AccelPlugin | None = None, **options: Any) -> tuple[Digits, Trainer]:
    seed_everything(0)
    model = Digits()
    ckpt_path = options.pop("ckpt_path", None)
    quiet: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    plugins = [] if plugin is None else [plugin]
    trainer = Trainer(accelerator=accelerator, devices=1, plugins=plugins, **{**quiet, **options})
    trainer.fit(model, loader(), loader(16), ckpt_path=ckpt_path)
    return model, trainer


def losses_of(model: Digits) -> Tensor:
    return torch.stack(model.losses).cpu()


def test_a_run_comes_to_its_end_with_a_plain_runs_numbers() -> None:
    plain, _ = trained()
    plugin = AccelPlugin(precision="32-true", report=False)
    model, trainer = trained(plugin=plugin)
    assert trainer.global_step == STEPS
    torch.testing.assert_close(losses_of(model), losses_of(plain), rtol=1e-4, atol=1e-5)


def test_a_run_with_every_default_comes_to_its_end_and_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    model, trainer = trained(plugin=AccelPlugin(report=str(page)), max_epochs=3)
    assert trainer.global_step == 3 * STEPS
    assert losses_of(model).isfinite().all()
    assert "NVIDIA H100" in page.read_text(encoding="utf-8")


def test_no_step_waits_for_the_device_more_often_than_plain() -> None:
    def waits(plugin: AccelPlugin | None, num_steps: int) -> int:
        before = len(SYNCHRONISATIONS)
        trained(plugin=plugin, max_steps=num_steps, limit_val_batches=0)
        return len(SYNCHRONISATIONS) - before

    plugin = lambda: AccelPlugin(precision="bf16-mixed", report=False)  # noqa: E731
    trained(plugin=plugin())  # what is decided once is remembered
    more_plain = waits(None, STEPS) - waits(None, STEPS // 2)
    more = waits(plugin(), STEPS) - waits(plugin(), STEPS // 2)
    assert more <= more_plain


@pytest.mark.parametrize("clipping", ["norm", "value"])
def test_half_precision_with_clipping_and_accumulation_skips_no_step(clipping: str) -> None:
    plugin = AccelPlugin(precision="16-mixed", report=False)
    model, trainer = trained(
        plugin=plugin, gradient_clip_val=0.5, gradient_clip_algorithm=clipping, accumulate_grad_batches=2, max_epochs=2
    )
    assert trainer.global_step == STEPS
    assert plugin.scaler is not None
    losses = losses_of(model)
    assert losses.isfinite().all()
    assert losses[-STEPS:].mean() < losses[:STEPS].mean()


def test_a_card_that_is_too_small_ends_with_the_page_of_what_held_its_memory(
    card_of_mib: Callable[[float], None],
) -> None:
    class Fill(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            card_of_mib(0)  # the batch is there, and nothing else fits

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as raised:
        trained(plugin=AccelPlugin(precision="32-true", report=False), callbacks=[Fill()])
    page = str(raised.value)
    assert "Training step 0 of epoch 0 ran out of memory" in page
    assert "on cuda:0:" in page
    assert "parameters" in page


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_checkpoint_of_the_gpu_is_resumed_on_a_cpu(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True)
    model, trainer = trained(
        plugin=AccelPlugin(precision="bf16-mixed", report=False), enable_checkpointing=True, callbacks=[saver]
    )
    resumed, again = trained(
        "cpu",
        AccelPlugin(precision="bf16-mixed", report=False),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(tmp_path / "again", save_last=True)],
        max_epochs=2,
        ckpt_path=tmp_path / "last.ckpt",
    )
    assert again.global_step == 2 * trainer.global_step
    assert {p.device.type for p in resumed.parameters()} == {"cpu"}
    assert losses_of(resumed).mean() < losses_of(model).mean()


def test_a_cpu_run_beside_the_device_never_touches_it() -> None:
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    _, trainer = trained("cpu", AccelPlugin(report=False))
    assert trainer.global_step == STEPS
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
