"""What a run's memory went to, for its page: categories that add up to the measured peak, and what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_accel.evidence import step_breakdown as categories
from lightning_accel.evidence.record import Record

BESIDE_ON_GPU = "workspace within operations, and what other steps held beside"
BESIDE_ON_CPU = "the rest of the process: Python, libraries, what allocators keep"
_MOST = 20
_ROOM = 0.95  # of what the device has: allocators leave gaps
_MOST_TIMES = 4  # as large a batch: what one step has shown says nothing of much larger ones


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one module's forward pass made that was alive at the peak."""

    module: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What was held, and what is left."""

    # category → bytes at the peak of the step that was taken apart, the most first
    parts: dict[str, int] = field(default_factory=dict)
    beside: str = ""  # what of the measured peak is none of these; empty: no peak was measured
    beside_bytes: int = 0  # how much that is; with the parts it adds up to `peak_bytes`
    peak_bytes: int = 0  # the largest peak of the run, of whoever keeps the books; 0: none was measured
    source: str = ""  # who that is
    # the most that torch's allocator has taken from a GPU; None: not a GPU, or not known
    reserved_bytes: int | None = None
    device_bytes: int = 0  # all that the device has, on a CPU the machine or container
    headroom_bytes: int | None = None  # what was left of that at the peak; None: not known
    modules: list[Held] = field(default_factory=list)  # those that held the most
    # how many samples a batch may have for all of the device, by what activations take now, and at most four times as
    # many as it has; None: not known
    largest_batch: int | None = None

    @property
    def unused_bytes(self) -> int | None:
        """What the allocator had taken and was not in use: gaps between tensors, and blocks that it keeps."""
        return None if self.reserved_bytes is None else max(0, self.reserved_bytes - self.peak_bytes)


def memory_use(record: Record) -> MemoryUse:
    found = record.memory
    parts = {} if found is None else {name: size for name, size in _largest(found.parts) if size > 0}
    modules = {} if found is None else dict(_largest(found.modules)[:_MOST])
    peak = round((record.peak_memory_mib or 0.0) * 2**20)
    reserved = [float(one["reserved_mib"]) for one in record.epochs if one.get("reserved_mib") is not None]
    reserved_bytes = round(max(reserved) * 2**20) if reserved else None
    device = record.header.device_bytes
    beside = max(0, peak - sum(parts.values())) if parts else 0
    return MemoryUse(
        parts=parts,
        beside=(BESIDE_ON_CPU if reserved_bytes is None else BESIDE_ON_GPU) if beside else "",
        beside_bytes=beside,
        peak_bytes=peak,
        source=record.peak_memory_source,
        reserved_bytes=reserved_bytes,
        device_bytes=device,
        headroom_bytes=max(0, device - (reserved_bytes or peak)) if device and peak else None,
        modules=[Held(module=name, bytes=size) for name, size in modules.items() if size > 0],
        largest_batch=_largest_batch(record, parts, beside),
    )


def _largest(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda one: -one[1])


def _largest_batch(record: Record, parts: Mapping[str, int], beside: int) -> int | None:
    """By what does not grow with the batch, and what does, in the step that was taken apart."""
    size: int | None = next((one["batch_size"] for one in record.header.loaders if "batch_size" in one), None)
    stays = (
        *(categories.PARAMETERS, categories.GRADIENTS, categories.STATES),
        *(categories.BUFFERS, categories.COPIES, categories.STEPPING),
    )
    fixed = sum(parts.get(one, 0) for one in stays)
    grows = sum(parts.values()) - fixed
    if size is None or grows <= 0 or not record.header.device_bytes:
        return None
    fits = int(size * (_ROOM * record.header.device_bytes - fixed - beside) / grows)
    return max(0, min(fits, _MOST_TIMES * size))
