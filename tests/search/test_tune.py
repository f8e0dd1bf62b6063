"""Tuning before a run, by real runs in other processes, of a model whose steps sleep: what is better is sure."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_accel import tune
from lightning_accel.experiment.pair_test import RatioInterval
from lightning_accel.experiment.store import cache_folder
from lightning_accel.search.job import TrialSetup, TuneJob
from lightning_accel.search.search import SearchOutcome
from lightning_accel.search.tune import TuneResult, _places, _result, parse_time
from lightning_accel.tuning.comparison import Result
from support.search_runs import Broken, Empty, Quiet, Samples, Scheduled, Sleeper, Slow, loader, searched, trainer

pytestmark = pytest.mark.numbers


def _files() -> set[str]:
    """In the current folder, beside the cache that a test has of its own."""
    return set(os.listdir()) - {cache_folder().name}


@pytest.mark.slow
def test_the_best_batch_is_found_and_everything_is_as_it_was() -> None:
    model, data, given = Scheduled(), Samples(), trainer(logger=CSVLogger("logs"))
    streams = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    files, threads = _files(), torch.get_num_threads()

    result = tune(model, data, given, time="60s")

    assert result.settings == {"data": {"batch_size": 32}}  # all there is
    assert float(result.ratio.split("x")[0]) > 2
    assert "An optimizer step sees 4x as many samples as before. The learning rate is as it was." in result.notes
    assert (random.getstate(), np.random.get_state()[1].tolist()) == streams[:2]
    assert torch.equal(torch.get_rng_state(), streams[2])
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert (_files(), torch.get_num_threads(), data.batch_size) == (files, threads, 8)
    assert given.global_step == 0

    # A second call has nothing left to ask: it looks whether the run is the same, and that is it.
    again = tune(model, data, given, time="60s")
    assert (again.settings, again.ratio) == (result.settings, result.ratio)

    with pytest.raises(ValueError, match=r"time=0s is too short for one comparison: .* Give at least \d+ s"):
        tune(model, data, given, time=0.01)


@pytest.mark.slow
def test_ctrl_c_keeps_the_best_so_far_and_the_next_search_goes_on() -> None:
    outcome = searched(Sleeper(), loader(), Quiet(wins=1))
    assert outcome.best == TrialSetup(batch_size=16)
    assert not outcome.is_whole
    assert any("a second search goes on from here" in note for note in outcome.notes)
    names = [result.name for result in outcome.results]
    assert names == ["batch_size=16"]
    assert searched(Sleeper(), loader(), Quiet(wins=2)).best == TrialSetup(batch_size=32)


@pytest.mark.slow
def test_a_run_that_does_not_train_says_why() -> None:
    with pytest.raises(ValueError, match=r"The run does not train: RuntimeError: mat1 and mat2 .* nothing was written"):
        searched(Broken(), loader())


@pytest.mark.slow
def test_a_loader_that_ends_before_it_begins_is_said() -> None:
    with pytest.raises(ValueError, match=r"The run does not train: .*loader gave no batch"):
        searched(Sleeper(), DataLoader(Empty(), batch_size=4))


@pytest.mark.slow
def test_a_limit_below_everything_names_the_least() -> None:
    with pytest.raises(ValueError, match=r"memory_limit=1MiB is below what any setup needs here: the least was \d+MiB"):
        searched(Sleeper(), loader(2), limit=1 << 20)


@pytest.mark.slow
def test_a_slow_loader_gets_workers() -> None:
    outcome = searched(Sleeper(), DataLoader(Slow(), batch_size=4), seconds=120.0, keeps=True)
    assert outcome.best.loader["num_workers"] >= 1
    assert outcome.whole is not None
    assert outcome.whole.is_won


@pytest.mark.slow
def test_without_a_batch_size_to_set_the_search_says_so() -> None:
    class Own(DataLoader[Any]):
        pass

    outcome = searched(Sleeper(), Own(loader().dataset, batch_size=8))
    assert outcome.best == TrialSetup()
    assert any("batch_size was not tried" in note for note in outcome.notes)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("3min", 180), ("1h", 3600), (1.5, 1.5), (" 2 m ", 120)])
def test_times_are_written_as_people_write_them(text: Any, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("value", ["", "3", "-3s", "3 days", 0, -1, float("nan"), float("inf"), True])
def test_a_bad_time_is_named_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(ValueError, match=r"time=.* is not possible\. Allowed: '90s', '3min', '1h'"):
        parse_time(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "fast"}, r"objective='fast'.* Allowed: 'speed', 'memory', 'balanced'"),
        ({"memory_limit": "much"}, "memory_limit='much' is no amount of memory"),
        ({"time": "soon"}, "time='soon' is not possible"),
    ],
)
def test_a_bad_value_is_named_before_anything_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune(Sleeper(), loader(), trainer(), **options)


def test_what_is_found_is_a_configuration() -> None:
    given: dict[str, Any] = {"has_compared": True, "is_whole": True, "table": "", "notes": ()}
    changed: dict[str, Any] = {"settings": {"data": {"batch_size": 32}}, "environment": {"LD_PRELOAD": "libx.so"}}
    result = TuneResult(**given, **changed, has_changes=True, ratio="2.00x [1.90, 2.10]", memory=1.1)
    text = result.to_yaml()
    assert yaml.safe_load(text) == {"data": {"batch_size": 32}}
    assert "2.00x [1.90, 2.10] the samples a second, 1.10x the memory" in text
    assert "# Not settings: start with LD_PRELOAD=libx.so" in text
    assert '# environment: {"LD_PRELOAD": "libx.so"}' in text
    nothing = TuneResult(**given, settings={}, environment={}, has_changes=False, ratio="", memory=1.0)
    assert yaml.safe_load(nothing.to_yaml()) == {"accel": {}}
    assert nothing.line() == "as it is: nothing that was tried is better for sure"


def test_what_no_configuration_has_a_place_for_is_said() -> None:
    outcome = SearchOutcome(
        best=TrialSetup(batch_size=32), results=[Result("batch_size=32", "faster", RatioInterval(2.0, 1.9, 2.1), 20)]
    )
    found = _result(outcome, TuneJob.of(Sleeper(), Samples(), trainer()), places={})
    assert found.settings == {}
    assert found.has_changes
    assert "batch_size=32 has to be written by hand: no configuration has a place for it." in found.notes


def test_hyperparameters_are_a_place() -> None:
    data = Samples()
    del data.batch_size
    assert _places(TuneJob.of(Sleeper(), data, trainer()))["batch_size"] == [("data", "batch_size")]
