"""All kinds of modules, beside all kinds of callbacks and options, train as they do without the plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.lightning_models import Supervised, cnn, footprint, images

pytestmark = pytest.mark.numbers

MakeTrainer = Callable[..., Any]


BLOCKS = {"mode": "full", "blocks": ["net.0", "net.3"]}


def everything(**settings: Any) -> AccelPlugin:
    """Acts on a CNN in every way that does not depend on a clock."""
    given = {
        "precision": "32-true",
        "memory_format": "channels_last",
        "gradient_checkpointing": BLOCKS,
    }
    return AccelPlugin.from_plan(Plan().replace(**{**given, **settings}))


# -- all kinds of modules -----------------------------------------------------------------------------------------


def test_layers_made_in_configure_model_are_found(make_trainer: MakeTrainer) -> None:
    class Late(Supervised):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def configure_model(self) -> None:
            if isinstance(self.net, nn.Identity):
                self.net = cnn()

    module, plugin = Late(), everything()
    make_trainer(plugins=[plugin]).fit(module, images())
    assert plugin.report.applied("memory_format") == ["net.0", "net.3"]


# The same without the plugin, the second in torch 2.11.
@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.parametrize("checkpointing", [pytest.param("off", marks=pytest.mark.slow), "full"])
def test_a_compiled_lightning_module_trains_as_a_plain_one(make_trainer: MakeTrainer, checkpointing: str) -> None:
    losses = []
    for plugins in ([], [everything(memory_format="auto", gradient_checkpointing=dict(BLOCKS, mode=checkpointing))]):
        torch.manual_seed(0)
        module = Supervised(cnn())
        before = footprint(module)
        make_trainer(plugins=plugins).fit(torch.compile(module, backend="eager"), images())
        assert all(footprint(module)[name] == before[name] for name in before if name)
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_compiled_network_inside_the_module_trains(make_trainer: MakeTrainer) -> None:
    module = Supervised(cnn())
    module.net = torch.compile(module.net, backend="eager")
    before = footprint(module)
    plugin = AccelPlugin(precision="32-true", techniques={"memory_format": "channels_last"})
    with pytest.warns(UserWarning, match="found no site"):
        make_trainer(plugins=[plugin]).fit(module, images())
    assert footprint(module) == before
    assert "compile" in plugin.report.refused("memory_format")["net._orig_mod.0"]


def test_frozen_parameters_stay_frozen_and_unchanged(make_trainer: MakeTrainer) -> None:
    module = Supervised(cnn())
    module.net[0].requires_grad_(False)
    frozen = module.net[0].weight.detach().clone()
    make_trainer(plugins=[everything()]).fit(module, images())
    assert torch.equal(module.net[0].weight, frozen)
    assert not module.net[0].weight.requires_grad


def test_tied_weights_stay_tied(make_trainer: MakeTrainer) -> None:
    class Tied(Supervised):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1)))
            self.net[2].weight = self.net[0].weight

        def loss(self, batch: Any) -> Tensor:
            assert self.net[2].weight is self.net[0].weight
            return self.net(batch[0]).pow(2).mean()

    module = Tied()
    before = footprint(module)
    plugin = everything(gradient_checkpointing="off")
    make_trainer(plugins=[plugin]).fit(module, images())
    assert module.net[2].weight is module.net[0].weight
    assert footprint(module) == before


def test_layers_directly_on_the_module_whose_forward_is_called(make_trainer: MakeTrainer) -> None:
    plain, accelerated = make_direct(), make_direct()
    make_trainer().fit(plain, images())
    plugin = AccelPlugin(precision="32-true", techniques={"memory_format": "channels_last"})
    make_trainer(plugins=[plugin]).fit(accelerated, images())
    assert accelerated.losses == pytest.approx(plain.losses, rel=1e-5)
    assert plugin.report.applied("memory_format") == ["conv"]


def test_layers_directly_on_the_module_called_by_its_training_step(make_trainer: MakeTrainer) -> None:
    class NoForward(Direct):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.head(self.conv(batch[0]).relu().flatten(1)), batch[1])
            self.losses.append(float(loss.detach()))
            return loss

    plain, accelerated = make_direct(NoForward), make_direct(NoForward)
    make_trainer().fit(plain, images())
    plugin = AccelPlugin(precision="32-true", techniques={"memory_format": "channels_last"})
    make_trainer(plugins=[plugin]).fit(accelerated, images())
    assert accelerated.losses == pytest.approx(plain.losses, rel=1e-5)
    assert plugin.report.applied("memory_format") == ["conv"]


class Direct(Supervised):
    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.log("activation", x.mean(), on_step=False, on_epoch=True)
        return self.head(self.conv(x).relu().flatten(1))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


def make_direct(kind: type[Direct] = Direct) -> Direct:
    torch.manual_seed(0)
    return kind()


# -- beside other callbacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "averaging",
    [
        lambda: EMAWeightAveraging(decay=0.5),
        lambda: WeightAveraging(),
        lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
    ],
    ids=["ema", "average", "swa"],
)
def test_averaged_weights_are_those_of_a_plain_run(make_trainer: MakeTrainer, averaging: Any) -> None:
    results = []
    for plugins in ([], [everything()]):
        torch.manual_seed(0)
        module = Supervised(cnn())
        before = footprint(module)
        make_trainer(plugins=plugins, callbacks=[averaging()], max_epochs=3).fit(module, images(), images())
        assert footprint(module) == before
        results.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_the_learning_rate_finder_runs(make_trainer: MakeTrainer) -> None:
    class Tunable(Supervised):
        lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module = Tunable(cnn())
    before = footprint(module)
    trainer = make_trainer(plugins=[everything()])
    Tuner(trainer).lr_find(module, images(8), num_training=6)
    assert footprint(module) == before
    trainer.fit(module, images())


def test_the_batch_size_finder_runs(make_trainer: MakeTrainer) -> None:
    class Tunable(Supervised):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return images(8, self.batch_size)

        def val_dataloader(self) -> Any:
            return images(1)

    module = Tunable(cnn())
    before = footprint(module)
    trainer = make_trainer(plugins=[everything()])
    assert Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=2) == 4
    assert footprint(module) == before
    trainer.fit(module)


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"barebones": True},
        {"limit_train_batches": 1},
        {"overfit_batches": 1},
        {"detect_anomaly": True},
        {"limit_train_batches": 0},
        {"max_steps": 1},
    ],
    ids=str,
)
def test_the_trainer_option(options: dict[str, Any]) -> None:
    module = Supervised(cnn())
    before = footprint(module)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    quiet |= {"logger": False, "accelerator": "cpu", "max_epochs": 1}
    trainer = Trainer(plugins=[everything()], **{**quiet, **options})
    trainer.fit(module, images(), None if options.get("barebones") else images())
    assert footprint(module) == before


@pytest.mark.usefixtures("determinism_restored")
def test_a_deterministic_run_decides_nothing_by_time(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(precision="32-true")
    make_trainer(plugins=[plugin], deterministic=True).fit(Supervised(cnn()), images())
    assert plugin.report.applied("memory_format") == ["net.0", "net.3"]
    assert "the speed" not in plugin.report.to_text()
