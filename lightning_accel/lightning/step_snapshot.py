"""A step that may have to be repeated, and what it has to find as it was before."""

from __future__ import annotations

import copy
import functools
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_accel.core.snapshot import Snapshot, can_be_put_back, own_stream, random_streams
from lightning_accel.core.torch_private.modules import buffer_slots
from lightning_accel.core.torch_private.tensors import version_of
from lightning_accel.core.tree import leaves, tensors_in
from lightning_accel.lightning.packages import LightningModule, Trainer
from lightning_accel.lightning.private import logged_results
from lightning_accel.lightning.training_state import trainable, trained_before, versions

Step = Callable[..., Any]
Restore = Callable[[], Any]

_MAX_BUFFER_BYTES = 1 << 20  # of one buffer that is copied at every step: running statistics, not tables


class Attempt:
    """A step under way, with its arguments, and what it may change.

    In a trial step, where ``state`` is None, all of that is kept, and what it may train. Later, when every step pays
    for it, it is random streams, what was logged and a :class:`SmallState`.
    """

    def __init__(self, step: Step, given: Any, module: LightningModule, state: SmallState | None) -> None:
        self.step = step
        self.given = given
        self._module = module
        self._num_optimizer_steps = module.trainer.global_step
        self._is_kept = True
        self._state = state
        # What Lightning does not see: optimizers that are stepped, and losses that go backward, by the module itself.
        self._parameters = trainable(module) if state is None else state.parameters
        self._is_automatic = module.automatic_optimization
        self._trained = self._versions()
        self._whole = trained_before(module) if state is None else None
        self._given_versions: list[tuple[Tensor, int]] = []
        self._large_versions: list[tuple[Tensor, int]] = []
        streams = random_streams(module.device).values()
        self._restores: list[Restore] = [functools.partial(write, read()) for read, write in streams]
        self._restores += _logged(module)
        if not self._is_automatic or state is None:
            # Toggling an optimizer has others' parameters wait; a repetition would take that for their own state.
            required = [(p, p.requires_grad) for p in self._parameters]
            self._restores.append(functools.partial(_have_required, required))
        if state is None:
            self._restores += [Snapshot(module).restore, *_contents(given)]
        else:
            self._given_versions = [(t, version_of(t)) for t in tensors_in(given) if not t.is_inference()]
            self._restores.append(state.keep())
            state.look()
            self._large_versions = state.versions()

    def keep_again(self, state: SmallState | None) -> None:
        """Has the repetition find the module as it is now: rank 0 sent its buffers after the step began."""
        try:
            self._restores.append((state or SmallState(self._module)).keep())
            self._large_versions = state.versions() if state else []
        except Exception:  # this is called within the user's own step, which has nothing to do with it
            self._is_kept = False

    def can_be_repeated(self) -> bool:
        reads_its_loader = any(hasattr(leaf, "__next__") for leaf in leaves(self.given))
        has_stepped = self._module.trainer.global_step != self._num_optimizer_steps
        has_trained = self._whole is None and (has_stepped or self._trained != self._versions())
        versions = [*self._given_versions, *self._large_versions]
        has_written = any(version_of(tensor) != version for tensor, version in versions)
        has_written |= self._state is not None and self._state.is_written_unseen
        return self._is_kept and not (reads_its_loader or has_trained or has_written)

    def _versions(self) -> list[Any]:
        return versions(self._parameters, gradients=not self._is_automatic)

    def take_back(self) -> None:
        with torch.no_grad():
            if self._whole is not None:
                self._whole.restore()
            for restore in self._restores:
                restore()


def begins_gradients(trainer: Trainer) -> bool:
    """Whether the gradients of the batch at hand are added to none: Lightning has none before it."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


class SmallState:
    """What can be kept of a module at every step: what names stand for, and tensors as small as statistics are.

    Where these are is found once: to walk through a model takes its time. Of what is larger (a codebook, a queue) it is
    told whether it was written to.

    Attributes:
        parameters: Of the module, as far as they count what is written to them.
        is_written_unseen: Whether some of that is written to by ``.data``, which its count of writes does not show.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = trainable(module)
        scripted = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
        parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._attributes = [vars(part) for part in parts]
        self._buffers = [slots for part in parts if (slots := buffer_slots(part))]
        metrics = [(vars(part), name) for part in parts if isinstance(part, Metric) for name in part.metric_state]
        self._lists = [(own, name) for own, name in metrics if isinstance(own.get(name), list)]
        tensors = [(slots, name) for slots in self._buffers for name in slots] + metrics
        self._tensors = [(slots, name) for slots, name in tensors if _is_small(slots.get(name))]
        attributes = [(own, name) for own in self._attributes for name in own if name not in Snapshot.OWN]
        known = {(id(slots), name) for slots, name in self._tensors}
        self._large = [
            (slots, name)
            for slots, name in tensors + [(own, name) for own, name in attributes if isinstance(own[name], Tensor)]
            if (id(slots), name) not in known
        ]
        self._streams = [(own, name) for own, name in attributes if own_stream(own[name])]
        self._appended = [(own, name) for own, name in attributes if type(own[name]) is list]
        self._sums: list[tuple[Tensor, int, int]] = []
        self._looks_left = 2 if self._large else 0
        self.is_written_unseen = False
        # TorchScript has names of its own, which are not to be had, and stand for the same tensors for good.
        self._scripted = [buffer for part in scripted for buffer in part.buffers(recurse=False) if _is_small(buffer)]

    def keep(self) -> Restore:
        """What brings it back as it is now."""
        attributes = [(own, dict(own)) for own in self._attributes]
        buffers = [(slots, dict(slots)) for slots in self._buffers]
        lists = [(own, name, copy.copy(own[name])) for own, name in self._lists]
        tensors = [slots[name] for slots, name in self._tensors] + self._scripted
        put_back = _kept(tensors)
        lengths = [(found, len(found)) for own, name in self._appended if type(found := own.get(name)) is list]
        streams = [stream for own, name in self._streams if (stream := own_stream(own.get(name)))]
        states = [(write, read()) for read, write in streams]

        def restore() -> None:
            for own, before in attributes:
                _rebind_attributes(own, before)
            for slots, before in buffers:
                _rebind(slots, before)
            for own, name, contents in lists:
                own[name] = copy.copy(contents)  # there may be another repetition
            put_back()
            for appended, length in lengths:
                del appended[length:]
            for write, state in states:
                write(state)

        return restore

    def versions(self) -> list[tuple[Tensor, int]]:
        """What is too large to be kept, and how often it has been written to."""
        found = (slots.get(name) for slots, name in self._large)
        return [(t, version_of(t)) for t in found if isinstance(t, Tensor) and not (is_lazy(t) or t.is_inference())]

    def look(self) -> None:
        """Compares what is too large to be kept before two steps, once: a sum over a table takes its time."""
        if not self._looks_left:
            return
        self._looks_left -= 1
        unwritten = [(t, total) for t, version, total in self._sums if version_of(t) == version]
        self.is_written_unseen = any(_sum_of(tensor) != total for tensor, total in unwritten)
        large = self.versions() if self._looks_left else ()
        self._sums = [(t, version, _sum_of(t)) for t, version in large if can_be_put_back(t)]


def _kept(tensors: list[Tensor]) -> Restore:
    """Copies tensors at the cost of one copy of each kind: every step keeps the running statistics of all norms."""
    kinds: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[type(tensor), tensor.dtype, tensor.device].append(tensor)
    copies = [torch.cat([tensor.detach().reshape(-1) for tensor in alike]) for alike in kinds.values()]

    def put_back() -> None:
        for alike, values in zip(kinds.values(), copies, strict=True):
            for tensor, value in zip(alike, torch.split(values, [tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(value.view_as(tensor))

    return put_back


def _sum_of(tensor: Tensor) -> int:
    """Of its bytes, as which every dtype can be read."""
    return int(tensor.detach().reshape(-1).contiguous().view(torch.uint8).sum())


def _is_small(value: Any) -> bool:
    return can_be_put_back(value) and value.nbytes <= _MAX_BUFFER_BYTES


def _contents(given: Any) -> Iterator[Restore]:
    for tensor in tensors_in(given):
        if not tensor.is_inference() and can_be_put_back(tensor):  # no count is kept of what is written into the former
            yield functools.partial(_put_back, tensor, tensor.clone(), version_of(tensor))


def _have_required(before: list[tuple[nn.Parameter, bool]]) -> None:
    for parameter, is_required in before:
        parameter.requires_grad = is_required


def _put_back(tensor: Tensor, value: Tensor, version: int) -> None:
    if version_of(tensor) != version:
        tensor.copy_(value)


def _logged(module: LightningModule) -> Iterator[Restore]:
    logged = logged_results(module.trainer)
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
