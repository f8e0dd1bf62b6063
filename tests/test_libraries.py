"""Libraries that make the Trainer themselves, of ``pytorch_lightning``, given the plugin through their own arguments.

Not among what a clone installs: make test-libraries. How fast they are with it: benchmarks/downstream.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # theirs are not ours to mend

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
QUIET |= {"logger": False, "enable_checkpointing": False}


@pytest.fixture(autouse=True)
def _drawn_data_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")


def edited(plugin: Any) -> set[str]:
    """The techniques that have done something, and did not only watch."""
    return {name for name, technique in plugin.report.techniques.items() if technique.changes}


@pytest.fixture(scope="module")
def neuralforecast() -> Any:
    """Imported before the test, which Ray and others then leave variables of theirs behind."""
    pytest.importorskip("neuralforecast")
    import neuralforecast.models

    return neuralforecast


def test_neuralforecast(neuralforecast: Any) -> None:
    """Models pass on to the Trainer whatever they do not know."""
    from _downstream_data import frame

    plugin = AccelPlugin(precision="32-true", trust="checked")
    model = neuralforecast.models.NHITS(h=12, input_size=48, max_steps=20, plugins=[plugin], **QUIET)
    forecast = neuralforecast.NeuralForecast([model], freq="h")
    forecast.fit(frame())
    assert "optimizer" in edited(plugin)
    assert len(forecast.predict()) == 8 * 12


def test_darts() -> None:
    """It tells the Trainer its precision, beside which no plugin may say another: the strategy brings the plugin."""
    pytest.importorskip("darts")
    from _downstream_data import wave
    from darts.models import NBEATSModel

    arguments = {**QUIET, "strategy": "accel"}
    model = NBEATSModel(input_chunk_length=36, output_chunk_length=12, n_epochs=2, pl_trainer_kwargs=arguments)
    model.fit(wave())
    plugin = model.trainer.precision_plugin
    assert isinstance(plugin, AccelPlugin)
    assert plugin.precision == "32-true"
    assert len(model.predict(12)) == 12


def test_lightly(tmp_path: Path) -> None:
    """Its embedding takes the Trainer's arguments as a dictionary."""
    pytest.importorskip("lightly")
    from lightly.data import LightlyDataset
    from lightly.embedding import SelfSupervisedEmbedding
    from lightly.loss import NTXentLoss
    from lightly.transforms import SimCLRTransform
    from torchvision.datasets import FakeData
    from torchvision.models import resnet18

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = resnet18(num_classes=32)

        def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
            return self.net(one), self.net(other)

    model, plugin = Pair(), AccelPlugin(precision="32-true", trust="checked")
    images = LightlyDataset.from_torch_dataset(FakeData(32, (3, 32, 32)), transform=SimCLRTransform(input_size=32))
    optimizer = torch.optim.AdamW(model.parameters())
    embedding = SelfSupervisedEmbedding(model, NTXentLoss(), optimizer, DataLoader(images, batch_size=8))
    arguments = {"accelerator": "cpu", "logger": False, "max_epochs": 2, "plugins": [plugin]}
    trainer = embedding.train_embedding(arguments, {"dirpath": str(tmp_path)}, {"max_depth": 1})
    assert trainer.global_step == 8
    assert {"memory_format", "optimizer"} <= edited(plugin)
