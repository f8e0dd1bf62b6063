"""Who is told that a rank waits for others. That real ones are is in tests/evidence/test_phase_names.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from lightning_accel.callbacks._phase_patch import CollectivesPatch
from lightning_accel.evidence.phase_names import COMMUNICATION


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
    """In a group of one process, and with streams that do nothing but to note that they are asked to wait."""
    told = Told()
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda *_: told.of.append("wait_event"))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    kinds = (distributed.ProcessGroup, distributed.Work, torch.cuda.Stream)
    before = [dict(vars(kind)) for kind in kinds]
    patch = CollectivesPatch()
    patch.tell(told)
    try:
        yield told
    finally:
        patch.forget(told)
        distributed.destroy_process_group()
    assert [dict(vars(kind)) for kind in kinds] == before


def in_module(name: str, code: str = "torch.cuda.Stream.wait_event(None, None)") -> Callable[..., None]:
    """A function of a module with this name, that does this."""
    names: dict[str, Any] = {"__name__": name, "torch": torch}
    exec(f"def run(*_):\n    {code}", names)
    run: Callable[..., None] = names["run"]
    return run


def test_a_collective_call_is_communication(told: Told) -> None:
    """Making the call, and waiting for it: what is called without waiting for it can be waited for later."""
    distributed.all_reduce(torch.ones(1))
    assert told.of == 2 * [COMMUNICATION, "left"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: distributed.all_gather_into_tensor(torch.empty(2), x),
        lambda x: distributed.reduce_scatter_tensor(torch.empty(2), x),
        lambda x: distributed.broadcast(x, 0),
        lambda x: distributed.barrier(),
        lambda x: distributed.all_reduce(x, async_op=True).wait(),
    ],
    ids=["all_gather", "reduce_scatter", "broadcast", "barrier", "async"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has other names for two of them
def test_each_kind_of_collective_call_is(told: Told, call: Callable[[Tensor], Any]) -> None:
    call(torch.ones(2))
    assert told.of == 2 * [COMMUNICATION, "left"]


def test_compiled_code_that_communicates_is_neither_cut_nor_compiled_anew(told: Told) -> None:
    """It looks at the functions that it was captured from; edited, they could not be captured."""
    captured = []

    def backend(graph: Any, inputs: Any) -> Any:
        captured.append(graph)
        return graph.forward

    def reduced(x: Tensor) -> Tensor:
        y = x * 2
        distributed.all_reduce(y)
        return y + 1

    patch = CollectivesPatch()
    compiled = torch.compile(reduced, backend=backend, fullgraph=True)
    for apply_or_undo in (patch.undo, patch.apply, patch.undo):
        apply_or_undo()
        assert compiled(torch.ones(1)) == 3
    assert len(captured) == 1


def test_a_stream_that_fsdp_has_wait_is_communication(told: Told) -> None:
    in_module("torch.distributed.fsdp.some_module")()
    assert told.of == [COMMUNICATION, "wait_event", "left"]


def test_a_stream_that_somebody_else_has_wait_is_none(told: Told) -> None:
    in_module("lightning_accel.memory.movers")()
    assert told.of == ["wait_event"]


def test_what_another_thread_communicates_is_not_the_trainings(told: Told) -> None:
    """A checkpoint that is written in the background, say: it would end parts of a step that it is not in."""
    thread = threading.Thread(target=lambda: distributed.all_reduce(torch.ones(1)))
    thread.start()
    thread.join()
    assert told.of == []


def test_calls_of_a_backward_pass_are_the_trainings_on_any_thread(told: Told) -> None:
    def backward() -> None:
        x = torch.ones(1, requires_grad=True)
        x.register_hook(in_module("torch.distributed.fsdp.some_module"))
        (x * 2).sum().backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert told.of == [COMMUNICATION, "wait_event", "left"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_call_that_raises_is_over(told: Told) -> None:
    with pytest.raises(RuntimeError):
        distributed.reduce_scatter_tensor(torch.empty(2), torch.ones(5))
    assert told.of == [COMMUNICATION, "left"]
