"""What is tuned, and how a copy of it is changed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler

from lightning_accel import AccelPlugin, Plan
from lightning_accel.search.job import TrialSetup, TuneJob, read
from support.search_runs import Empty, Samples, Sleeper, loader, samples, trainer


def test_a_loader_is_remade_with_its_own_arguments() -> None:
    given = DataLoader(samples(), 8, sampler=WeightedRandomSampler([1.0] * 32, 32), drop_last=True)
    job = TuneJob.of(Sleeper(), given, trainer())
    job.set_up(TrialSetup(batch_size=16, loader={"num_workers": 1}))
    assert isinstance(job.data, DataLoader)
    assert (job.data.batch_size, job.data.num_workers, job.data.drop_last) == (16, 1, True)
    assert job.data.sampler is given.sampler
    assert given.batch_size == 8


def test_a_data_modules_attributes_and_hyperparameters_are_set() -> None:
    job = TuneJob.of(Sleeper(), Samples(), trainer())
    assert (job.batch_size, job.loader_settings) == (8, {"num_workers": 0})
    job.set_up(TrialSetup(batch_size=16))
    assert isinstance(job.data, Samples)
    assert (job.data.batch_size, job.data.hparams["batch_size"]) == (16, 16)


def test_a_module_with_loaders_of_its_own_has_the_batch_size() -> None:
    model = Sleeper()
    model.batch_size = 4
    job = TuneJob.of(model, None, trainer())
    assert job.batch_size == 4
    job.set_up(TrialSetup(batch_size=2))
    assert model.batch_size == 2


def test_a_loader_of_somebody_elses_making_is_left_alone() -> None:
    class Own(DataLoader):  # type: ignore[type-arg]
        pass

    job = TuneJob.of(Sleeper(), Own(samples(), 8), trainer())
    assert job.batch_size is None
    assert job.loader_settings == {}


def test_a_loader_of_a_stream_is_remade_without_the_sampler_that_it_does_not_take() -> None:
    job = TuneJob.of(Sleeper(), DataLoader(Empty(), 8), trainer())
    job.set_up(TrialSetup(batch_size=16))
    assert isinstance(job.data, DataLoader)
    assert job.data.batch_size == 16


def test_batches_of_somebody_elses_making_stay_as_they_are() -> None:
    sampler = BatchSampler(SequentialSampler(samples()), 8, drop_last=False)
    job = TuneJob.of(Sleeper(), DataLoader(samples(), batch_sampler=sampler), trainer())
    assert job.loader_settings == {}


@pytest.mark.filterwarnings("ignore:`max_epochs` was not set")
@pytest.mark.parametrize(
    ("options", "epochs"), [({"max_epochs": None}, 1000), ({"max_epochs": None, "max_steps": 5}, -1)]
)
def test_a_run_without_an_end_has_the_one_that_lightning_gives_it(options: dict[str, Any], epochs: int) -> None:
    assert TuneJob.of(Sleeper(), loader(), trainer(**options)).max_epochs == epochs


def test_settings_of_the_trainer_and_its_plugin_are_read() -> None:
    job = TuneJob.of(Sleeper(), loader(), trainer(accumulate_grad_batches=3, gradient_clip_val=0.5, max_epochs=7))
    assert (job.accumulate, job.options["gradient_clip_val"], job.max_epochs) == (3, 0.5, 7)
    assert job.plan == Plan(compile="off", techniques={"threads": 1})


def test_nothing_is_decided_by_the_clock_within_a_run_on_trial() -> None:
    job = TuneJob.of(Sleeper(), loader(), trainer())
    job.set_up(TrialSetup(plan={"compile": "on"}))
    assert job.plan == Plan(compile="on", techniques={"threads": 1}, trust="checked", report=False)


def test_what_is_read_in_another_process_is_a_copy(tmp_path: Path) -> None:
    job = TuneJob.of(Sleeper(), Samples(), trainer())
    job.write(tmp_path / "job")
    again = read(tmp_path / "job")
    with torch.no_grad():
        again.model.net.weight.zero_()
    assert bool(job.model.net.weight.any())
    assert again.plan == job.plan


def test_what_cannot_be_copied_is_said(tmp_path: Path) -> None:
    model = Sleeper()
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be copied: .*lock.* make it where it is first used"):
        TuneJob.of(model, loader(), trainer()).write(tmp_path / "job")


def test_data_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"data is of type list. Allowed: a LightningDataModule, a DataLoader"):
        TuneJob.of(Sleeper(), [1, 2], trainer())


def test_the_plugin_stays_the_users() -> None:
    given = trainer()
    TuneJob.of(Sleeper(), loader(), given).set_up(TrialSetup(plan={"compile": "on"}))
    assert isinstance(given.precision_plugin, AccelPlugin)
    assert given.precision_plugin.plan == Plan(compile="off", techniques={"threads": 1})
