"""The names of ``torch.cuda``, and of what asks it."""

from __future__ import annotations

import types
import uuid
from typing import Any

import torch

from simulated_cuda import captures, events, graphs, seeds, statistics, waits
from simulated_cuda.card import CARD
from simulated_cuda.events import Stream, device_index
from simulated_cuda.operations import GENERATORS
from simulated_cuda.streams import LIBRARY, TIMELINE, current_device, current_stream, set_stream

_CYCLES_PER_SECOND = 1.5e9  # of torch.cuda._sleep
NVTX_RANGES: list[str] = []


def _set_device(device: Any) -> None:
    index = device_index(device)
    if not 0 <= index < CARD.count:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    LIBRARY.set_device(index)


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        LIBRARY.set_device(index)
    return before


class _Device:
    """As :class:`torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        LIBRARY.set_device(self.prev_idx)


class _DeviceOf(_Device):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device.index if tensor.is_cuda else None)


class _StreamContext:
    """As :class:`torch.cuda.StreamContext`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._device = _exchange_device(self.stream.device_index)
            self._before = current_stream(self.stream.device_index)
            set_stream(self.stream.key)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            set_stream(self._before)
            LIBRARY.set_device(self._device)


def _stream_now(device: Any = None) -> Stream:
    index, number = current_stream(device_index(device))
    return Stream(index, stream_id=number)


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        LIBRARY.set_device(stream.device_index)
        set_stream(stream.key)


def _synchronize(device: Any = None) -> None:
    index = device_index(device)
    captures.wait_for_device(index)
    TIMELINE.wait_on_host(TIMELINE.marks_of(index))


def _sleep(cycles: int) -> None:
    stream = current_stream()
    if captures.of_launch(stream) is None:
        TIMELINE.launch(stream)
        TIMELINE.keep_busy(stream, cycles / _CYCLES_PER_SECOND)


def _properties(device: Any = None) -> types.SimpleNamespace:
    major, minor = CARD.capability
    return types.SimpleNamespace(
        name=CARD.name,
        major=major,
        minor=minor,
        total_memory=CARD.total_bytes,
        multi_processor_count=132,
        uuid=uuid.UUID(int=1 + device_index(device)),
        gcnArchName="",
        warp_size=32,
        L2_cache_size=50 << 20,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        is_integrated=False,
        is_multi_gpu_board=False,
    )


_DEVICES = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "_is_compiled": lambda: True,
    "device_count": lambda: CARD.count,
    "_device_count_nvml": lambda: CARD.count,
    "current_device": current_device,
    "set_device": _set_device,
    "_exchange_device": _exchange_device,
    "_maybe_exchange_device": lambda index: _exchange_device(index),
    "device": _Device,
    "device_of": _DeviceOf,
    "_DeviceGuard": _Device,
    "get_device_name": lambda device=None: CARD.name,
    "get_device_capability": lambda device=None: CARD.capability,
    "get_device_properties": _properties,
    "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90"],
    "is_bf16_supported": lambda including_emulation=True: CARD.capability >= (8, 0) or including_emulation,
    "can_device_access_peer": lambda one, other: True,
    "ipc_collect": lambda: None,
    "synchronize": _synchronize,
    "_sleep": _sleep,
}

_STREAMS = {
    "Stream": Stream,
    "ExternalStream": events.ExternalStream,
    "Event": events.Event,
    "StreamContext": _StreamContext,
    "stream": lambda stream: _StreamContext(stream),
    "current_stream": _stream_now,
    "default_stream": lambda device=None: Stream(device, stream_id=0),
    "set_stream": _set_stream,
}

_GRAPHS = {
    "CUDAGraph": graphs.CUDAGraph,
    "graph_pool_handle": graphs.graph_pool_handle,
    "is_current_stream_capturing": captures.is_capturing,
}

_IN_C = {
    "_cuda_getDevice": lambda: current_device(),
    "_cuda_setDevice": lambda index: LIBRARY.set_device(index),
    "_cuda_getDeviceCount": lambda: CARD.count,
    "_cuda_init": lambda: None,
    "_cuda_isInBadFork": lambda: False,
    "_cuda_getArchFlags": lambda: "sm_90",
    "_cuda_isCurrentStreamCapturing": lambda: captures.is_capturing(),
    "_cuda_getCurrentRawStream": lambda index=0: current_stream(index)[1],
    "_cuda_emptyCache": statistics.empty_cache,
    "_cuda_getMemoryFraction": lambda device=0: statistics.book(device).fraction,
    "_cuda_clearCublasWorkspaces": lambda: None,
    "_cuda_set_sync_debug_mode": waits.set_sync_debug_mode,
    "_cuda_get_sync_debug_mode": waits.get_sync_debug_mode,
    "_host_emptyCache": lambda: None,
}

# No two names have one function: TorchDynamo knows functions by their identity.
_ACCELERATOR = {
    "is_available": lambda: True,
    "device_count": lambda: CARD.count,
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": lambda: current_device(),
    "synchronize": lambda device=None: _synchronize(device),
    "current_stream": lambda device=None: _stream_now(device),
}

_MISSING_TYPES = ("_cuda_CUDAAllocator_AllocatorState", "_cuda_CUDAAllocator")  # named by annotations


def install() -> None:
    """Gives ``torch.cuda`` its names, and ``torch.accelerator``."""
    cuda: Any = torch.cuda
    places: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        (_DEVICES, (cuda,)),
        (_STREAMS, (cuda, cuda.streams)),
        (statistics.NAMES, (cuda, cuda.memory)),
        (seeds.NAMES, (cuda, cuda.random)),
        (_GRAPHS, (cuda, cuda.graphs)),
        (_IN_C, (torch._C,)),
        (_ACCELERATOR, (torch.accelerator,)),
    ]
    for names, modules in places:
        for module in modules:
            for name, value in names.items():
                if module in (cuda, torch._C, torch.accelerator) or hasattr(module, name):
                    setattr(module, name, value)
    cuda.graphs._cuda_isCurrentStreamCapturing = captures.is_capturing
    for name in _MISSING_TYPES:
        if not hasattr(torch._C, name):
            setattr(torch._C, name, type(name, (), {}))
    cuda._initialized, cuda._cached_device_count = True, CARD.count
    cuda.default_generators = tuple(GENERATORS)
    cuda.memory._record_memory_history = lambda *_, **options: None
    cuda.memory._snapshot = lambda *_, **options: {"segments": [], "device_traces": [[]], "allocator_settings": {}}
    cuda.nvtx.range_push = NVTX_RANGES.append
    cuda.nvtx.range_pop = lambda: NVTX_RANGES.pop() and None
    torch.version.cuda = "13.0"
    backends: Any = torch.backends
    backends.cuda.is_built = lambda: True
    backends.cudnn.is_available = lambda: True
    backends.cudnn.version = lambda: 91000
