"""What the user holds can be resized during a run and after it, and stays the memory that it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_accel import AccelPlugin
from lightning_accel.core.report import AccelWarning
from lightning_accel.ops.arrays import tensor_as_numpy
from lightning_accel.settings import Plan
from support.edges import Net, run
from support.lightning_models import Supervised

MakeTrainer = Callable[..., Any]


class Keeping(Supervised):
    """Keeps its batches, and what its layers have made of them."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)))
        self.register_buffer("scale", torch.ones(16))
        self.rows = torch.ones(4, 4)[1:]  # a view, held by a plain attribute
        self.kept: list[Tensor] = []

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[0](batch[0])  # type: ignore[index]
        self.kept += [*batch, hidden, self.net[1](hidden)]  # type: ignore[index]
        self.fixed_in_step = [one.shape for one in self.held() if not one.untyped_storage().resizable()]
        return super().training_step(batch, batch_idx)

    def held(self) -> list[Tensor]:
        return [*self.parameters(), *self.buffers(), self.rows, *self.kept]


@pytest.mark.parametrize("plan", [{}, {"sparse_activations": "auto"}, {"loader": "auto"}])
def test_it_can_be_resized(make_trainer: MakeTrainer, plan: dict[str, Any]) -> None:
    module = Keeping()
    data = TensorDataset(torch.randn(16, 8), torch.randint(2, (16,)))
    plugin = AccelPlugin.from_plan(Plan().replace(precision="32-true", report=False, **plan))
    make_trainer(plugins=[plugin], max_epochs=2).fit(module, DataLoader(data, 4))
    assert not module.fixed_in_step
    assert [one.shape for one in [*module.held(), *data.tensors] if not one.untyped_storage().resizable()] == []
    module.get_buffer("scale").resize_(1024)


def test_an_array_of_a_tensor_is_its_memory() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()[1:]
    array = tensor_as_numpy(tensor)
    array[0, 0] = 7.0
    assert tensor[0, 0] == 7.0
    assert array.tolist() == tensor.tolist()
    assert tensor.untyped_storage().resizable()


class Flattens(Callback):
    """Makes all weights views of one vector in mid-run, which it then writes to."""

    def __init__(self) -> None:
        self.vector = torch.empty(0)
        self.are_views: list[bool] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        parameters = list(pl_module.parameters())
        if batch_idx == 5:
            self.vector = torch.cat([parameter.detach().flatten() for parameter in parameters])
            parts = self.vector.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data = part.view(parameter.shape)
        if batch_idx >= 5:
            self.vector.mul_(0.9)
            memory = self.vector.untyped_storage().data_ptr()
            self.are_views.append(all(p.untyped_storage().data_ptr() == memory for p in parameters))


def test_weights_that_become_views_of_one_vector_stay_views() -> None:
    plan = Plan().replace(precision="32-true", report=False, memory_format="channels_last")
    flattens, plugin = Flattens(), AccelPlugin.from_plan(plan)
    with pytest.warns(AccelWarning, match="something else has the memory of its weight"):
        run(Net, plugin, callbacks=[flattens])
    assert len(flattens.are_views) > 2
    assert all(flattens.are_views)
    assert plugin.report.refused("memory_format")["conv"].startswith("something else has the memory of its weight")
