"""The arguments of a model's forward, taken from an example or from a batch of a loader."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_accel.core.tree import map_tensors, tensors_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(positional arguments, keyword arguments)."""

TARGETS = ("labels", "targets", "label", "target")
"""Keys of a batch that are not passed to the model."""


def arguments_of(model: nn.Module, example: Any) -> Arguments:
    """Returns an example as arguments of ``model``.

    A tensor is the only argument. A tuple or list holds the positional arguments. A mapping holds the keyword arguments
    if ``forward`` has parameters of these names, and otherwise is the only argument.

    Raises:
        ValueError: The example has no tensor.
    """
    if not tensors_in(example):
        raise ValueError(f"an example of type {type(example).__name__} has no tensor: give what forward() takes.")
    if isinstance(example, Mapping):
        names = inspect.signature(model.forward).parameters
        return ((), dict(example)) if set(example) <= set(names) else ((example,), {})
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def example_in(model: nn.Module, batch: Any) -> Any:
    """Returns what ``forward`` takes of a batch. If there are more values than positions, the others are targets."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    if isinstance(batch, tuple | list) and (takes_any or len(batch) <= len(positions(model))):
        return batch
    return inputs_and_targets(model, batch)[0]


def inputs_and_targets(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Splits a loader's batch into the model's inputs and the targets; None for targets if there are none.

    In a tuple, the first values are the inputs, as many as ``forward`` requires and at least one, and the last value
    beyond them is the targets; or the first value is a tuple or mapping of all inputs. In a mapping, the targets are
    under ``labels`` or ``targets``, or are the only value for which ``forward`` has no parameter.
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
    """Returns the parameters of ``forward`` that take one positional argument each."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _without_parameter(model: nn.Module, given: Mapping[str, Any]) -> list[str]:
    """Returns the key that ``forward`` does not accept, if there is exactly one among accepted ones."""
    parameters = inspect.signature(model.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return []
    others = [key for key in given if key not in parameters]
    return others if len(others) == 1 < len(given) else []


def on_device(data: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), data)


def shapes_in(arguments: Any) -> str:
    """Returns the shapes of all tensors, for messages: ``(8, 3, 32, 32), (8,)``."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(arguments)) or "no tensors"
