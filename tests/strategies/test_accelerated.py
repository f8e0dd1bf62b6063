"""What every accel strategy brings: the plugin, the pipeline, checkpoints that are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from torch.utils.data import DataLoader, DistributedSampler

from lightning_accel import AccelDDPStrategy, AccelFSDPStrategy, AccelPlugin, AccelStrategy
from lightning_accel.data import DevicePipeline, Normalize
from lightning_accel.resilience.atomic_checkpoint import AtomicCheckpointIO
from lightning_accel.settings import Plan
from support.lightning_models import Supervised, cnn, images

pytestmark = pytest.mark.numbers

NAMES = ("accel", "accel_ddp", "accel_fsdp")
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def plugin_of(**options: Any) -> Precision:
    return Trainer(**{**QUIET, **options}).precision_plugin


@pytest.mark.parametrize("strategy", NAMES)
def test_a_plugin_is_brought_when_none_is_given(strategy: str) -> None:
    plugin = plugin_of(strategy=strategy)
    assert isinstance(plugin, AccelPlugin)
    assert plugin.plan.precision == "auto"


def test_lightning_keeps_no_trace_of_whether_32_true_was_asked_for() -> None:
    """If it comes to keep one, the look into the frame of the Trainer can go."""

    def traces(**options: Any) -> dict[str, Any]:
        trainer: Any = Trainer(**QUIET, **options)
        owners = trainer, trainer._accelerator_connector, trainer.strategy, trainer.precision_plugin
        told = {f"{type(one).__name__}.{name}": value for one in owners for name, value in vars(one).items()}
        return {name: value for name, value in told.items() if isinstance(value, str | int | float | None)}

    assert traces(precision="32-true") == traces()


@pytest.mark.parametrize("strategy", [AccelStrategy, AccelDDPStrategy, AccelFSDPStrategy])
def test_a_strategy_that_was_made_by_hand_brings_it_too(strategy: type) -> None:
    assert isinstance(plugin_of(strategy=strategy()), AccelPlugin)


def test_a_plugin_that_is_given_stays() -> None:
    given = AccelPlugin(precision="32-true")
    assert plugin_of(strategy="accel", plugins=[given]) is given


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_trainer_s_precision_is_the_plugin_s(precision: Any) -> None:
    """Lightning hands a strategy the same plugin for "32-true" and for nothing, of which one is a wish."""
    plugin = plugin_of(strategy="accel", precision=precision)
    assert isinstance(plugin, AccelPlugin)
    assert plugin.plan.precision == precision


def test_a_precision_that_the_plugin_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"precision='64-true'\) with AccelStrategy: its AccelPlugin takes 'auto'"):
        Trainer(**QUIET, strategy="accel", precision="64-true")


@pytest.mark.parametrize("given", [DoublePrecision(), MixedPrecision("bf16-mixed", "cpu")])
def test_another_precision_plugin_takes_its_place(given: Precision) -> None:
    assert plugin_of(strategy="accel", plugins=[given]) is given


def test_a_misspelt_name_is_refused() -> None:
    with pytest.raises(ValueError, match="You selected an invalid strategy name: `strategy='accel_dpp'`"):
        Trainer(**QUIET, strategy="accel_dpp")


def test_accel_takes_the_device_that_the_trainer_found() -> None:
    assert Trainer(**QUIET, strategy="accel").strategy.root_device == torch.device("cpu")


def test_accel_keeps_the_device_that_it_was_given() -> None:
    assert Trainer(**QUIET, strategy=AccelStrategy("meta")).strategy.root_device == torch.device("meta")


@pytest.mark.parametrize(("setting", "value"), [("devices", 2), ("num_nodes", 2)])
def test_accel_trains_in_one_process(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{setting}={value}.*: accel trains in one process"):
        Trainer(**{**QUIET, setting: value}, strategy="accel")


def test_of_several_gpus_accel_takes_the_first_and_says_so() -> None:
    """What Lightning does where it finds four; none has to be here for that."""
    strategy = AccelStrategy()
    with pytest.warns(UserWarning, match="accel trains on one device: it takes cuda:0, the first of 4"):
        strategy.parallel_devices = [torch.device("cuda", index) for index in range(4)]
    assert strategy.root_device == torch.device("cuda", 0)


@pytest.mark.parametrize("settings", [{}, {"preprocess": [Normalize(0.5, 0.5)]}])
def test_loaders_come_through_the_device_pipeline(settings: dict[str, Any]) -> None:
    kinds: list[type] = []

    class Watching(Supervised):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            kinds.append(type(self.trainer.fit_loop._combined_loader.flattened[0]))  # type: ignore[union-attr]

    trainer = Trainer(
        **QUIET,
        strategy="accel",
        max_steps=1,
        plugins=[AccelPlugin.from_plan(Plan().replace(report=False, **settings))],
    )
    loader = images()
    trainer.fit(Watching(cnn()), loader)
    assert issubclass(kinds[0], DevicePipeline)
    assert trainer.train_dataloader is loader


def test_numbers_are_those_of_lightning_s_own_strategy() -> None:
    losses = []
    for strategy in ("auto", "accel"):
        torch.manual_seed(0)
        module = Supervised(cnn())
        plugin = AccelPlugin(precision="32-true", techniques={"memory_format": "off"}, report=False)
        Trainer(**QUIET, strategy=strategy, plugins=[plugin], max_epochs=2).fit(module, images())
        losses.append(module.losses)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("strategy", NAMES)
def test_checkpoints_are_written_whole(strategy: str) -> None:
    assert type(Trainer(**QUIET, strategy=strategy).strategy.checkpoint_io) is AtomicCheckpointIO


def test_a_checkpoint_io_that_is_given_stays() -> None:
    given = TorchCheckpointIO()
    assert Trainer(**QUIET, strategy="accel", plugins=[given]).strategy.checkpoint_io is given


def test_one_that_wraps_another_wraps_ours() -> None:
    wrapping = AsyncCheckpointIO()
    io = Trainer(**QUIET, strategy="accel", plugins=[wrapping]).strategy.checkpoint_io
    assert io is wrapping
    assert type(wrapping.checkpoint_io) is AtomicCheckpointIO
    wrapping.teardown()


def test_fewer_samples_than_processes_are_refused() -> None:
    strategy = AccelStrategy()
    loader = images(batches=1, batch_size=3)
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, num_replicas=4, rank=0)
    with pytest.raises(ValueError, match="has 3 samples for 4 processes: some would get none"):
        strategy.process_dataloader(DataLoader(loader.dataset, sampler=sampler))


def test_a_batch_sampler_that_gives_some_processes_nothing_on_purpose_is_let_be() -> None:
    """As Lightning's own is, by which predictions go over every sample once."""

    class Wrapper:
        def __init__(self, sampler: DistributedSampler[Any]) -> None:
            self.sampler = sampler

        def __iter__(self) -> Iterator[list[int]]:
            return iter(())

    strategy = AccelStrategy()
    dataset = images(batches=1, batch_size=3).dataset
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=4, rank=0)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=Wrapper(sampler))  # type: ignore[arg-type]
    strategy.process_dataloader(loader)


def test_a_checkpoint_goes_to_a_plain_trainer_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Supervised(cnn())
    plugins = {"plugins": [AccelPlugin(precision="32-true", report=False)]}
    trainer = Trainer(**QUIET, strategy="accel", max_epochs=1, **plugins)
    trainer.fit(module, images())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    plain = Trainer(**QUIET, max_epochs=2)
    plain.fit(module, images(), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    plain.save_checkpoint(tmp_path / "two.ckpt")
    plugins = {"plugins": [AccelPlugin(precision="32-true", report=False)]}
    Trainer(**QUIET, strategy="accel", max_epochs=3, **plugins).fit(
        module, images(), ckpt_path=tmp_path / "two.ckpt", weights_only=False
    )
    assert len(module.losses) == 12
