"""Keeps the state of a module and brings it back: :class:`StateSnapshot`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_accel.core import kept_state
from lightning_accel.core.kept_state import TORCHS_OWN, Names, Restore, can_be_restored, joined
from lightning_accel.core.random_streams import OTHERS, TORCHS, random_streams, same_state, stream_of, torchs_streams
from lightning_accel.core.torch_private.modules import buffer_slots

Named = list[tuple[str, Any]]
Place = tuple[str, Names, str]

_SMALL_BYTES = 1 << 20  # the largest tensor copied at every step: running statistics, not tables


class Level(IntEnum):
    """How much a snapshot keeps. Each level keeps more than the level before it.

    Attributes:
        RANDOM: The random streams of the process and of generators that the module holds. Costs 80 µs, of which NumPy
            takes 60, and 10 KB.
        SMALL: Which objects attributes and buffers refer to; the values of buffers and of metrics up to 1 MiB each; the
            lengths of lists. Cheap enough for every step: 1 µs for each inner module, and one kernel for each dtype.
        FULL: All that a forward pass changes: the values of all buffers and of attributes that are tensors; the items
            of lists, dicts and sets. Costs a walk through the model, and a kernel and memory for each of these tensors.
        TRAINING: All that a training step changes: also parameters, gradients and optimizers. Costs as much memory
            again as these take.
    """

    RANDOM = 0
    SMALL = 1
    FULL = 2
    TRAINING = 3


class StatePlaces:
    """The places where a module holds its state, found once for the snapshots of all steps.

    A place is (path, dict, name in the dict). :attr:`Level.SMALL` copies the values at ``small``, but not those of the
    other tensors, at ``large``. Metrics also empty their ``metric_lists``. To the other ``lists`` a step only appends.
    """

    def __init__(self, module: nn.Module) -> None:
        torchmetrics = sys.modules.get("torchmetrics")
        self.dicts: list[tuple[str, Names]] = []
        attributes, buffers, states = list[Place](), list[Place](), list[Place]()
        for path, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):  # rebinds nothing and exposes no dicts
                buffers += _places(path, dict(part.named_buffers(recurse=False)))
                continue
            self.dicts += [(path, vars(part)), (path, buffer_slots(part))]
            attributes += _places(path, vars(part))
            buffers += _places(path, buffer_slots(part))
            if torchmetrics is not None and isinstance(part, torchmetrics.Metric):
                states += [(joined(path, name), vars(part), name) for name in part.metric_state]
        self.all = buffers + attributes
        kept = [(place, _value(place)) for place in buffers + states]
        self.small = [place for place, value in kept if can_be_restored(value) and value.nbytes <= _SMALL_BYTES]
        small = {(id(names), name) for _, names, name in self.small}
        large = buffers + states + [place for place in attributes if isinstance(_value(place), Tensor)]
        self.large = [place for place in large if (id(place[1]), place[2]) not in small]
        self.metric_lists = [place for place in states if isinstance(_value(place), list)]
        self.lists = [place for place in attributes if type(_value(place)) is list]
        self.generators = [place for place in attributes if stream_of(_value(place))]


class StateSnapshot:
    """The state of a module and of random streams at the time of its creation.

    :meth:`restore` brings the state back, and so does the end of a ``with`` block.

    Args:
        module: The module. None to keep only the random streams of the process.
        level: How much is kept.
        device: A device whose random stream is kept, with torch's stream of the host. None for neither of them.
        places: Where the module holds its state. None to search for the places.
        also: What is kept besides the module: the names in dicts and, from :attr:`Level.FULL` on, the values of
            tensors.
        optimizers: The optimizers of the module, for :attr:`Level.TRAINING`.
        copies_on: The device that stores copies, from :attr:`Level.FULL` on. None for the device of each tensor.
        only_torchs_streams: Whether to leave out the random streams of Python and NumPy.

    Attributes:
        random_states: The state of each random stream, by the stream's name.
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
        copies_on: torch.device | None = None,
        only_torchs_streams: bool = False,
    ) -> None:
        torchs = {} if device is None else torchs_streams(device)
        self._streams = {**torchs} if only_torchs_streams else random_streams(device)
        self._restores: list[Restore] = []
        if module is not None:
            places = places or StatePlaces(module)
            for path, names, name in places.generators:
                if (stream := stream_of(names.get(name))) is not None:
                    self._streams[f"the module's {path}" if path in TORCHS | OTHERS else path] = stream
            others: Named = [("also", one) for one in also]
            if level == Level.TRAINING:
                self._restores.append(kept_state.keep_training(module, optimizers, copies_on))
                groups = [group for optimizer in optimizers for group in optimizer.param_groups]
                others += [("optimizer", group) for group in groups]
                others += [(f"optimizer.{name}", value) for group in groups for name, value in group.items()]
            if level >= Level.FULL:
                held = [(path, names.get(name)) for path, names, name in places.all]
                tensors = [(path, value) for path, value in held + others if can_be_restored(value)]
                containers = [(path, value) for path, value in held if isinstance(value, list | dict | set)]
                self._restores += [kept_state.keep_values(tensors, copies_on), kept_state.keep_items(containers)]
            elif level == Level.SMALL:
                small = [(path, names[name]) for path, names, name in places.small]
                self._restores.append(kept_state.keep_values(small, packed=True))
                if places.metric_lists or places.lists:  # saves time, since it runs at every step
                    states = [(p, x) for p, names, n in places.metric_lists if isinstance(x := names.get(n), list)]
                    lists = [(p, x) for p, names, n in places.lists if type(x := names.get(n)) is list]
                    self._restores.append(kept_state.keep_items(states, lists))
            if level > Level.RANDOM:
                dicts = [one for one in others if isinstance(one[1], dict)] if others else others
                self._restores.append(kept_state.keep_names(places.dicts + dicts))
        self.random_states = {name: read() for name, (read, _) in self._streams.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def drawn(self) -> list[str]:
        """Returns the names of the random streams that have been drawn from since."""
        before = self.random_states
        return [name for name, (read, _) in self._streams.items() if not same_state(read(), before[name])]

    def restore(self) -> list[str]:
        """Brings the state back. It can be called again, after more changes.

        Returns:
            The paths, and the names of streams, that had changed. Parameters, gradients and optimizer states are
                restored without a comparison and are not named.
        """
        with torch.no_grad():
            changed = [path for restore in self._restores for path in restore()]
        for name in (drawn := self.drawn()):
            self._streams[name][1](self.random_states[name])
        return list(dict.fromkeys(changed + drawn))


def _places(path: str, names: Names) -> list[Place]:
    return [(joined(path, name), names, name) for name in names if name not in TORCHS_OWN]


def _value(place: Place) -> Any:
    return place[1].get(place[2])
