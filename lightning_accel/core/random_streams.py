"""The random streams that a step may draw from, and how to read and compare their states."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Stream = tuple[Callable[[], Any], Callable[[Any], Any]]
"""The functions that get and set the state of one random stream."""

TORCHS = frozenset(("torch", "torch.cuda", "torch.mps"))
"""The names of torch's own streams in :func:`random_streams`."""

OTHERS = frozenset(("random", "numpy.random"))
"""The names of the other streams in :func:`random_streams`: Python's and NumPy's."""


def random_streams(device: torch.device | None = None) -> dict[str, Stream]:
    """Lists the random streams of the process, by name.

    Args:
        device: Adds torch's streams of the host and of this device. None for Python's and NumPy's streams only.
    """
    streams: dict[str, Stream] = {"random": (random.getstate, random.setstate)}
    if (numpy := sys.modules.get("numpy")) is not None:
        streams["numpy.random"] = (numpy.random.get_state, numpy.random.set_state)
    return streams if device is None else streams | torchs_streams(device)


@functools.cache
def torchs_streams(device: torch.device) -> dict[str, Stream]:
    """Lists torch's streams of the host and of a device, by name."""
    streams: dict[str, Stream] = {"torch": (torch.default_generator.get_state, torch.set_rng_state)}
    if device.type == "cuda":
        get_state = functools.partial(torch.cuda.get_rng_state, device)
        streams["torch.cuda"] = (get_state, functools.partial(torch.cuda.set_rng_state, device=device))
    elif device.type == "mps":
        streams["torch.mps"] = (torch.mps.get_rng_state, torch.mps.set_rng_state)
    return streams


def stream_of(value: Any) -> Stream | None:
    """Returns the stream of a random generator; None if ``value`` is not a generator or has no state."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.random.RandomState):
            return value.get_state, value.set_state
        if isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            return functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")
    return None


def same_state(now: Any, before: Any) -> bool:
    """Returns whether two states of a stream are equal, which means that nobody has drawn from it in between."""
    if isinstance(now, Tensor):  # modes would see an operation of torch
        now, before = now.numpy(), before.numpy()
    if hasattr(now, "tobytes"):
        return bool(now.tobytes() == before.tobytes())
    try:
        return bool(now == before)
    except ValueError:  # NumPy's tuples and dicts hold an array, which == compares element by element
        pairs = (state.values() if isinstance(state, dict) else state for state in (now, before))
        return all(map(same_state, *pairs))


def seed_streams(seed: int, device: torch.device) -> None:
    """Seeds torch's streams of the host and, if it is a GPU, of ``device``.

    ``torch.manual_seed`` would also seed all devices that are not in use yet. For that it saves the call stack, which
    takes longer than many trials.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
