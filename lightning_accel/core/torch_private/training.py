"""Private names of what is around a model in training: loaders, scalers, gradients over ranks, the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from lightning_accel.core.clocks import Stopwatch


def exposed_communication(wrapped: DistributedDataParallel) -> float:
    """Which share of backward passes nothing but communication went on in: ``_get_ddp_logging_data``, since torch 1.8.

    DistributedDataParallel times its first ten steps, and each hundredth. Without the name nothing is told apart.
    """
    found = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    names = ("avg_backward_comm_time", "avg_backward_compute_comm_overlap_time", "avg_backward_compute_time")
    communicating, overlapping, computing = (int(found.get(name, 0)) for name in names)
    exposed = max(0, communicating - overlapping)
    return exposed / (computing + exposed) if computing else 0.0


def check_all_reduced(wrapped: DistributedDataParallel) -> None:
    """Raises a ``RuntimeError`` after a backward pass in which parameters that DDP waits for got no gradient.

    Publicly DDP says so in the next step, when the optimizer has stepped with what was not averaged. Since torch 2.1.
    Without the name: it is left to the next step.
    """
    if (check := getattr(wrapped, "_check_reducer_finalized", None)) is not None:
        check()


def optimizer_states(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """What a gradient scaler knows of each optimizer under way, by its id: ``_per_optimizer_states``, torch 1.6.

    There is found whether gradients overflowed, and what was unscaled and waits for its step has to be kept there over
    an update. Without it an AttributeError ends float16 training: wrong scales would be silent.
    """
    states: dict[int, dict[str, Any]] = scaler._per_optimizer_states
    return states


def map_parts(function: Callable[[int, Any], Any], data: Any, structure: Any) -> Any:
    """``data`` with ``function(number, part)`` in place of each part that stands where ``structure`` has a leaf.

    Lightning flattens nested loaders with this module, and their order is that of its leaves. Since torch 1.8.
    Without the name: an ``ImportError``; it would have got a public name.
    """
    _, spec = _pytree.tree_flatten(structure)
    parts = [function(number, part) for number, part in enumerate(spec.flatten_up_to(data))]
    return _pytree.tree_unflatten(parts, spec)


def hold_device(ms: float) -> None:
    """Has the current CUDA stream do nothing for so many milliseconds, or up to some times that: ``_sleep``, torch 0.4.

    It counts cycles of a clock that goes at 2 GHz at most; the longest is half a second, as displays are reset after
    two. Without the name no step is held back, and no idle time is found: it is in the other parts.
    """
    if (sleep := getattr(torch.cuda, "_sleep", None)) is not None:
        sleep(int(2e6 * min(ms, 500.0)))


@contextmanager
def told_of_loading(told: Callable[[float], object]) -> Iterator[None]:
    """Tells how many milliseconds a DataLoader without workers takes for a batch's samples, which it then collates.

    Nothing public comes between the two: ``torch.utils.data._utils.fetch``, since torch 1.2. Without it, nothing is
    told: all of loading is then taken to grow with the batch. Other threads' loaders are not told of.
    """
    fetchers = getattr(getattr(torch.utils.data, "_utils", None), "fetch", None)
    found = {} if fetchers is None else vars(fetchers)
    kinds: list[Any] = [kind for kind in found.values() if isinstance(kind, type)]
    edited = [(kind, kind.__dict__["fetch"]) for kind in kinds if "fetch" in vars(kind)]
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

    for kind, original in edited:
        kind.fetch = telling(original)
    try:
        yield
    finally:
        for kind, original in edited:
            kind.fetch = original
