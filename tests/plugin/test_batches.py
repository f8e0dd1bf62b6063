"""Batches of every kind reach the module as the user made them, but for the layout of their images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin
from support.lightning_models import Supervised, cnn, images

pytestmark = pytest.mark.numbers

MakeTrainer = Callable[..., Any]


def channels_last() -> AccelPlugin:
    return AccelPlugin(precision="32-true", techniques={"memory_format": "channels_last"})


@dataclass
class Sample:
    image: Tensor
    label: Tensor
    name: str = "x"


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


class Opaque:
    def __init__(self, image: Tensor) -> None:
        self.image = image


IMAGE = torch.randn(2, 3, 8, 8)
LABEL = torch.zeros(2, dtype=torch.long)


class Takes(LightningModule):
    """Trains a convolution on whatever ``read`` finds in the batch, and keeps the batches it saw."""

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.seen: list[Any] = []
        self._read = read

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        return self.conv(self._read(batch)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (IMAGE, lambda b: b),
        ((IMAGE, LABEL), lambda b: b[0]),
        ([IMAGE, None, "text"], lambda b: b[0]),
        ({"image": IMAGE, "meta": {"name": ["a", "b"], "none": None}}, lambda b: b["image"]),
        ({"nested": [{"deep": (IMAGE, LABEL)}]}, lambda b: b["nested"][0]["deep"][0]),
        (Sample(IMAGE, LABEL), lambda b: b.image),
        (Pair(IMAGE, LABEL), lambda b: b.image),
        ((Sample(IMAGE, LABEL), {"pair": Pair(IMAGE, LABEL)}), lambda b: b[1]["pair"].image),
    ],
    ids=["tensor", "tuple", "list", "dict", "nested", "dataclass", "namedtuple", "mixed"],
)
def test_images_stay_as_they_are_wherever_they_sit(make_trainer: MakeTrainer, batch: Any, read: Any) -> None:
    module = Takes(read)
    make_trainer(plugins=[channels_last()]).fit(module, DataLoader([batch] * 3, batch_size=None))
    assert all(read(seen).is_contiguous() for seen in module.seen)
    assert all(torch.equal(read(seen), IMAGE) for seen in module.seen)


@pytest.mark.parametrize(
    "batch", [["a", "b"], "text", 3, Opaque(IMAGE), {"k": object()}, []], ids=lambda batch: type(batch).__name__
)
def test_what_is_no_tensor_arrives_as_it_was(make_trainer: MakeTrainer, batch: Any) -> None:
    module = Takes(lambda _: IMAGE)
    make_trainer(plugins=[channels_last()]).fit(module, DataLoader([batch] * 3, batch_size=None))
    assert len(module.seen) == 3
    assert all(type(seen) is type(batch) for seen in module.seen)


def test_a_callers_own_batch_is_not_written_to(make_trainer: MakeTrainer) -> None:
    mine = [(IMAGE.clone(), LABEL)]
    make_trainer(plugins=[channels_last()]).fit(Takes(lambda b: b[0]), DataLoader(mine, batch_size=None))
    assert mine[0][0].is_contiguous()
    assert torch.equal(mine[0][0], IMAGE)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
def test_a_step_that_takes_the_iterator_runs(make_trainer: MakeTrainer) -> None:
    class Iterates(Supervised):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    module = Iterates(cnn())
    make_trainer(plugins=[channels_last()]).fit(module, images())
    assert len(module.losses) == 4


def test_a_module_that_moves_its_batches_itself(make_trainer: MakeTrainer) -> None:
    class Moves(Supervised):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return [thing.to(device) for thing in batch]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] * 2, batch[1]

    module = Moves(cnn())
    make_trainer(plugins=[channels_last()]).fit(module, images())
    assert len(module.losses) == 4


class Views(Supervised):
    """Takes an activation apart with ``view``, which channels_last does not allow."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        rows = self.net[0](x).view(x.size(0), -1).mean()
        return F.cross_entropy(self.net(x), y) + 0 * rows


@pytest.mark.filterwarnings("ignore:memory_format was asked for and is not in force")
def test_a_step_that_views_an_activation_trains_and_says_where(make_trainer: MakeTrainer) -> None:
    torch.manual_seed(0)
    plain = Views(cnn())
    torch.manual_seed(0)
    module = Views(cnn())
    make_trainer().fit(plain, images(), images())
    plugin = channels_last()
    make_trainer(plugins=[plugin]).fit(module, images(), images())
    assert module.losses == pytest.approx(plain.losses, rel=1e-5)
    refused = plugin.report.refused("memory_format")
    assert "net.0" in refused
    assert all(reason.startswith(__file__) for reason in refused.values())  # not a line of Lightning's, or of ours


@pytest.mark.parametrize("kind", ["forward", "step"])
def test_metrics_are_updated_once_a_step(make_trainer: MakeTrainer, kind: str) -> None:
    class Measures(Supervised):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.mean = torchmetrics.MeanMetric()

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            if kind == "forward":
                self.mean.update(x.detach())
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if kind == "step":
                self.mean.update(loss.detach())
            return loss

    module = Measures(cnn())
    make_trainer(plugins=[channels_last()]).fit(module, images())
    assert module.mean.weight == (4 * 4 * 3 * 64 if kind == "forward" else 4)


@pytest.mark.parametrize("memory_format", ["auto", "channels_last"])
def test_logged_metrics_are_those_of_a_plain_run(make_trainer: MakeTrainer, memory_format: Any) -> None:
    class Logs(Supervised):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            self.log("sum", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
            self.log_dict({"mean": x.detach().mean()}, on_step=False, on_epoch=True)
            return self.net(x)

    logged = []
    for plugins in ([], [AccelPlugin(precision="32-true", techniques={"memory_format": memory_format}, report=False)]):
        torch.manual_seed(0)
        trainer = make_trainer(plugins=plugins)
        trainer.fit(Logs(cnn()), images())
        logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})
    assert logged[0]["sum"] == 4
    assert logged[1] == pytest.approx(logged[0], rel=1e-5)


def test_predictions_come_back_in_the_layout_a_plain_run_gives() -> None:
    class Segmenter(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Conv2d(3, 4, 3)

        def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            return {"maps": self.net(batch)}

    plugin = AccelPlugin(precision="32-true", techniques={"memory_format": "channels_last"})
    trainer = Trainer(plugins=[plugin], accelerator="cpu", logger=False, enable_progress_bar=False)
    predictions = trainer.predict(Segmenter(), DataLoader(torch.randn(4, 3, 8, 8), batch_size=2))
    assert plugin.report.applied("memory_format") == ["net"]
    assert predictions is not None
    assert all(batch["maps"].is_contiguous() for batch in predictions)
