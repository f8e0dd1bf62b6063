"""What is tried after what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_accel.core.host import Host
from lightning_accel.search.job import TrialSetup, TuneJob
from lightning_accel.search.judging import Facts, Objective
from lightning_accel.search.knobs import Knob, knobs
from support.search_runs import Sleeper, loader, trainer

CPU = Host(kind="cpu", device_name="a CPU", compiler="g++")
FACTS = Facts(started_s=1.0, seconds=0.01, waited=0.5, peak_bytes=1 << 30, base_bytes=1 << 29, samples=8, batches=16)


def named(name: str, objective: Objective = "speed", *, accumulate: int = 1, keeps: bool = False) -> Knob:
    job = TuneJob.of(Sleeper(), loader(8), trainer(accumulate_grad_batches=accumulate))
    return next(knob for knob in knobs(job, CPU, objective, keeps_effective_batch=keeps) if knob.name == name)


def tried(
    knob: Knob, is_better: Callable[[TrialSetup], bool], facts: Facts = FACTS, best: TrialSetup | None = None
) -> list[TrialSetup]:
    """Everything that a knob has tried, told for each whether it was better."""
    tries, found = knob.tries(facts, best or TrialSetup()), []
    try:
        found.append(next(tries))
        while True:
            found.append(tries.send(is_better(found[-1])))
    except StopIteration:
        return found


def sizes(setups: list[TrialSetup]) -> list[Any]:
    return [setup.batch_size for setup in setups]


def test_a_batch_is_doubled_while_that_is_better() -> None:
    assert sizes(tried(named("batch_size"), lambda setup: (setup.batch_size or 0) <= 32)) == [16, 32, 64]


def test_a_batch_that_is_no_better_doubled_is_halved() -> None:
    assert sizes(tried(named("batch_size"), lambda setup: setup.batch_size == 4)) == [16, 4, 2]


def test_no_batch_is_larger_than_the_data() -> None:
    assert sizes(tried(named("batch_size"), lambda setup: True)) == [16, 32, 64, 128]


def test_an_effective_batch_is_kept_by_accumulation() -> None:
    found = tried(named("batch_size", accumulate=4, keeps=True), lambda setup: True, replace(FACTS, samples=32))
    assert [(setup.batch_size, setup.accumulate) for setup in found] == [(16, 2), (32, 1)]


def test_a_batch_that_was_made_to_fit_grows_no_further_than_it_was() -> None:
    fitting = TrialSetup(batch_size=2, accumulate=4)
    found = tried(named("batch_size"), lambda setup: True, best=fitting)
    assert [(setup.batch_size, setup.accumulate) for setup in found] == [(4, 2), (8, 1)]


def test_who_does_not_wait_for_data_is_not_asked_about_the_loader() -> None:
    assert tried(named("loader"), lambda setup: True, replace(FACTS, waited=0.01)) == []


def test_workers_are_added_while_that_is_better_and_then_batches_for_each() -> None:
    *workers, last = [setup.loader for setup in tried(named("loader"), lambda setup: True)]
    counts = [setup["num_workers"] for setup in workers]
    assert counts == sorted(counts)
    assert counts[-1] <= 16
    assert all(setup["persistent_workers"] for setup in workers)
    assert last == {"prefetch_factor": 4}


def test_without_a_gain_by_workers_their_batches_are_not_asked_about() -> None:
    assert all("num_workers" in setup.loader for setup in tried(named("loader"), lambda setup: False))


def test_the_workers_that_there_are_are_not_tried_again() -> None:
    first = tried(named("loader"), lambda setup: True)[0]
    again = tried(named("loader"), lambda setup: True, best=first)
    assert first not in again
    assert again


def test_waiting_for_data_says_what_could_be_gained() -> None:
    assert named("loader").bound(FACTS) == pytest.approx(2.0)


def test_memory_settings_are_asked_about_where_memory_counts() -> None:
    assert [str(setup) for setup in tried(named("memory", "balanced"), lambda setup: True)] == [
        "sparse_activations=auto",
        "gradient_checkpointing=selective",
        "gradient_checkpointing=full",
    ]
    with pytest.raises(StopIteration):
        named("memory", "speed")


def test_what_the_user_has_set_is_not_asked_about() -> None:
    job = TuneJob.of(Sleeper(), loader(), trainer())
    job.plan = job.plan.replace(compile="on")
    names = {knob.name for knob in knobs(job, CPU, "speed", keeps_effective_batch=False)}
    assert not names & {"compile", "threads"}
