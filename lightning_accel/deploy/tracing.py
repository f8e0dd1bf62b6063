"""Traces a model for TorchScript, and refuses if the trace would contain numbers of the example."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_accel.core.tree import tensors_in
from lightning_accel.deploy.errors import ExportError
from lightning_accel.deploy.half import set_parameters
from lightning_accel.deploy.inputs import Arguments

_TO_PYTHON = frozenset(
    [
        *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__array__", "__dlpack__"),
        *("item", "tolist", "numpy", "tensor", "equal", "allclose", "is_nonzero"),
    ]
)
"""Functions that turn a tensor's numbers into Python values, which a trace stores as constants."""
_OF_SHAPES = frozenset(
    [
        *("shape", "size", "numel", "nelement", "dim", "ndim", "stride", "__len__"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    ]
)
"""Functions that do not depend on a tensor's numbers. Calls with other shapes check them."""

_IN_PLACE = re.compile(r"^_{2}(i|set)|[^_]_$")  # x += y, x[0] = y, x.add_(y)


def traced(model: nn.Module, arguments: Arguments) -> Any:
    """Returns the model as ``torch.jit.trace`` makes it, frozen.

    Raises:
        ExportError: Its control flow depends on the inputs' numbers.
    """
    args, kwargs = arguments
    given: dict[str, Any] = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    root = model
    if any(one.kind is one.KEYWORD_ONLY for one in inspect.signature(model.forward).parameters.values()):
        root = _Renamed(model, kwargs).eval()
    watch = _NumbersInPython()
    hook = root.register_forward_pre_hook(watch.begin, with_kwargs=True)
    with warnings.catch_warnings(), _unused_properties_hidden(root), hook:
        warnings.simplefilter("ignore")  # torch cannot tell sizes from numbers
        jit: Any = torch.jit
        with watch:
            found = jit.trace(root, check_trace=False, strict=False, **given)
        return jit.freeze(found)


class _Renamed(nn.Module):
    """A model whose keyword-only arguments may also be positional, as tracing requires."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.model = model
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        set_parameters(self, [inspect.Parameter(name, kind) for name in names])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class _NumbersInPython(TorchFunctionMode):
    """Raises if a Python value is made from the inputs' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._from_inputs = WeakTensorKeyDictionary()

    def begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Records the inputs, which tracing has copied."""
        self._note((args, kwargs))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(function.__self__, "__name__", "")
        depends = any(one in self._from_inputs for one in tensors_in((args, kwargs or {})))
        if depends and name in _TO_PYTHON:
            raise ExportError(
                f"its control flow depends on data (Python is given numbers of the inputs by {name}, and the file would"
                " have those of the example): torch.where, torch.cond, or a mask instead"
            )
        found = function(*args, **(kwargs or {}))
        if depends and name not in _OF_SHAPES:
            self._note((found, args[:1] if _IN_PLACE.search(name) else ()))
        return found

    def _note(self, data: Any) -> None:
        for one in tensors_in(data):
            self._from_inputs[one] = True


@contextmanager
def _unused_properties_hidden(model: nn.Module) -> Iterator[None]:
    """Hides the properties that modules ask torch.jit to ignore: it reads every name in ``dir`` before it checks.

    One is a LightningModule's ``trainer``, which raises if there is none.
    """
    kinds = {module: type(module) for module in model.modules()}
    for module, kind in kinds.items():
        if unused := set(getattr(kind, "__jit_unused_properties__", ())):
            names = [name for name in dir(module) if name not in unused]
            module.__class__ = type(kind.__name__, (kind,), {"__dir__": lambda _, names=names: names})
    try:
        yield
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind
