"""CUDA graphs: what was captured is done at each replay, and not before."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from simulated_cuda import captures, memory
from simulated_cuda.operations import GENERATORS, compute, operation
from simulated_cuda.streams import current_device, current_stream

_pools = itertools.count(1)


@dataclass(frozen=True)
class _Slot:
    """A tensor that a replay makes anew."""

    number: int


@dataclass
class _Step:
    func: Any
    args: Any
    kwargs: dict[str, Any]
    device: int
    results: list[Any]  # tensors, while it is captured; then their slots


class _Memory:
    """Where a result of the capture lies, while anybody holds that memory, if by another tensor."""

    def __init__(self, number: int, result: Tensor) -> None:
        self.number = number
        self._storage = weakref.ref(torch._C.TensorBase.untyped_storage(result))
        self._dtype = result.dtype
        self._place = result.storage_offset(), result.size(), result.stride()

    def tensor(self) -> Tensor | None:
        """The result; None where nobody holds it any more."""
        storage = self._storage()
        if storage is None:
            return None
        return torch._C.TensorBase.set_(torch.empty(0, dtype=self._dtype), storage, *self._place)


@dataclass
class Recording:
    """Operations on the tensors that stand for a device's, in order.

    Attributes:
        steps: The operations.
        originals: What memory from before held that the capture has written to, by address: it will not have.
        own: Addresses of what was made within.
    """

    steps: list[_Step] = field(default_factory=list)
    originals: dict[int, tuple[Any, Tensor]] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    alive: list[_Memory] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    num_slots: int = 0

    def before(self, written: list[Tensor]) -> None:
        """Notes what memory holds that is about to be written to."""
        for tensor in written:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address and address not in self.own and address not in self.originals:
                self.originals[address] = (storage, _bytes_of(storage).clone())

    def add(self, func: Any, args: Any, kwargs: dict[str, Any], device: int, results: Any) -> None:
        """Notes an operation, and what came of it."""
        tensors = list(results) if isinstance(results, (list, tuple)) else [results]
        self.steps.append(_Step(func, args, kwargs, device, tensors))
        given = {id(one): one for one in _tensors_in((args, kwargs))}
        self.reads |= {memory.address_of(one) for one in given.values()} - self.own
        if not operation(func).is_view:
            for one in tensors:
                if isinstance(one, Tensor) and id(one) not in given:
                    self.own.add(memory.address_of(one))

    def finish(self) -> None:
        """Undoes what the capture has computed, and lets go of what nobody holds."""
        for storage, values in self.originals.values():
            _bytes_of(storage).copy_(values)
        slots: dict[int, int] = {}
        made: list[tuple[int, Tensor]] = []
        for step in self.steps:
            step.args = _replaced(step.args, slots)
            step.kwargs = {name: _replaced(value, slots) for name, value in step.kwargs.items()}
            results: list[Any] = []
            for one in step.results:
                if isinstance(one, Tensor) and id(one) not in slots and memory.address_of(one) not in self.originals:
                    slots[id(one)] = len(made)
                    made.append((len(made), one))
                results.append(_Slot(slots[id(one)]) if id(one) in slots else None)
            step.results = results
        self.num_slots = len(made)
        self.alive = [_Memory(number, one) for number, one in made]
        made_here = [one for _, one in made if memory.address_of(one) in self.own]
        made.clear()
        for tensor in made_here:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))  # nothing is there before the first replay

    def replay(self) -> None:
        """Does all of it, and leaves the results where those of the capture are."""
        values: list[Any] = [None] * self.num_slots
        for step in self.steps:
            args, kwargs = _filled(step.args, values), {k: _filled(v, values) for k, v in step.kwargs.items()}
            results = compute(step.func, args, kwargs, step.device)
            for slot, one in zip(
                step.results, results if isinstance(results, (list, tuple)) else [results], strict=True
            ):
                if slot is not None:
                    values[slot.number] = one
        for memory_of_it in self.alive:
            target, value = memory_of_it.tensor(), values[memory_of_it.number]
            if target is not None and target.data_ptr() != value.data_ptr():
                target.copy_(value)

    def written(self) -> set[int]:
        """Addresses that a replay writes to."""
        targets = [target for one in self.alive if (target := one.tensor()) is not None]
        return {address for one in targets if (address := memory.address_of(one)) in self.own} | set(self.originals)


class CUDAGraph:
    """As :class:`torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recording: Recording | None = None
        self._capture: captures.Capture | None = None
        self._pool: captures.Pool = (0, next(_pools))

    def capture_begin(
        self, pool: captures.Pool | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        if self._recording is not None:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        self._pool = pool or self._pool
        self._states = [generator.get_state() for generator in GENERATORS]
        recording = Recording()
        self._capture = captures.begin(capture_error_mode, self._pool, recording)

    def capture_end(self) -> None:
        if self._capture is None:
            raise RuntimeError("no capture has begun on this graph")
        capture = self._capture
        captures.end(capture)
        self._capture = None
        for generator, state in zip(GENERATORS, self._states, strict=True):
            generator.set_state(state)
        with torch.no_grad(), no_dispatch():
            capture.recording.finish()
        self._recording = capture.recording

    def replay(self) -> None:
        if self._recording is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        with torch.no_grad(), no_dispatch():
            self._recording.replay()
        written = self._recording.written()
        stream = current_stream(current_device())
        memory.used_by_kernel("a replayed graph", stream, self._recording.reads - written, written)

    def reset(self) -> None:
        self._recording = self._capture = None

    def pool(self) -> captures.Pool:
        return self._pool

    def instantiate(self) -> None:
        """Nothing is left to do."""

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Every replay draws on."""

    def enable_debug_mode(self) -> None:
        """There is nothing to dump."""


def graph_pool_handle() -> captures.Pool:
    """A pool that no graph has yet."""
    return 0, next(_pools)


def _bytes_of(storage: Any) -> Tensor:
    return torch._C.TensorBase.set_(torch.empty(0, dtype=torch.uint8), storage)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for one in value for tensor in _tensors_in(one)] if isinstance(value, (list, tuple)) else []


def _replaced(value: Any, slots: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        return _Slot(slots[id(value)]) if id(value) in slots else value
    return type(value)(_replaced(one, slots) for one in value) if isinstance(value, (list, tuple)) else value


def _filled(value: Any, values: list[Any]) -> Any:
    if isinstance(value, _Slot):
        return values[value.number]
    return type(value)(_filled(one, values) for one in value) if isinstance(value, (list, tuple)) else value
