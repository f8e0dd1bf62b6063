"""What is said to someone whose training waits for its data."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.core import clocks as _clocks
from lightning_accel.data import DevicePipeline, Map, Preprocess
from lightning_accel.data.advice import has_images, waiting_advice
from lightning_accel.data.tuned_loader import LoaderTuning, TunedLoader

DATA = TensorDataset(torch.zeros(8, 2))
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def advice(loader: Any, frac: float = 0.5, device: torch.device = CPU, **options: Any) -> str:
    return "\n".join(waiting_advice([loader], frac, device, **{"preprocesses": False, "cores": 4, **options}))


def test_a_tenth_of_the_time_is_no_reason_to_say_anything() -> None:
    assert advice(DataLoader(DATA), frac=0.1) == ""


def test_the_wait_comes_first() -> None:
    assert advice(DataLoader(DATA), frac=0.43).startswith("43% of the training time")


def test_loading_in_the_main_process_is_advised_to_get_workers_that_stay() -> None:
    assert "DataLoader(..., num_workers=3, persistent_workers=True) instead of num_workers=0" in advice(
        DataLoader(DATA)
    )


def test_one_core_is_left_to_the_training() -> None:
    assert "num_workers=1," in advice(DataLoader(DATA), cores=2)
    assert "num_workers=1," in advice(DataLoader(DATA), cores=1)


def test_few_workers_are_advised_to_become_more() -> None:
    assert "num_workers=3) instead of 1" in advice(DataLoader(DATA, num_workers=1))
    assert "instead of" not in advice(DataLoader(DATA, num_workers=1), cores=2)


def test_workers_started_every_epoch_are_advised_to_stay() -> None:
    assert "persistent_workers=True)" in advice(DataLoader(DATA, num_workers=1))
    assert "persistent" not in advice(DataLoader(DATA, num_workers=1, persistent_workers=True))


def test_pinned_memory_is_advised_where_a_gpu_copies_from_it() -> None:
    loader = DataLoader(DATA, num_workers=1, persistent_workers=True)
    assert "pin_memory=True" in advice(loader, device=CUDA)
    assert "pin_memory" not in advice(loader, device=CPU)
    assert "pin_memory" not in advice(loader, device=CUDA, preprocesses=True), "the pipeline pins memory itself"


def test_preprocessing_on_the_device_is_advised_to_those_who_do_not() -> None:
    assert "AccelPlugin(preprocess=[" in advice(DataLoader(DATA))
    assert "AccelPlugin(preprocess=[" not in advice(DataLoader(DATA), preprocesses=True)


def test_where_nothing_is_amiss_it_says_where_else_to_look() -> None:
    said = advice(DataLoader(DATA, num_workers=1, persistent_workers=True), cores=2, preprocesses=True)
    assert "what is left is the dataset's own __getitem__" in said


def test_a_loader_that_is_no_dataloader_is_told_of_nothing_that_it_lacks() -> None:
    assert "DataLoader(" not in advice(iter([1, 2]))


def test_slow_transforms_are_not_blamed_on_the_loader() -> None:
    def slow(xp: Any, batch: Any) -> Any:
        time.sleep(0.02)
        return batch

    pipeline = DevicePipeline(DataLoader(DATA, batch_size=4), "cpu", Preprocess([Map(slow)]))
    list(pipeline)
    said = advice(pipeline, preprocesses=True)
    assert "it waits for the transforms" in said
    assert "instead of num_workers=0" not in said


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SimulatedTime:
    """Passes only when a test says so."""

    now_ms = 0.0

    def perf_counter_ns(self) -> int:
        return round(self.now_ms * 1e6)


class Timed(TensorDataset):
    """Takes simulated time to load."""

    def __init__(self, time: SimulatedTime, fetch_ms: float) -> None:
        super().__init__(torch.zeros(64, 2))
        self.time, self.fetch_ms = time, fetch_ms

    def __getitem__(self, index: int) -> Any:
        self.time.now_ms += self.fetch_ms
        return super().__getitem__(index)


@pytest.mark.parametrize(("fetch_ms", "is_advised"), [(5.0, True), (0.1, False)])
def test_a_run_that_waits_has_the_advice_in_its_report(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, fetch_ms: float, is_advised: bool
) -> None:
    time = SimulatedTime()
    monkeypatch.setattr(_clocks, "perf_counter_ns", time.perf_counter_ns)

    class Slow(Linear):
        def on_train_batch_start(self, *args: Any) -> None:
            time.now_ms += 10

    plugin = AccelPlugin()
    trainer: Trainer = make_trainer(plugins=[plugin], max_epochs=2)
    trainer.fit(Slow(), DataLoader(Timed(time, fetch_ms), batch_size=2))
    assert ("of the training time was spent waiting" in plugin.report.summary()) == is_advised
    assert plugin.report.summary().count("spent waiting") == int(is_advised), "said once, not every epoch"


def test_a_loader_that_is_tuned_needs_no_advice_on_workers() -> None:
    said = advice(TunedLoader(LoaderTuning(DataLoader(DATA), torch.device("cpu"), lambda line, is_changed: None)))
    assert 'loader="auto" tries from the next epoch on' in said
    assert "num_workers" not in said


def test_nothing_is_said_of_images_where_there_are_none() -> None:
    assert "uint8" in advice(DataLoader(DATA), has_images=True)
    assert "uint8" not in advice(DataLoader(DATA), has_images=False)


def test_whoever_does_not_make_the_loader_is_not_told_of_its_arguments() -> None:
    loader = DataLoader(DATA, num_workers=1)
    assert advice(loader, makes_loaders=False, has_images=False) == ""
    told = advice(DataLoader(DATA), makes_loaders=False)
    assert "num_workers" not in told
    assert 'AccelPlugin(loader="auto")' in told


@pytest.mark.parametrize(
    ("shape", "is_image"),
    [((2, 3, 8, 8), True), ((2, 8, 8, 1), True), ((2, 64, 8, 8), False), ((2, 3, 8), False), ((2, 8, 1, 1), False)],
)
def test_images_are_known_by_their_channels(shape: tuple[int, ...], is_image: bool) -> None:
    assert has_images([torch.zeros(shape)]) is is_image
