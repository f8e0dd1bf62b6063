"""A step that may have to be repeated, and what it has to find as it was before."""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_accel.core.snapshot import Snapshot, can_be_put_back
from lightning_accel.core.tree import leaves, tensors_in

Step = Callable[..., Any]
Restore = Callable[[], Any]

_MAX_BUFFER_BYTES = 1 << 20  # of one buffer that is copied at every step: running statistics, not tables


class Attempt:
    """A step, and what it may change.

    In a trial step all of that is kept. Later, when every step pays for it, it is random streams, what was logged and
    a :class:`SmallState`; a list that a step appends to stays as it is.

    Attributes:
        step: Runs it, again perhaps.
        given: Its arguments, positional and by name.
        has_gone_backward: Whether there are gradients of it.

    Args:
        step: See above.
        given: See above.
        module: The run's module.
        state: Of the module; None in a step in which techniques are tried.
    """

    def __init__(self, step: Step, given: Any, module: LightningModule, state: SmallState | None) -> None:
        self.step = step
        self.has_gone_backward = False
        self.given = given
        self._module = module
        self._num_optimizer_steps = module.trainer.global_step
        # What Lightning does not see: optimizers that are stepped, and losses that go backward, by the module itself.
        self._trained = [] if module.automatic_optimization else _versions(module)
        self._restores = [*_random_states(module.device), *_logged(module)]
        self._versions: list[tuple[Tensor, int]] = []
        if state is None:
            self._restores += _whole_state(module, given)
        else:
            self._versions = [(t, t._version) for t in tensors_in(given) if not t.is_inference()]
            self._restores.append(state.keep())

    def note(self, state: SmallState) -> None:
        """Has the repetition find the buffers as they are now: sent by rank 0 after the step began."""
        self._restores.append(state.keep())

    def can_be_repeated(self) -> bool:
        reads_its_loader = any(hasattr(leaf, "__next__") for leaf in leaves(self.given))
        has_stepped = self._module.trainer.global_step != self._num_optimizer_steps
        has_trained = bool(self._trained) and self._trained != _versions(self._module)
        has_written = any(tensor._version != version for tensor, version in self._versions)
        return not (reads_its_loader or has_stepped or has_trained or has_written)

    def take_back(self) -> None:
        with torch.no_grad():
            for restore in self._restores:
                restore()


class SmallState:
    """What can be kept of a module at every step: what names stand for, and tensors as small as statistics are.

    Where these are is found once: to walk through a model takes its time.
    """

    def __init__(self, module: nn.Module) -> None:
        scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
        parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._attributes = [vars(part) for part in parts]
        self._buffers = [part._buffers for part in parts if part._buffers]
        metrics = [(vars(part), name) for part in parts if isinstance(part, Metric) for name in part._defaults]
        self._lists = [(own, name) for own, name in metrics if isinstance(own.get(name), list)]
        tensors = [(slots, name) for slots in self._buffers for name in slots] + metrics
        self._tensors = [(slots, name) for slots, name in tensors if _is_small(slots.get(name))]
        # TorchScript has names of its own, which are not to be had, and stand for the same tensors for good.
        self._scripted = [buffer for part in scripted for buffer in part.buffers(recurse=False) if _is_small(buffer)]

    def keep(self) -> Restore:
        """What brings it back as it is now."""
        attributes = [(own, dict(own)) for own in self._attributes]
        buffers = [(slots, dict(slots)) for slots in self._buffers]
        lists = [(own, name, copy.copy(own[name])) for own, name in self._lists]
        tensors = [slots[name] for slots, name in self._tensors] + self._scripted
        values = [torch.empty_like(tensor) for tensor in tensors]
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(values, tensors)

        def restore() -> None:
            for own, before in attributes:
                _rebind_attributes(own, before)
            for slots, before in buffers:
                _rebind(slots, before)
            for own, name, contents in lists:
                own[name] = contents
            if tensors:
                torch._foreach_copy_(tensors, values)

        return restore


def _is_small(value: Any) -> bool:
    return can_be_put_back(value) and value.nbytes <= _MAX_BUFFER_BYTES


def _versions(module: nn.Module) -> list[tuple[int, ...]]:
    """What differs once a parameter was written to, or got another gradient."""
    return [
        (p._version, id(p.grad), -1 if p.grad is None else p.grad._version)
        for p in module.parameters()
        if not p.is_inference()
    ]


def _random_states(device: torch.device) -> Iterator[Restore]:
    """What brings back the random streams as they are now."""
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    yield functools.partial(random.setstate, random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        yield functools.partial(numpy.random.set_state, numpy.random.get_state())
    if device.type == "cuda":
        yield functools.partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)


def _whole_state(module: LightningModule, given: Any) -> Iterator[Restore]:
    """What brings back a module and its batch as they are now."""
    yield Snapshot(module).restore
    for tensor in tensors_in(given):
        if not tensor.is_inference() and can_be_put_back(tensor):  # no count is kept of what is written into the former
            yield functools.partial(_put_back, tensor, tensor.clone(), tensor._version)


def _logged(module: LightningModule) -> Iterator[Restore]:
    """What brings back what was logged as it is now."""
    logged: Any = getattr(module.trainer, "_results", None)
    if logged is not None:
        for metric in logged.values():  # which adds up into new tensors, and never writes into one
            yield functools.partial(_rebind_attributes, vars(metric), dict(vars(metric)))
        yield functools.partial(_rebind, logged, dict(logged))


def _rebind(names: dict[str, Any], before: dict[str, Any]) -> None:
    """Has ``names`` stand for what they stood for ``before``, in the same order."""
    for name in [name for name in names if name not in before]:
        del names[name]
    for name, value in before.items():
        if names.get(name) is not value or name not in names:
            names[name] = value


def _rebind_attributes(own: dict[str, Any], before: dict[str, Any]) -> None:
    """The same for a module's attributes, but for torch's own and for edits, which are others' to undo."""
    edits = {name for names in (own, before) for name, value in names.items() if isinstance(value, types.MethodType)}
    kept = {name: own[name] for name in own if name in Snapshot.OWN or name in edits}
    restored = {name: value for name, value in before.items() if name not in edits and name not in Snapshot.OWN}
    _rebind(own, restored | kept)


def _put_back(tensor: Tensor, value: Tensor, version: int) -> None:
    if tensor._version != version:
        tensor.copy_(value)
