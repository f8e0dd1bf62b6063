"""Who is told that a rank waits for others. That real ones are is in tests/evidence/test_parts.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accel.callbacks._collectives_patch import CollectivesPatch
from lightning_accel.evidence.parts import COMMUNICATION


class Told:
    """Keeps what it is told, and what happened meanwhile."""

    def __init__(self) -> None:
        self.of: list[str] = []

    def enter(self, part: str) -> None:
        self.of.append(part)

    def leave(self) -> None:
        self.of.append("left")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """Of calls that do nothing but to note themselves."""
    told = Told()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: told.of.append("all_reduce"))
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda *_: told.of.append("wait_event"))
    originals = torch.distributed.all_reduce, torch.cuda.Stream.wait_event
    patch = CollectivesPatch([told])
    patch.apply()
    yield told
    patch.undo()
    assert (torch.distributed.all_reduce, torch.cuda.Stream.wait_event) == originals


def in_module(name: str, code: str = "torch.cuda.Stream.wait_event(None, None)") -> Callable[..., None]:
    """A function of a module with this name, that does this."""
    names: dict[str, Any] = {"__name__": name, "torch": torch}
    exec(f"def run(*_):\n    {code}", names)
    run: Callable[..., None] = names["run"]
    return run


def test_a_collective_call_is_communication(told: Told) -> None:
    torch.distributed.all_reduce(torch.ones(1))
    assert told.of == [COMMUNICATION, "all_reduce", "left"]


def test_a_stream_that_fsdp_has_wait_is_communication(told: Told) -> None:
    in_module("torch.distributed.fsdp.some_module")()
    assert told.of == [COMMUNICATION, "wait_event", "left"]


def test_a_stream_that_somebody_else_has_wait_is_none(told: Told) -> None:
    in_module("lightning_accel.memory.movers")()
    assert told.of == ["wait_event"]


def test_what_another_thread_communicates_is_not_the_trainings(told: Told) -> None:
    """A checkpoint that is written in the background, say: it would end parts of a step that it is not in."""
    thread = threading.Thread(target=in_module("a", "torch.distributed.all_reduce(None)"))
    thread.start()
    thread.join()
    assert told.of == ["all_reduce"]


def test_calls_of_a_backward_pass_are_the_trainings_on_any_thread(told: Told) -> None:
    def backward() -> None:
        x = torch.ones(1, requires_grad=True)
        x.register_hook(in_module("torch.distributed.fsdp.some_module"))
        (x * 2).sum().backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert told.of == [COMMUNICATION, "wait_event", "left"]


def test_a_call_that_raises_is_over(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensor: Tensor) -> None:
        raise RuntimeError("a rank is lost")

    monkeypatch.setattr(torch.distributed, "broadcast", fails)
    patch = CollectivesPatch([told])
    patch.apply()
    try:
        with pytest.raises(RuntimeError, match="a rank is lost"):
            torch.distributed.broadcast(torch.ones(1))
    finally:
        patch.undo()
    assert told.of == [COMMUNICATION, "left"]
