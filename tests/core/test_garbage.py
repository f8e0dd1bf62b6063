"""Trials make many objects at once, and Python's collector does not answer with a look at all of them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core.garbage import young_garbage_only
from lightning_accel.techniques.flash_attention.backends import BACKENDS
from lightning_accel.techniques.flash_attention.hand_written import HandWrittenSite


class WrittenOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(-2, -1) / 8**0.5).softmax(-1) @ x


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
    """So many objects would have all of them looked through, inside or as soon as a few are made and dropped."""
    most = 200_000 + len(gc.get_objects())
    with collections_of_everything() as found:
        with young_garbage_only():
            kept = [[number] for number in range(most)]
        for _ in range(300_000):
            node = Node()
            node.me = node
    assert len(kept) == most
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
    assert gc.get_freeze_count() < 1000


@pytest.mark.medium
def test_the_first_capture_of_attention_leaves_the_collector_as_it_was() -> None:
    """And Dynamo, which would call it after each capture, calls none."""
    found = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and gc.isenabled() is False:
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        site = HandWrittenSite("attention", WrittenOut())
        site.run(BACKENDS["sdpa"], WrittenOut.forward, (torch.randn(2, 16, 8),), {})
    finally:
        gc.callbacks.remove(note)
    assert site.capture is not None
    assert site.capture.graphs == 1
    assert set(found) == {0}  # the one at the end
    assert gc.isenabled()
    assert gc.get_freeze_count() < 1000
    assert getattr(torch._dynamo.config, "run_gc_after_compile", True)


@pytest.mark.medium
def test_a_capture_has_no_marks_for_a_profiler_which_would_be_calls_at_every_step() -> None:
    site = HandWrittenSite("attention", WrittenOut())
    site.run(BACKENDS["sdpa"], WrittenOut.forward, (torch.randn(2, 16, 8),), {})
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name))
    try:
        site.run(BACKENDS["sdpa"], WrittenOut.forward, (torch.randn(2, 16, 8),), {})
    finally:
        sys.setprofile(None)
    assert not [name for name in calls if "pregraph" in name]
    assert getattr(torch._dynamo.config, "record_runtime_overhead", True)


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
