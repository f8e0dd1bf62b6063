"""Decisions of live trials that outlive a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_accel.experiment.pair_test import RatioInterval
from lightning_accel.techniques.arms import Arm
from lightning_accel.tuning.comparison import Result
from lightning_accel.tuning.tuning_result import Tuning
from lightning_accel.tuning.verdict_cache import TUNINGS, run_key

ARMS = [Arm("attention", ("on",), lambda choice: None)]
WHOLE = Result("whole plan", "faster", RatioInterval(1.3, 1.2, 1.4), 24)
SETTLED = Tuning({"attention": "on"}, {"attention": WHOLE}, WHOLE, is_settled=True)


def key_of(width: int = 4, batch: int = 8, host: str = "a CPU", arms: list[Arm] = ARMS) -> dict[str, str]:
    return run_key(nn.Linear(width, 2), torch.zeros(batch, width), host, arms)


def test_what_is_remembered_comes_back_as_an_earlier_runs() -> None:
    TUNINGS.put(key_of(), SETTLED.to_dict())
    entry = TUNINGS.get(key_of())
    assert entry is not None
    assert entry.value == replace(SETTLED, is_earlier=True)


@pytest.mark.parametrize("other", [{"width": 5}, {"batch": 64}, {"host": "another CPU"}, {"arms": []}])
def test_another_model_batch_machine_or_arm_is_another_run(other: dict[str, object]) -> None:
    TUNINGS.put(key_of(), SETTLED.to_dict())
    assert TUNINGS.get(key_of(**other)) is None  # type: ignore[arg-type]


def test_batches_of_about_the_same_size_are_the_same_run() -> None:
    assert key_of(batch=5) == key_of(batch=8)
