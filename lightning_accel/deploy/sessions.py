"""Wrappers that call the files of other libraries like the model, with its argument names and constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.tree import leaves, tensors_in
from lightning_accel.deploy.inputs import Arguments
from lightning_accel.ops.arrays import tensor_as_numpy


@dataclass
class FileSession:
    """A library's session, with tensors as inputs and outputs."""

    names: Sequence[str]  # of inputs, in the model's order
    run: Callable[[dict[str, Any]], Sequence[Any]]  # takes arrays by these names

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return [torch.from_numpy(one) for one in self.run(self.feeds(*args, **kwargs))]

    def feeds(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the model's arguments as arrays under the file's input names.

        Raises:
            TypeError: The arguments do not fit the file.
        """
        others = {name: value for name, value in kwargs.items() if name not in self.names}
        wrong = [name for name, value in others.items() if isinstance(value, Tensor)]
        # Tensors in containers have other names in the file. They are matched by order, like positional arguments.
        ordered = [value for name, value in others.items() if name not in wrong]
        given = dict(zip(self.names, tensors_in((args, ordered)), strict=False))
        twice = [name for name in kwargs if name in given]
        given |= {name: value for name, value in kwargs.items() if name in self.names}
        missing = [name for name in self.names if not isinstance(given.get(name), Tensor)]
        more = len(tensors_in((args, kwargs))) - len(self.names)
        if wrong or twice or missing or more:
            said = [f"no input is called {', '.join(wrong)}"] * bool(wrong)
            said += [f"{', '.join(twice)} given twice"] * bool(twice)
            said += [f"{', '.join(missing)} missing"] * bool(missing)
            said = said or [f"{more} tensors too many"]
            raise TypeError(f"{'; '.join(said)}: the file takes {', '.join(self.names)}.")
        return {name: tensor_as_numpy(given[name].cpu()) for name in self.names}


def constants_of(model: nn.Module, arguments: Arguments) -> dict[str, Any]:
    """Returns ``forward``'s arguments, given or default, that are numbers or text: a file stores their values."""
    args, kwargs = arguments
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if _is_constant(value)}


@dataclass
class WithConstants:
    """A file that refuses other values of its constants."""

    call: Callable[..., Any]
    parameters: Sequence[str]
    constants: Mapping[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        for name, value in self.constants.items():
            if name in given and not (_is_constant(given[name]) and given[name] == value):
                raise ValueError(
                    f"{name}={given[name]!r}: the file has {name}={value!r}, which is no tensor and was that in the"
                    " example. Give that, or export the model with the other."
                )
        return self.call(*args, **kwargs)


def _is_constant(value: Any) -> bool:
    found = leaves(value)
    return bool(found) and all(isinstance(one, bool | int | float | complex | str) for one in found)
