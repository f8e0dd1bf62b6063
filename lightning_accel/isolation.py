"""Leaves no trace: what a trial runs, and whatever it changes on the way, is hidden from the run and undone."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

_under_trial = ContextVar("_under_trial", default=False)


def is_trial() -> bool:
    """Whether this very call is part of a trial, for hooks that watch what the run itself does."""
    return _under_trial.get()


@contextmanager
def isolated(module: nn.Module) -> Iterator[list[str]]:
    """Leaves random streams, buffers, plain attributes and the active dispatch modes as they were found.

    Yields:
        A list that holds, once the context is left, the names of what was found changed and restored.
    """
    snapshot = Snapshot(module)
    changed: list[str] = []
    with ExitStack() as stack:
        token = _under_trial.set(True)
        stack.callback(_under_trial.reset, token)
        stack.enter_context(own_rng(device_of(module)))
        # Someone may be counting FLOPs or watching storages, or (a checkpoint around this module) counting what is
        # saved for backward: a trial is none of their business.
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_pack, _unpack))
        # A weight cast here, under no_grad perhaps, must not be what an autocast region of the user's goes on with.
        stack.enter_context(no_cast_cache())
        stack.callback(torch.clear_autocast_cache)
        try:
            yield changed
        finally:
            changed += snapshot.restore()


def _pack(saved: Tensor) -> tuple[Tensor, int]:
    return saved.detach(), saved._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    # Autograd leaves this check to whoever packs: without it a trial would pass where the run then raises.
    saved, version = packed
    if saved._version != version:
        raise RuntimeError("a tensor that its backward pass needs was modified in place")
    return saved


@contextmanager
def no_cast_cache() -> Iterator[None]:
    """Inside, an autocast region that is in force casts every weight anew at each use."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class Snapshot:
    """What a forward pass may change besides its result: buffers, attributes, lists and dicts, Python's own `random`.

    Values are compared, not version counters: batch norm's kernels move their statistics behind the counter's back.
    """

    _OWN = frozenset(vars(nn.Module())) | {"forward", "track_running_stats"}

    def __init__(self, module: nn.Module) -> None:
        self._modules = dict(module.named_modules())
        self._slots = {n: dict(m._buffers) for n, m in self._modules.items()}
        self._attributes = {n: self._attributes_of(m) for n, m in self._modules.items()}
        tensors = {f"{n}.{name}".lstrip("."): t for n, slots in self._slots.items() for name, t in slots.items()}
        for prefix, attributes in self._attributes.items():
            tensors |= {f"{prefix}.{name}".lstrip("."): value for name, (value, _) in attributes.items()}
        self._tensors = {n: (t, t.detach().clone()) for n, t in tensors.items() if isinstance(t, Tensor)}
        self._random = _random_states()

    def restore(self) -> list[str]:
        """Puts everything back, and names what had changed."""
        changed = []
        with torch.no_grad():
            for name, (tensor, value) in self._tensors.items():
                if not torch.equal(tensor, value):
                    changed.append(name)
                    tensor.copy_(value)
        for prefix, module in self._modules.items():
            for name in self._restore_attributes(module, self._attributes[prefix]):
                changed.append(f"{prefix}.{name}" if prefix else name)
            # A buffer that the forward pass assigned anew: `self.mean = 0.9 * self.mean + 0.1 * x.mean()`.
            slots = self._slots[prefix]
            replaced = [n for n in {**slots, **module._buffers} if module._buffers.get(n) is not slots.get(n)]
            if replaced:
                changed += [f"{prefix}.{name}" if prefix else name for name in replaced]
                module._buffers.clear()
                module._buffers.update(slots)
        now = _random_states()
        for name, (state, restore) in self._random.items():
            if now[name][0] != state:
                restore()
                changed.append(name)
        return changed

    @classmethod
    def _attributes_of(cls, module: nn.Module) -> dict[str, tuple[Any, Any]]:
        return {
            name: (value, copy.copy(value) if isinstance(value, list | dict | set) else None)
            for name, value in vars(module).items()
            if name not in cls._OWN
        }

    @classmethod
    def _restore_attributes(cls, module: nn.Module, before: dict[str, tuple[Any, Any]]) -> Iterator[str]:
        now = vars(module)
        for name in [name for name in now if name not in before and name not in cls._OWN]:
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


def _random_states() -> dict[str, tuple[object, Callable[[], None]]]:
    """The random streams beside torch's, in comparable form, each with the function that brings it back here."""
    python = random.getstate()
    states: dict[str, tuple[object, Callable[[], None]]] = {"random": (python, lambda: random.setstate(python))}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        states["numpy.random"] = (repr(state[2:]) + state[1].tobytes().hex(), lambda: numpy.random.set_state(state))
    return states


def _same_items(now: Any, before: Any) -> bool:
    """Whether two containers hold the very same objects; `==` would ask tensors, which answer with tensors."""
    if isinstance(now, dict):
        return list(map(id, now)) == list(map(id, before)) and _same_items([*now.values()], [*before.values()])
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


@contextmanager
def dropout_off(module: nn.Module) -> Iterator[None]:
    """Switches the dropout modules inside ``module`` off: two sides can only be compared without it."""
    active = [m for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    for dropout in active:
        dropout.training = False
    try:
        yield
    finally:
        for dropout in active:
            dropout.training = True


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter; the CPU without any."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def own_rng(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn inside leaves the random streams of the host, and of ``device`` if that is a GPU, as they were."""
    devices = [device] if device.type in ("cuda", "mps") else []
    return torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
