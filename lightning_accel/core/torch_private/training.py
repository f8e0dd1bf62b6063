"""Private names around a model in training: loaders, gradient scalers, distributed gradients, the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.patch import AttributePatch, PatchSet, applied


def exposed_communication(wrapped: DistributedDataParallel) -> float:
    """Returns the share of backward time in which only communication ran: ``_get_ddp_logging_data``, since torch 1.8.

    DistributedDataParallel times its first ten steps and then every hundredth. Without the name the share is unknown.
    """
    found = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    names = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time", "avg_backward_compute_time")
    communicating, overlapping, computing = (int(found.get(name, 0)) for name in names)
    exposed = max(0, communicating - overlapping)
    return exposed / (computing + exposed) if computing else 0.0


def num_exchanges() -> int:
    """Returns the number of collective calls so far, of the group of all ranks: ``_get_sequence_number_for_group``.

    It is 0 in a single process, and for backends that do not count.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return 0
    group: Any = dist.group.WORLD
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def check_all_reduced(wrapped: DistributedDataParallel) -> None:
    """Raises a ``RuntimeError`` if parameters that DDP waits for got no gradient in the last backward pass.

    DDP itself reports this only in the next step, after the optimizer has used gradients that were not averaged.
    ``_check_reducer_finalized``, since torch 2.1. Without the name DDP's later report remains.
    """
    if (check := getattr(wrapped, "_check_reducer_finalized", None)) is not None:
        check()


def optimizer_states(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """Returns a gradient scaler's state of each optimizer, by the optimizer's id: ``_per_optimizer_states``, torch 1.6.

    It shows whether gradients overflowed. Gradients that were unscaled and wait for their step must be kept there over
    an update. Without the name an AttributeError ends float16 training: wrong scales would go unnoticed.
    """
    states: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    return states


def map_parts(function: Callable[[int, Any], Any], data: Any, structure: Any) -> Any:
    """Returns ``data`` with each part at a leaf of ``structure`` replaced by ``function(number, part)``.

    Lightning flattens nested loaders with this module, in the order of its leaves. Since torch 1.8. Without the name:
    an ``ImportError``, since torch would then offer a public name.
    """
    _, spec = _pytree.tree_flatten(structure)
    parts = [function(number, part) for number, part in enumerate(spec.flatten_up_to(data))]
    return _pytree.tree_unflatten(parts, spec)


def hold_device(ms: float) -> None:
    """Makes the current CUDA stream idle for ``ms`` milliseconds, or up to a few times as long: ``_sleep``, torch 0.4.

    It counts clock cycles at 2 GHz, the highest rate. The limit is half a second, since displays are reset after two
    seconds. Without the name no step is held back, and idle time is counted in other parts.
    """
    if (sleep := getattr(torch.cuda, "_sleep", None)) is not None:
        sleep(int(2e6 * min(ms, 500.0)))


@contextmanager
def told_of_loading(told: Callable[[float], object]) -> Iterator[None]:
    """Reports how many milliseconds a DataLoader without workers takes to load a batch's samples before collating.

    No public hook lies between the two: ``torch.utils.data._utils.fetch``, since torch 1.2. Without it nothing is
    reported, and all loading time is assumed to grow with the batch. Loaders of other threads are not reported.
    """
    fetchers = getattr(getattr(torch.utils.data, "_utils", None), "fetch", None)
    found = {} if fetchers is None else vars(fetchers)
    kinds: list[Any] = [kind for kind in found.values() if isinstance(kind, type)]
    thread = threading.get_ident()

    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(self: Any, index: Any) -> Any:
            if threading.get_ident() != thread:
                return original(self, index)
            collate, stopwatch = self.collate_fn, Stopwatch()

            def collate_fn(samples: Any) -> Any:
                told(1e3 * stopwatch.seconds())
                return collate(samples)

            self.collate_fn = collate_fn
            try:
                return original(self, index)
            finally:
                self.collate_fn = collate

        return fetch

    with applied(
        PatchSet(
            AttributePatch(kind.__name__, "tells of it", kind, "fetch", telling(vars(kind)["fetch"]))
            for kind in kinds
            if "fetch" in vars(kind)
        )
    ):
        yield
