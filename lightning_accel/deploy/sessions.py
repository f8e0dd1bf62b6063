"""Files of other libraries' that are called as the model is: by its names, with its constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.tree import leaves, tensors_in
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.ops.arrays import tensor_as_numpy

_CONSTANTS = (bool, int, float, complex, str)


class FileSession:
    """A library's session that takes and returns tensors: ``run`` has arrays by names, in the order of the model's."""

    def __init__(self, names: Sequence[str], run: Callable[[dict[str, Any]], Sequence[Any]]) -> None:
        self._names = names
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        others = {name: value for name, value in kwargs.items() if name not in self._names}
        wrong = [name for name, value in others.items() if isinstance(value, Tensor)]
        # What is in containers has a name of its own in the file: by their order, as are positional arguments.
        ordered = [value for name, value in others.items() if name not in wrong]
        feeds = dict(zip(self._names, tensors_in((args, ordered)), strict=False))
        twice = [name for name in kwargs if name in feeds]
        feeds |= {name: value for name, value in kwargs.items() if name in self._names}
        missing = [name for name in self._names if not isinstance(feeds.get(name), Tensor)]
        more = len(tensors_in((args, kwargs))) - len(self._names)
        if wrong or twice or missing or more:
            said = [f"no input is called {', '.join(wrong)}"] * bool(wrong)
            said += [f"{', '.join(twice)} given twice"] * bool(twice)
            said += [f"{', '.join(missing)} missing"] * bool(missing)
            said = said or [f"{more} tensors too many"]
            raise TypeError(f"{'; '.join(said)}: the file takes {', '.join(self._names)}.")
        found = self._run({name: tensor_as_numpy(feeds[name].cpu()) for name in self._names})
        return [torch.from_numpy(one) for one in found]


def constants_of(model: nn.Module, arguments: Arguments) -> dict[str, Any]:
    """Of ``forward``'s arguments, given or by default, those that are numbers or text: a file has them as they are."""
    args, kwargs = arguments
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if _is_constant(value)}


class WithConstants:
    """A file that refuses other constants than it has."""

    def __init__(self, call: Callable[..., Any], parameters: Sequence[str], constants: Mapping[str, Any]) -> None:
        self._call = call
        self._parameters = parameters
        self._constants = constants

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        for name, value in self._constants.items():
            if name in given and not (_is_constant(given[name]) and given[name] == value):
                raise ValueError(
                    f"{name}={given[name]!r}: the file has {name}={value!r}, which is no tensor and was that in the"
                    " example. Give that, or export the model with the other."
                )
        return self._call(*args, **kwargs)


def _is_constant(value: Any) -> bool:
    found = leaves(value)
    return bool(found) and all(isinstance(one, _CONSTANTS) for one in found)
