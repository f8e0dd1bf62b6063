"""Trials make many objects at once, and Python's collector does not answer with a look at all of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_accel.core.garbage import young_garbage_only


@pytest.fixture(autouse=True)
def a_program_that_has_frozen_nothing() -> Iterator[None]:
    """As the whole suite has, so that its tests are faster."""
    gc.unfreeze()
    yield
    gc.freeze()


class Node:
    """Something that can refer to itself."""

    me: Node


@contextmanager
def collections_of_everything() -> Iterator[list[int]]:
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


@pytest.mark.medium
def test_nothing_of_the_program_is_looked_through_for_what_is_made_inside() -> None:
    """So many objects would have all of them looked through."""
    most = 200_000 + len(gc.get_objects())
    with collections_of_everything() as found:
        with young_garbage_only():
            kept = [[number] for number in range(most)]
        kept += [[number] for number in range(10_000)]
    assert not found


def test_cycles_made_inside_are_collected_at_the_end() -> None:
    with young_garbage_only():
        node = Node()
        node.me = node
        died = weakref.ref(node)
        del node
    assert died() is None


def test_what_was_made_inside_is_collected_once_it_is_garbage() -> None:
    with young_garbage_only():
        node = Node()
        node.me = node
        died = weakref.ref(node)
    del node
    gc.collect()
    assert died() is None


def test_the_collector_works_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="mine"), young_garbage_only():
        raise ValueError("mine")
    assert gc.isenabled()


def test_a_collector_that_the_program_has_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with young_garbage_only():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_objects_that_the_program_has_frozen_stay_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with young_garbage_only():
        assert gc.isenabled()
    assert gc.get_freeze_count() > 0.9 * before
