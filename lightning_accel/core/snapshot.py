"""What a forward pass changes besides its result, noted before and put back after."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_accel.core.torch_private.modules import buffer_slots

Stream = tuple[Callable[[], Any], Callable[[Any], Any]]


class Snapshot:
    """Buffers, attributes, lists, dicts and sets of a module, its own random generators, and those of Python and NumPy.

    Values are compared, not version counters: batch norm's kernels move their statistics behind the counter's back.
    """

    OWN = frozenset(vars(nn.Module())) | {"forward", "track_running_stats"}

    def __init__(self, module: nn.Module) -> None:
        self._parts = dict(module.named_modules())
        self._slots = {site: dict(buffer_slots(part)) for site, part in self._parts.items()}
        self._attributes = {site: _attributes_of(part) for site, part in self._parts.items()}
        tensors = {_path(site, name): t for site, slots in self._slots.items() for name, t in slots.items()}
        for site, attributes in self._attributes.items():
            tensors |= {_path(site, name): value for name, (value, _) in attributes.items()}
        self._tensors = {path: (t, t.detach().clone()) for path, t in tensors.items() if can_be_put_back(t)}
        streams = random_streams()
        for site, attributes in self._attributes.items():
            own = {_path(site, name): own_stream(value) for name, (value, _) in attributes.items()}
            streams |= {path: stream for path, stream in own.items() if stream is not None}
        self._streams = [(name, read, write, read()) for name, (read, write) in streams.items()]

    def restore(self) -> list[str]:
        """Puts everything back, and names what had changed."""
        changed = []
        with torch.no_grad():
            for path, (tensor, value) in self._tensors.items():
                if not torch.equal(tensor, value):
                    changed.append(path)
                    tensor.copy_(value)
        for site, part in self._parts.items():
            changed += [_path(site, name) for name in _restore_attributes(part, self._attributes[site])]
            changed += [_path(site, name) for name in _restore_slots(part, self._slots[site])]
        for name, read, write, state in self._streams:
            if not same_state(read(), state):
                write(state)
                changed.append(name)
        return changed


def can_be_put_back(value: Any) -> TypeGuard[Tensor]:
    """Whether ``value`` is a tensor that can be copied, compared and written to, as most buffers can."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return False
    if value.layout != torch.strided or value.is_nested or value.is_meta or value.is_inference():
        return False
    return not any(size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True))  # expanded


def _path(site: str, name: str) -> str:
    return f"{site}.{name}" if site else name


def _attributes_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Every attribute that is not torch's own: its value, and a copy of that where it is a container."""
    return {
        name: (value, copy.copy(value) if isinstance(value, list | dict | set) else None)
        for name, value in vars(module).items()
        if name not in Snapshot.OWN
    }


def _restore_attributes(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    now = vars(module)
    for name in [name for name in now if name not in before and name not in Snapshot.OWN]:
        del now[name]
        yield name
    for name, (value, contents) in before.items():
        if now.get(name) is not value:
            now[name] = value
            yield name
        elif isinstance(value, list | dict | set) and not _same_items(value, contents):
            value.clear()
            value.extend(contents) if isinstance(value, list) else value.update(contents)
            yield name


def _restore_slots(module: nn.Module, before: dict[str, Tensor | None]) -> list[str]:
    """Puts back buffers that the forward pass assigned anew: ``self.mean = 0.9 * self.mean + 0.1 * x.mean()``."""
    now = buffer_slots(module)
    changed = [name for name in {**before, **now} if now.get(name) is not before.get(name)]
    if changed:
        now.clear()
        now.update(before)
    return changed


def _same_items(now: Any, before: Any) -> bool:
    """Whether two containers hold the very same objects; ``==`` would ask tensors, which answer with tensors."""
    if isinstance(now, dict):
        now, before = ([part for pair in items.items() for part in pair] for items in (now, before))
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def same_state(now: Any, before: Any) -> bool:
    """Whether a random stream is where it was, by its two states."""
    if isinstance(now, Tensor):
        return torch.equal(now, before)
    return pickle.dumps(now) == pickle.dumps(before)  # NumPy's holds an array, which == does not compare


def own_stream(value: Any) -> Stream | None:
    """The functions that get and set the state of a random generator; None: ``value`` is none."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # the system's has no state
        return value.getstate, value.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(value, numpy.random.RandomState):
            return value.get_state, value.set_state
        if isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            return functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")
    return None


def random_streams(device: torch.device | None = None) -> dict[str, Stream]:
    """The random streams that a step may draw from, each as the functions that get and set its state.

    With a device torch's are among them, that of the host and that of the device.
    """
    streams: dict[str, Stream] = {"random": (random.getstate, random.setstate)}
    if (numpy := sys.modules.get("numpy")) is not None:
        streams["numpy.random"] = (numpy.random.get_state, numpy.random.set_state)
    if device is not None:
        streams["torch"] = (torch.get_rng_state, torch.set_rng_state)
        if device.type == "cuda":
            get_state = functools.partial(torch.cuda.get_rng_state, device)
            streams["torch.cuda"] = (get_state, functools.partial(torch.cuda.set_rng_state, device=device))
    return streams
