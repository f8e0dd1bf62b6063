"""How a model is called: on an example, on a batch of a loader, and the way to the user's forward from either."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from lightning_accel.core.tree import map_tensors, tensors_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and keyword arguments."""

TARGETS = ("labels", "targets", "label", "target")
"""The keys of a batch that are not shown to the model."""


def arguments_of(model: nn.Module, example: Any) -> Arguments:
    """An example as arguments of ``model``.

    A tensor is the one argument, a tuple or list the positional arguments, a mapping the keyword arguments where
    ``forward`` has parameters of these names, else the one argument.

    Raises:
        ValueError: There is no tensor in it.
    """
    if not tensors_in(example):
        raise ValueError(f"an example of type {type(example).__name__} has no tensor: give what forward() takes.")
    if isinstance(example, Mapping):
        names = inspect.signature(model.forward).parameters
        return ((), dict(example)) if set(example) <= set(names) else ((example,), {})
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def example_in(model: nn.Module, batch: Any) -> Any:
    """Of a batch, what ``forward`` takes: the first of more values than it has positions for, as others are targets."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    if isinstance(batch, tuple | list) and (takes_any or len(batch) <= len(positions(model))):
        return batch
    return inputs_and_targets(model, batch)[0]


def inputs_and_targets(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """A loader's batch as what the model sees and what it is to say; None for targets that there are not.

    Of a tuple the first values are the inputs, as many as ``forward`` cannot do without, one at least, and the last
    value beyond them the targets; or the first is a tuple or mapping of all inputs. Of a mapping the targets are what
    is under ``labels`` or ``targets``, or the one value that ``forward`` has no parameter for.
    """
    if isinstance(batch, Mapping):
        given = {key: value for key, value in batch.items() if key not in TARGETS}
        others = _without_parameter(model, given)
        target = next((batch[key] for key in (*TARGETS, *others) if key in batch), None)
        return {key: value for key, value in given.items() if key not in others}, target
    if not isinstance(batch, tuple | list) or not batch:
        return batch, None
    needed = sum(parameter.default is parameter.empty for parameter in positions(model))
    if needed < 2 or isinstance(batch[0], tuple | list | Mapping):
        return batch[0], batch[-1] if len(batch) > 1 else None
    return tuple(batch[:needed]), batch[-1] if len(batch) > needed else None


def positions(model: nn.Module) -> list[inspect.Parameter]:
    """The parameters of ``forward`` that positional arguments go to, one each."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _without_parameter(model: nn.Module, given: Mapping[str, Any]) -> list[str]:
    """The one key, if it is one, that ``forward`` does not take where it takes the others by name."""
    parameters = inspect.signature(model.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return []
    others = [key for key in given if key not in parameters]
    return others if len(others) == 1 < len(given) else []


def calls_of(model: nn.Module, loader: Iterable[Any], *, at_most: int, name: str) -> list[Arguments]:
    """The first few batches of a loader as arguments of ``model``.

    Raises:
        ValueError: There are none, or they hold no tensors.
    """
    calls = [arguments_of(model, inputs_and_targets(model, batch)[0]) for batch in islice(loader, at_most)]
    if not calls:
        raise ValueError(
            f"{name} gave no batches: give a loader with a few batches such as the model will be served, from the"
            " training data say. (An iterator that was read before has none left.)"
        )
    return calls


def on_device(data: Any, device: torch.device) -> Any:
    """The same with all tensors on a device."""
    return map_tensors(lambda tensor: tensor.to(device), data)


def shapes_in(arguments: Any) -> str:
    """The shapes of all tensors, for messages: ``(8, 3, 32, 32), (8,)``."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(arguments)) or "no tensors"


def batch_size_of(arguments: Any) -> int:
    """The size of the first dimension of the first tensor that has one; 0 without any."""
    return next((t.shape[0] for t in tensors_in(arguments) if t.dim() > 0), 0)
