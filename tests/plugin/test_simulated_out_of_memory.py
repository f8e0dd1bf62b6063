"""What is put on against a lack of memory in the first step, where a module has its layers right in it.

Memory is simulated here, and runs out for real in test_out_of_memory.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_accel.core.torch_private.autograd import saved_tensors_hooks
from lightning_accel.experiment.trial_runs import ORACLE_SAMPLES
from support.plugin.tight import Batches, MakeTrainer, ended, fit

pytestmark = pytest.mark.numbers

ANSWER: dict[str, Any] = {"settings": {"memory": {"on_oom": "answer"}}}


class Layers(LightningModule):
    """Has room for ``most`` bytes of what its layers keep for the backward pass."""

    def __init__(self, most: float = math.inf) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()
        self.most = most
        self.losses: list[float] = []

    def called(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)).tanh().sigmoid())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        kept: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self.called(batch).square().mean()
        if sum(kept) > self.most:
            raise torch.OutOfMemoryError("simulated: Tried to allocate 200.00 GiB.")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


class LayersOfForward(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().called(x)

    def called(self, x: Tensor) -> Tensor:
        return self(x)


def test_a_forward_of_the_modules_own_is_checkpointed(make_trainer: MakeTrainer) -> None:
    plain, *_ = fit(make_trainer, LayersOfForward(), Batches(sizes=[16] * 3), **ANSWER)
    model, _, plugin = fit(make_trainer, LayersOfForward(3000), Batches(sizes=[16] * 3), **ANSWER)
    assert plugin.state_dict()["out_of_memory"] == [("gradient_checkpointing", "selective")]
    assert model.losses == plain.losses


class TightBlock(nn.Module):
    """Has room for a few samples, or for all that are computed in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)]).double()

    def forward(self, x: Tensor) -> Tensor:
        hooks = saved_tensors_hooks()
        if len(x) > ORACLE_SAMPLES and (hooks is None or hooks[0].__module__ != "torch.utils.checkpoint"):
            raise torch.OutOfMemoryError("simulated: Tried to allocate 200.00 GiB.")
        up, down = self.layers
        return x + down(up(x).tanh())


class OfTightBlocks(LayersOfForward):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(TightBlock(), TightBlock())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_in_a_trial_step_what_is_put_on_is_tried_on_the_few_samples_that_there_is_memory_for(
    make_trainer: MakeTrainer,
) -> None:
    model, _, plugin = fit(make_trainer, OfTightBlocks(), Batches(sizes=[ORACLE_SAMPLES * 2] * 3), **ANSWER)
    assert len(model.losses) == 3
    assert sorted(plugin.report.applied("gradient_checkpointing")) == ["blocks.0", "blocks.1"]


def test_where_checkpointing_finds_no_blocks_the_page_says_so(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, Layers(3000), Batches(sizes=[16]), **ANSWER)
    assert "(gradient_checkpointing finds no blocks in Layers: name some)" in page


def test_where_it_found_some_the_page_says_nothing_of_that(make_trainer: MakeTrainer) -> None:
    assert "finds no blocks" not in ended(make_trainer, LayersOfForward(0), Batches(sizes=[16]), **ANSWER)


def test_what_only_another_run_can_have_is_not_passed_over_in_silence(make_trainer: MakeTrainer) -> None:
    settings = {**ANSWER["settings"], "compile": "on"}
    page = ended(make_trainer, LayersOfForward(0), Batches(sizes=[16]), settings=settings)
    assert "change no number, but for what a run can have from its beginning only." in page
    assert "checkpoint='selective'" in page
