"""Decides which saved tensors are packed: sparse ones whose memory is then freed and that are worth the time.

A place is one save of the training step. It is identified by its number among the saves, the operator that made the
tensor, the dtype and the number of dimensions. The first steps pack everything that looks sparse, and measure; then
each place gets a verdict. If the model takes another path, places may be confused. That costs speed or memory, but no
accuracy, since packing is lossless. For the same reason each process decides alone, and ranks need not agree.
"""

from __future__ import annotations

import statistics
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from lightning_accel.core.clocks import HostClock, Span
from lightning_accel.core.step_timeline import StepTimeline
from lightning_accel.core.torch_private.autograd import has_saved_result
from lightning_accel.core.torch_private.tensors import version_of
from lightning_accel.memory import packing
from lightning_accel.memory.packing import Layout, PackedBits, is_packable
from lightning_accel.memory.packing_budget import DENSE, MAX_TIME_SHARE, TRIALS, PackingReport, SavePlace, choose
from lightning_accel.memory.saved_tensors import Packed

MIN_BYTES = 64 << 10
"""Smaller tensors are not packed: they save too little for the calls."""

SPARSE_ENOUGH, TOO_DENSE = 0.75, 0.9
"""Limits of the packed size as a share of the original: estimated from a sample at first, counted later."""

ALIVE = "also alive elsewhere"
NO_ROOM = "without the memory to pack them in"
STRANGE = "of a dtype or layout that is not packed"

_MAX_PLACES = 4096
_MAX_OVERFLOWS = 2
_DEVICES = ("cpu", "cuda")
_RELU_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Key = tuple[int, int, torch.dtype, str, bool]


class Packer:
    """A :class:`~lightning_accel.memory.saved_tensors.Saver` that keeps sparse tensors and masks packed."""

    def __init__(self, *, min_bytes: int = MIN_BYTES, max_time_share: float = MAX_TIME_SHARE) -> None:
        self._min_bytes = min_bytes
        self._max_time_share = max_time_share
        self._places: dict[Key, SavePlace] = {}
        self._seen: WeakKeyDictionary[torch.UntypedStorage, _Seen] = WeakKeyDictionary()
        self._unsettled: list[tuple[SavePlace, weakref.ref[torch.UntypedStorage]]] = []
        self._step = 0
        self._turn = 0
        self._step_seconds = step_seconds = deque[float](maxlen=5)
        self._timeline = StepTimeline(HostClock(), lambda step: step_seconds.append(step.cycle_ms / 1e3))

    # -- the life of a step --------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Called at the beginning of a training step, before anything is saved."""
        self._timeline.steps_ended(1)
        self._step += 1
        self._turn = 0
        packed = [place for place in self._places.values() if place.is_packed]
        if self._step_seconds and any(not p.is_decided and len(p.sightings) >= TRIALS for p in packed):
            choose(packed, statistics.median(self._step_seconds), self._max_time_share)

    def end_step(self) -> None:
        """Called after the forward pass, or a part of it: gives up places whose tensor is still alive."""
        unsettled, self._unsettled = self._unsettled, []
        for place, storage in unsettled:
            if storage() is not None:
                place.head.reason = ALIVE

    def abandon_step(self) -> None:
        """Called instead of :meth:`end_step` after an error, whose traceback keeps local variables alive."""
        self._timeline.pause()
        self._unsettled.clear()

    def report(self) -> PackingReport:
        """Returns what packing does, as far as is known now."""
        packed = [place for place in self._places.values() if place.is_packed]
        heads = [place for place in packed if place.leader is None]
        refused = Counter(p.reason for p in self._places.values() if p.leader is None and p.reason)
        return PackingReport(
            before_bytes=sum(place.before_bytes for place in heads),
            after_bytes=sum(place.after_bytes for place in packed),
            packed=len(heads),
            left_alone=dict(refused.most_common()),
        )

    # -- the life of a tensor ------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Packed | None:
        """Returns what to keep in place of a saved tensor; None to leave the tensor alone."""
        self._turn += 1
        if tensor.nbytes < self._min_bytes or tensor.device.type not in _DEVICES or tensor.numel() == 0:
            return None
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # counting nonzeros waits for the device, which a capture forbids
        is_own = _is_own_result(tensor)
        seen = self._seen.get(tensor.untyped_storage())
        shared = seen.find(tensor, is_own) if seen is not None else None
        if shared is not None:
            shared.saves += 1
            return shared
        place = self._place(tensor, is_own)
        if not place.is_packed or not is_packable(tensor):
            return None
        if seen is None or seen.step != self._step:
            seen = self._seen[tensor.untyped_storage()] = _Seen(self._step, place)
        try:
            return self._pack(tensor, place, is_own, seen)
        except torch.OutOfMemoryError:
            place.head.reason = NO_ROOM
            return None

    def _place(self, tensor: Tensor, is_own: bool) -> SavePlace:
        node = tensor.grad_fn
        key = (self._turn, tensor.dim(), tensor.dtype, "" if node is None else node.name(), is_own)
        if key not in self._places:
            if len(self._places) == _MAX_PLACES:
                del self._places[next(iter(self._places))]
            self._places[key] = _first_sight(tensor, is_own)
        return self._places[key]

    def _pack(self, tensor: Tensor, place: SavePlace, is_own: bool, seen: _Seen) -> _PackedHandle | None:
        span = None if place.is_decided else Span(tensor.device)
        packed = _encode(tensor, place, is_own)
        after_bytes = 0 if packed is None else seen.share_bits(packed)
        if span is not None:
            span.stop()
        if packed is None:
            place.overflows += 1
            if place.overflows == _MAX_OVERFLOWS:
                place.head.reason = DENSE
            return None
        place.before_bytes, place.after_bytes = tensor.untyped_storage().nbytes(), after_bytes
        handle = _PackedHandle(self, packed, tensor, is_own)
        seen.handles.add(handle)
        if span is not None:
            place.leader = None if seen.leader is place else seen.leader
            handle.spans.append(span)
            place.sightings = [*place.sightings[1 - TRIALS :], handle.spans]
            self._unsettled.append((place, weakref.ref(tensor.untyped_storage())))
        return handle


class _PackedHandle:
    """A packed tensor, shared by all who saved it. It stays unpacked from the first use to the last."""

    def __init__(self, packer: Packer, packed: PackedBits, tensor: Tensor, is_own: bool) -> None:
        self.packed = packed
        self.saves = 1
        self.spans: list[Span] = []  # times of packing and unpacking, during trials
        self._packer = packer
        self.identity = _identity(tensor, is_own)
        self._unpacks = 0
        self._unpacked: Tensor | None = None

    def unpack(self) -> Tensor:
        self._packer.end_step()  # in a backward pass within the step, frees must not be attributed to packing
        tensor = self._unpacked
        if tensor is None:
            span = Span(self.packed.layout.device) if self.spans else None
            tensor = self.packed.unpack()
            if span is not None:
                span.stop()
                self.spans.append(span)
        self._unpacks += 1
        self._unpacked = tensor if self._unpacks % self.saves else None
        return tensor


def _identity(tensor: Tensor, is_own: bool) -> tuple[bool, int, int, Layout | None]:
    """Returns a key. Tensors on one storage with equal keys have the same values now."""
    return is_own, version_of(tensor), int(tensor.storage_offset()), Layout.of(tensor)


@dataclass(eq=False)
class _Seen:
    """What was packed of one storage in a step, first by the ``leader``. A handle lives as long as a graph holds it."""

    step: int
    leader: SavePlace
    handles: WeakSet[_PackedHandle] = field(default_factory=WeakSet)

    def find(self, tensor: Tensor, is_own: bool) -> _PackedHandle | None:
        identity = _identity(tensor, is_own)
        return next((handle for handle in self.handles if handle.identity == identity), None)

    def share_bits(self, packed: PackedBits) -> int:
        """Makes ``packed`` share equal bits that exist already. Returns the bytes that it takes in addition.

        A ReLU and the layer after it save one tensor, and their bits are nearly always equal.
        """
        if packed.values is not None:
            for bits in (handle.packed.bits for handle in self.handles):
                if bits.shape == packed.bits.shape and torch.equal(bits, packed.bits):
                    packed.bits = bits
                    return packed.values.nbytes
        return packed.nbytes


def _first_sight(tensor: Tensor, is_own: bool) -> SavePlace:
    if not is_packable(tensor):
        return SavePlace(reason=STRANGE)
    if is_own or tensor.dtype == torch.bool:
        return SavePlace()
    found = packing.sample(tensor)
    a_bit = 1 / (8 * tensor.element_size())
    share = a_bit if found.word is not None else a_bit + found.density
    return SavePlace(word=found.word, reason="" if share < SPARSE_ENOUGH else DENSE)


def _encode(tensor: Tensor, place: SavePlace, is_own: bool) -> PackedBits | None:
    if tensor.dtype == torch.bool:
        return packing.pack_bits(tensor)
    if is_own:
        return packing.pack_above_zero(tensor)
    if place.word is not None:
        packed = packing.pack_two_valued(tensor, place.word)
        if packed is not None:
            return packed
        place.word = None
    return packing.pack_nonzeros(tensor, TOO_DENSE * tensor.nbytes)


def _is_own_result(tensor: Tensor) -> bool:
    """Returns whether a ReLU is saving its own result, of which it only needs the positions above zero."""
    node = tensor.grad_fn
    is_relu = node is not None and node.name() == "ReluBackward0" and tensor.dtype in _RELU_DTYPES
    return is_relu and not has_saved_result(node)
