"""The number of threads that a run uses: set while it lasts, and as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lightning_accel import Plan, accelerate
from lightning_accel.tuning.trials import LiveTrials
from support.live_runs import OTHERS_OFF


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_run_uses_as_many_threads_as_it_is_told() -> None:
    handle = accelerate(nn.Linear(2, 2), Plan(techniques={"threads": 1}, trust="checked"))
    assert torch.get_num_threads() == 1
    handle.undo()
    assert torch.get_num_threads() == 2


def test_what_the_user_sets_in_mid_run_stays() -> None:
    handle = accelerate(nn.Linear(2, 2), Plan(techniques={"threads": 1}, trust="checked"))
    torch.set_num_threads(3)
    handle.undo()
    assert torch.get_num_threads() == 3


def test_a_number_for_another_machine_is_a_plan_here_too() -> None:
    assert Plan.from_yaml("techniques: {threads: 4096}").of("threads") == 4096


def test_what_is_faster_than_all_cores_is_found_on_the_runs_own_steps() -> None:
    torch.set_num_threads(8)
    handle = accelerate(nn.Linear(2, 2), Plan().replace(**OTHERS_OFF | {"threads": "auto"}, trust="checked"))
    [arm] = handle.engine.arms()
    assert arm.choices == ("4", "2", "1")
    seconds = {8: 1.0, 4: 0.8, 2: 0.5, 1: 0.9}
    trials = LiveTrials([arm], 400)
    for _ in range(400):
        trials.begin()
        trials.took(seconds[torch.get_num_threads()])
    assert trials.tuning.choices == {"threads": "2"}
    assert torch.get_num_threads() == 2
    handle.engine.apply_updates()
    assert handle.report.of("threads").status == "2 threads an operation"
    handle.undo()
    assert torch.get_num_threads() == 8


def test_a_run_that_is_too_short_to_try_keeps_them_all() -> None:
    torch.set_num_threads(8)
    model = nn.Linear(2, 2)
    handle = accelerate(model, Plan().replace(**OTHERS_OFF | {"threads": "auto"}), steps=10)
    for _ in range(10):
        with handle.step():
            assert torch.get_num_threads() == 8
            model(torch.ones(1, 2)).sum().backward()
    assert handle.report.of("threads").status == "all 8 threads, until live trials find fewer to be faster"
    handle.undo()


def test_with_one_thread_there_is_nothing_to_try() -> None:
    torch.set_num_threads(1)
    handle = accelerate(nn.Linear(2, 2), Plan().replace(**OTHERS_OFF | {"threads": "auto"}, trust="checked"))
    assert handle.engine.arms() == []
    assert "there are no fewer to try" in handle.report.of("threads").status
    handle.undo()


def test_the_report_says_how_many() -> None:
    handle = accelerate(nn.Linear(2, 2), Plan(techniques={"threads": 1}, trust="checked"))
    assert "1 thread an operation" in handle.report.to_text()
    handle.undo()
