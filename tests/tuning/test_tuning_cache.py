"""Decisions that outlive a run, in the user's cache folder."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_accel.experiment.pair_test import RatioInterval
from lightning_accel.techniques.arms import Arm
from lightning_accel.tuning import tuning_cache
from lightning_accel.tuning.comparison import Result
from lightning_accel.tuning.tuning_cache import DamagedError, Key
from lightning_accel.tuning.tuning_result import Tuning

ARMS = [Arm("attention", ("on",), lambda choice: None)]
WHOLE = Result("whole plan", "faster", RatioInterval(1.3, 1.2, 1.4), 24)
SETTLED = Tuning({"attention": "on"}, {"attention": WHOLE}, WHOLE, is_settled=True)


@pytest.fixture
def cache() -> Path:
    return tuning_cache.folder()


def key_of(width: int = 4, batch: int = 8, host: str = "a CPU") -> Key:
    return Key.of(nn.Linear(width, 2), torch.zeros(batch, width), host, ARMS)


def test_what_is_remembered_comes_back_as_an_earlier_runs() -> None:
    tuning_cache.remember(key_of(), SETTLED)
    assert tuning_cache.recall(key_of()) == replace(SETTLED, is_earlier=True)


@pytest.mark.parametrize("other", [{"width": 5}, {"batch": 64}, {"host": "another CPU"}])
def test_another_model_batch_or_machine_is_another_run(other: dict[str, object]) -> None:
    tuning_cache.remember(key_of(), SETTLED)
    assert tuning_cache.recall(key_of(**other)) is None  # type: ignore[arg-type]


def test_batches_of_about_the_same_size_are_the_same_run() -> None:
    tuning_cache.remember(key_of(batch=5), SETTLED)
    assert tuning_cache.recall(key_of(batch=8)) is not None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": {}}', "null"])
def test_a_damaged_file_is_named(cache: Path, content: str) -> None:
    tuning_cache.remember(key_of(), SETTLED)
    (path,) = cache.glob("*.json")
    path.write_text(content)
    with pytest.raises(DamagedError, match=str(path)):
        tuning_cache.recall(key_of())
    assert [type(entry) for entry in tuning_cache.entries()] == [DamagedError]


def test_a_file_of_another_run_is_not_taken_for_ones_own(cache: Path) -> None:
    tuning_cache.remember(key_of(), SETTLED)
    (path,) = cache.glob("*.json")
    content = json.loads(path.read_text())
    content["key"]["host"] = "somebody else's"
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedError, match="another model or machine"):
        tuning_cache.recall(key_of())


def test_nothing_half_written_is_left_where_the_disk_is_full(cache: Path) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            tuning_cache.remember(key_of(), SETTLED)
    assert list(cache.iterdir()) == []


def test_all_is_listed_and_cleared(cache: Path) -> None:
    tuning_cache.remember(key_of(), SETTLED)
    tuning_cache.remember(key_of(width=5), SETTLED)
    listed = list(tuning_cache.entries())
    assert [entry.tuning for entry in listed if not isinstance(entry, DamagedError)] == [SETTLED, SETTLED]
    assert tuning_cache.clear() == 2
    assert list(tuning_cache.entries()) == []


def test_without_a_folder_of_its_own_it_is_the_users_cache(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("LIGHTNING_ACCEL_CACHE")
        environment.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert tuning_cache.folder() == tmp_path / "lightning-accel"
        environment.delenv("XDG_CACHE_HOME")
        assert tuning_cache.folder() == Path.home() / ".cache" / "lightning-accel"
