"""Which settings of a loader are tried, given what each takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_accel.data.worker_schedule import LoaderWorkers, WorkerCost, course


def walked(
    own: LoaderWorkers, cores: int, cost: Callable[[LoaderWorkers], WorkerCost]
) -> tuple[list[LoaderWorkers], LoaderWorkers]:
    """What is tried, one epoch after the other, and what stays."""
    steps = course(own, cores)
    tried = [next(steps)]
    try:
        while True:
            tried.append(steps.send(cost(tried[-1])))
    except StopIteration as end:
        return tried[1:], end.value


def waiting(batch_s: float) -> WorkerCost:
    """Of a step of one second."""
    return WorkerCost(batch_s, 1 - 1 / batch_s, 0.0)


def test_who_hardly_waits_is_left() -> None:
    assert walked(LoaderWorkers(), 8, lambda one: waiting(1.01)) == ([], LoaderWorkers())


def test_workers_are_added_while_that_is_faster() -> None:
    tried, stays = walked(LoaderWorkers(), 3, lambda one: waiting(max(1.0, 6.0 / (1 + one.count))))
    assert [one.count for one in tried] == [2, 4, 8]
    assert stays.count == 8


def test_nothing_more_is_tried_once_nobody_waits() -> None:
    tried, stays = walked(LoaderWorkers(), 9, lambda one: waiting(1.0 if one.count else 2.0))
    assert (tried, stays) == ([LoaderWorkers(8)], LoaderWorkers(8))


def test_too_many_are_taken_back() -> None:
    took = {0: 4.0, 4: 3.0, 8: 3.5, 2: 2.0}
    tried, stays = walked(LoaderWorkers(), 5, lambda one: waiting(took[one.count] + 0.5 * (one.prefetch == 4)))
    assert [one.count for one in tried] == [4, 8, 2, 2]  # half as many, too, and then more to have ready
    assert stays == LoaderWorkers(2)


def test_where_none_helps_the_users_own_stay() -> None:
    tried, stays = walked(LoaderWorkers(), 2, lambda one: waiting(2.0 + one.count))
    assert (tried, stays) == ([LoaderWorkers(1)], LoaderWorkers())


def test_workers_that_take_long_to_start_are_kept() -> None:
    def cost(one: LoaderWorkers) -> WorkerCost:
        if not one.count:
            return waiting(2.0)
        return WorkerCost(1.0, 0.0, 0.0) if one.is_kept else WorkerCost(1.5, 0.04, 0.3)

    tried, stays = walked(LoaderWorkers(), 2, cost)
    kept = LoaderWorkers(1, is_kept=True)
    assert (tried, stays) == ([LoaderWorkers(1), kept, kept], kept)


def test_a_gain_that_the_start_eats_up_is_none() -> None:
    _, stays = walked(LoaderWorkers(), 2, lambda one: WorkerCost(2.5, 0.5, 0.5) if one.count else waiting(2.0))
    assert stays == LoaderWorkers()


def test_of_users_who_have_workers_only_what_is_ready_changes() -> None:
    own = LoaderWorkers(3, prefetch=2)
    tried, stays = walked(own, 16, lambda one: waiting(3.0 - one.prefetch / 4))
    assert (tried, stays) == ([LoaderWorkers(3, prefetch=4)], LoaderWorkers(3, prefetch=4))


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (LoaderWorkers(), "no workers"),
        (LoaderWorkers(2, is_kept=True), "num_workers=2, prefetch_factor=2, persistent_workers=True"),
    ],
)
def test_settings_are_said_as_arguments(workers: LoaderWorkers, words: str) -> None:
    assert str(workers) == words
