"""Torchao's techniques in whole runs: on two ranks, and under a Trainer whose checkpoints a plain one goes on from."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.techniques.optimizer_8bit import state_bytes
from support.lightning_models import Call
from support.scripts import SUPPORT, run_script

pytest.importorskip("torchao", reason="float8 and optimizer_8bit are torchao's")
pytestmark = pytest.mark.numbers

MakeTrainer = Callable[..., Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks got, plain and with both techniques."""
    folder = tmp_path_factory.mktemp("ranks")
    run_script(SUPPORT / "techniques" / "torchao_ranks.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.medium
def test_two_ranks_keep_the_same_weights(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["both"]["weights"] == ranks[1]["both"]["weights"]
    assert ranks[0]["both"]["losses"] != ranks[1]["both"]["losses"]  # of batches of their own


@pytest.mark.medium
def test_two_ranks_both_compute_in_float8_and_keep_their_states_in_8_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["both"]["in float8"] == ["0", "2"]
        packed, floats = rank["both"]["bytes"]
        assert packed < 0.5 * floats  # of weights so small, the table of 1 KiB a moment counts
        assert rank["both"]["saved"] == ["Tensor"]


@pytest.mark.medium
def test_two_ranks_train_about_as_well(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["both"]["losses"][-1] == pytest.approx(rank["plain"]["losses"][-1], rel=0.05)
        assert rank["both"]["losses"] != rank["plain"]["losses"]


class Regression(LightningModule):
    """Learns to turn rows round; remembers its losses."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        self.automatic_optimization = automatic
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        [inputs] = batch
        loss = (self.net(inputs) - inputs.flip(1)).square().mean()
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(64, 64, generator=torch.Generator().manual_seed(1))), batch_size=8)


def plugin() -> AccelPlugin:
    return AccelPlugin(precision="32-true", lossy={"optimizer_8bit": "on"}, trust="checked", report=False)


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_a_plain_trainer_goes_on_from_a_checkpoint_with_states_in_8_bits(
    make_trainer: MakeTrainer, automatic: bool
) -> None:
    seen = []
    watch = Call(on_train_epoch_end=lambda trainer, _: seen.append(state_bytes(trainer.optimizers[0])))
    ours = make_trainer(max_epochs=2, plugins=[plugin()], callbacks=[watch])
    module, straight = Regression(automatic), Regression(automatic)
    ours.fit(module, rows())
    assert all(packed < 0.4 * floats for packed, floats in seen)
    ours.save_checkpoint("ours.ckpt")
    resumed = Regression(automatic)
    make_trainer(max_epochs=4).fit(resumed, rows(), ckpt_path="ours.ckpt", weights_only=True)
    make_trainer(max_epochs=4).fit(straight, rows())
    assert module.losses + resumed.losses == pytest.approx(straight.losses, rel=0.05)


def test_states_in_8_bits_go_on_from_a_plain_trainers_checkpoint(make_trainer: MakeTrainer) -> None:
    plain = make_trainer(max_epochs=2)
    module, straight = Regression(), Regression()
    plain.fit(module, rows())
    plain.save_checkpoint("plain.ckpt")
    seen = []
    watch = Call(on_train_batch_start=lambda trainer, *_: seen.append(state_bytes(trainer.optimizers[0])))
    resumed = Regression()
    trainer = make_trainer(max_epochs=4, plugins=[plugin()], callbacks=[watch])
    trainer.fit(resumed, rows(), ckpt_path="plain.ckpt", weights_only=True)
    assert all(packed < 0.4 * floats for packed, floats in seen)  # from the first batch on
    make_trainer(max_epochs=4).fit(straight, rows())
    assert module.losses + resumed.losses == pytest.approx(straight.losses, rel=0.05)
