"""One way to keep the state of a module and to bring it back: :class:`StateSnapshot`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_accel.core.kept_state import (
    TORCHS_OWN,
    Names,
    Restore,
    can_be_restored,
    joined,
    keep_contents,
    keep_lengths,
    keep_names,
    keep_optimizer_state,
    keep_packed,
    keep_parameters,
    keep_values,
)
from lightning_accel.core.random_streams import random_streams, same_state, stream_of
from lightning_accel.core.torch_private.modules import buffer_slots

Named = list[tuple[str, Any]]

_SMALL_BYTES = 1 << 20  # of one tensor that is copied at every step: running statistics, not tables


class Level(IntEnum):
    """How much a snapshot keeps: each level keeps more than the level before it.

    Attributes:
        RANDOM: The random streams of the process and of generators that the module holds. Costs 80 µs, of which NumPy
            takes 60, and 10 KB.
        SMALL: Which objects attributes and buffers stand for; the values of buffers and of metrics up to 1 MiB each;
            the lengths of lists. Every step can pay for it: 1 µs for each module inside, a copying kernel for a dtype.
        FULL: All that a forward pass changes: the values of all buffers and of attributes that are tensors; the items
            of lists, dicts and sets. Costs a walk through the model, a kernel and memory for each of these tensors.
        TRAINING: All that a training step changes: also parameters, gradients, optimizers and schedules. Costs as much
            memory again as these take.
    """

    RANDOM = 0
    SMALL = 1
    FULL = 2
    TRAINING = 3


class StatePlaces:
    """Where a module holds its state. It is found once for the snapshots of all steps: a walk takes longer than these.

    A place is a path, a dict and a name in that dict.

    Attributes:
        names: The dicts of the attributes and of the buffers of each module inside, with the module's path.
        values: The places of all attributes and buffers.
        small: Places of buffers and metrics whose values a snapshot at :attr:`Level.SMALL` copies.
        large: Places of other tensors, whose values it does not copy.
        metric_lists: Places of lists that are the state of a metric, which also empties them.
        lists: Places of lists.
        generators: Places of random generators.
        scripted: Buffers of TorchScript's modules, with their paths. No name of theirs can be rebound.
    """

    def __init__(self, module: nn.Module) -> None:
        scripted = {path: part for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)}
        parts = [(path, part) for path, part in module.named_modules() if path not in scripted]
        slots = [(path, buffer_slots(part)) for path, part in parts]
        self.names: list[tuple[str, Names]] = [(path, vars(part)) for path, part in parts] + slots
        own = [(path, vars(part), name) for path, part in parts for name in vars(part) if name not in TORCHS_OWN]
        buffers = [(path, names, name) for path, names in slots for name in names]
        states = [(path, vars(part), name) for path, part in parts for name in _metric_states(part)]
        self.values = buffers + own
        self.small = [place for place in buffers + states if _is_small(_value(place))]
        known = {(id(names), name) for _, names, name in self.small}
        large = buffers + states + [place for place in own if isinstance(_value(place), Tensor)]
        self.large = [place for place in large if (id(place[1]), place[2]) not in known]
        self.metric_lists = [place for place in states if isinstance(_value(place), list)]
        self.lists = [place for place in own if type(_value(place)) is list]
        self.generators = [place for place in own if stream_of(_value(place))]
        self.scripted = [
            (joined(path, name), buffer)
            for path, part in scripted.items()
            for name, buffer in part.named_buffers(recurse=False)
            if can_be_restored(buffer)
        ]


class StateSnapshot:
    """The state of a module and of random streams, kept as it is now.

    :meth:`restore` brings it back, and so does the end of a ``with`` block.

    Attributes:
        random_states: The state of each random stream, by the stream's name.

    Args:
        module: The module. None if only the random streams of the process are to be kept.
        level: How much is kept.
        device: A device whose random stream is kept, with torch's stream on the host. None for neither of them.
        places: Where the module holds its state. None if that is still to be found.
        also: What is kept beside the module: the names in dicts and, at :attr:`Level.FULL`, the values of tensors.
        optimizers: The optimizers of the module, for :attr:`Level.TRAINING`.
        schedules: Their learning rate schedules, for the same.
        copies_on: The device on which copies wait, at :attr:`Level.FULL`. None for the device of each tensor.
    """

    def __init__(
        self,
        module: nn.Module | None,
        level: Level,
        device: torch.device | None = None,
        *,
        places: StatePlaces | None = None,
        also: Iterable[Tensor | Names] = (),
        optimizers: Sequence[Optimizer] = (),
        schedules: Iterable[object] = (),
        copies_on: torch.device | None = None,
    ) -> None:
        self._streams = random_streams(device)
        self._restores: list[Restore] = []
        if module is not None:
            places = places or StatePlaces(module)
            for path, names, name in places.generators:
                if (stream := stream_of(names.get(name))) is not None:
                    self._streams[joined(path, name)] = stream
            others: Named = [("also", one) for one in also]
            if level == Level.TRAINING:
                groups = [("optimizer", group) for optimizer in optimizers for group in optimizer.param_groups]
                others += groups + [("schedule", vars(schedule)) for schedule in schedules]
                others += [(joined(path, name), value) for path, group in groups for name, value in group.items()]
                self._restores.append(keep_parameters(module, copies_on))
                self._restores += [keep_optimizer_state(optimizer, copies_on) for optimizer in optimizers]
            if level >= Level.FULL:
                self._restores += _everything(places, others, copies_on)
            elif level == Level.SMALL:
                self._restores += _what_is_small(places, others)
        self.random_states = {name: read() for name, (read, _) in self._streams.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def drawn(self) -> list[str]:
        """Names the random streams that somebody has drawn from since."""
        states = self.random_states
        return [name for name, (read, _) in self._streams.items() if not same_state(read(), states[name])]

    def restore(self) -> list[str]:
        """Brings the state back. It can be called again, after more changes.

        Returns:
            The paths of what had changed and the names of streams. Values that were written in place are not named at
            :attr:`Level.SMALL`, nor are those of parameters, gradients and optimizer states.
        """
        with torch.no_grad():
            changed = [path for restore in self._restores for path in restore()]
        for name in (drawn := self.drawn()):
            self._streams[name][1](self.random_states[name])
        return list(dict.fromkeys(changed + drawn))


def _everything(places: StatePlaces, others: Named, copies_on: torch.device | None) -> Iterator[Restore]:
    held = [(joined(path, name), names[name]) for path, names, name in places.values] + places.scripted
    yield keep_values([(path, value) for path, value in held + others if can_be_restored(value)], copies_on)
    yield keep_names(places.names + [(path, names) for path, names in others if isinstance(names, dict)])
    yield keep_contents([(path, value) for path, value in held if isinstance(value, list | dict | set)])


def _what_is_small(places: StatePlaces, others: Named) -> Iterator[Restore]:
    scripted = [buffer for _, buffer in places.scripted if _is_small(buffer)]
    yield keep_packed([names[name] for _, names, name in places.small] + scripted)
    yield keep_names(places.names + others)
    lists = [(joined(path, name), names.get(name)) for path, names, name in places.metric_lists]
    yield keep_contents([(path, found) for path, found in lists if isinstance(found, list)])
    yield keep_lengths([found for _, names, name in places.lists if type(found := names.get(name)) is list])


def _value(place: tuple[str, Names, str]) -> Any:
    return place[1].get(place[2])


def _metric_states(part: nn.Module) -> Iterable[str]:
    torchmetrics = sys.modules.get("torchmetrics")
    return part.metric_state if torchmetrics is not None and isinstance(part, torchmetrics.Metric) else ()


def _is_small(value: Any) -> bool:
    return can_be_restored(value) and value.nbytes <= _SMALL_BYTES
