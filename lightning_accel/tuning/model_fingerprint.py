"""The fingerprint of a model: equal in two processes if its modules hold the same values beside parameters.

If a part cannot be described, such as an object whose text is only its address, there is no fingerprint.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import functools
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_accel.core.live_tensors import content_of, slots_of
from lightning_accel.core.torch_private.modules import buffer_slots
from lightning_accel.experiment.digest import digest
from lightning_accel.ops.arrays import tensor_as_numpy

WHOLE_BYTES = 1 << 16
"""The largest size of a tensor of which every byte counts; a larger tensor is sampled."""

SAMPLE = 1 << 14  # elements

MOST = 20_000
"""Values. The description of more, as in a large vocabulary, takes longer than a trial."""

_OWN = frozenset(vars(nn.Module()))
_HOOKS = sorted(name for name in _OWN if name.endswith("_hooks"))
_OPERATORS = (type(torch.ops.aten.relu), type(torch.ops.aten.relu.default), torch.jit.ScriptFunction)

_PLAIN: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice, PurePath, re.Pattern),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, datetime.date, datetime.timedelta, decimal.Decimal),
)

# Objects of these packages are handles, which lead to the whole run, or random streams: their class is enough.
_HANDLES = {
    *("torch", "lightning", "pytorch_lightning", "lightning_accel"),
    *("logging", "threading", "_thread", "weakref", "random"),
}


class UntoldError(Exception):
    """A part of a model has no description that holds in another process."""


def described(model: nn.Module) -> str:
    """Returns a digest of every module's class, mode, attributes, buffers, and number of hooks.

    Raises:
        UntoldError: A part of the model cannot be described.
    """
    return digest(*_Description(model).words())


class _Description:
    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._sites = {id(module): name for name, module in self._modules.items()}
        self._seen: dict[int, tuple[int, Any]] = {}  # keeps the object alive, so that its id is not reused
        self._left = MOST

    def words(self) -> Iterator[str]:
        for name, module in self._modules.items():
            yield f"module {name}"
            yield from self._module(module)

    def _module(self, module: nn.Module) -> Iterator[str]:
        if isinstance(module, torch.jit.ScriptModule):
            raise UntoldError("a scripted module keeps what it does to itself")
        own = vars(module)
        yield f"{_name(type(module))} {module.training} {[len(own[name]) for name in _HOOKS]}"
        yield from self._items(buffer_slots(module))
        yield from self._items({name: value for name, value in own.items() if name not in _OWN})

    def _any(self, value: Any) -> Iterator[str]:
        self._left -= 1
        if self._left < 0:
            raise UntoldError(f"it holds more than {MOST:,} values")
        if isinstance(value, enum.Enum):
            yield f"{_name(type(value))}.{value.name}"
        elif isinstance(value, _PLAIN):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            yield _name(value)
        elif id(value) in self._sites:
            yield f"module {self._sites[id(value)]}"
        elif id(value) in self._seen:
            yield f"again {self._seen[id(value)][0]}"
        else:
            self._seen[id(value)] = len(self._seen), value
            yield f"new {_name(type(value))}"
            yield from self._new(value)

    def _new(self, value: Any) -> Iterator[str]:
        if isinstance(value, Tensor):
            yield _tensor(value)
        elif isinstance(value, nn.Module):  # a module that is not registered as a submodule
            for name, part in value.named_modules():
                yield name
                yield from self._module(part) if id(part) not in self._sites else ()
        elif isinstance(value, dict | types.MappingProxyType):
            yield from self._items(value)
        elif isinstance(value, list | tuple | deque):
            yield from self._all(value)
        elif isinstance(value, set | frozenset):
            yield from sorted(" ".join(self._any(item)) for item in value)
        elif isinstance(value, functools.partial):
            yield from self._all([value.func, *value.args])
            yield from self._items(value.keywords)
        elif isinstance(value, types.MethodType):
            yield from self._all([value.__func__, value.__self__])
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, types.CodeType):
            yield f"{value.co_code!r} {value.co_names}"
            yield from self._all(value.co_consts)
        else:
            yield from self._object(value)

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield _name(function)
        if function.__module__.startswith("lightning_accel."):  # an edit of ours, which the plan determines
            yield from self._all([wrapped] if (wrapped := getattr(function, "__wrapped__", None)) else [])
            return
        if "<" in function.__qualname__:  # a lambda or an inner function, whose name is ambiguous
            yield from self._any(function.__code__)
        yield from self._all([function.__defaults__, function.__kwdefaults__])
        for cell in function.__closure__ or ():
            yield from self._any(content_of(cell))

    def _object(self, value: Any) -> Iterator[str]:
        kind = type(value)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
            yield f"{value.dtype} {value.shape} {digest(value.tobytes())}"
        elif isinstance(value, _OPERATORS):
            yield str(getattr(value, "qualified_name", value))
        elif not _is_handle(kind):
            slots = [name for each in kind.__mro__ for name in slots_of(each)]
            own = getattr(value, "__dict__", None)
            if own is None and not slots:
                raise UntoldError(f"a {_name(kind)} does not show what it holds")
            yield from self._items({name: getattr(value, name, None) for name in slots} | (own or {}))

    def _items(self, items: Any) -> Iterator[str]:
        yield from self._all(part for item in items.items() for part in item)

    def _all(self, values: Iterable[Any]) -> Iterator[str]:
        for value in values:
            yield from self._any(value)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', None) or value.__name__}"


def _is_handle(kind: type) -> bool:
    module = kind.__module__
    if module.startswith("torch.distributions."):
        return False
    return module.partition(".")[0] in _HANDLES or module.startswith("numpy.random.")


def _tensor(tensor: Tensor) -> str:
    words = f"{tensor.dtype} {tensor.layout}"
    if is_lazy(tensor) or tensor.is_nested:
        return words
    words += f" {tuple(tensor.shape)}"
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta:  # parameters among them
        return words
    values = tensor.detach()
    if tensor.nbytes > WHOLE_BYTES:
        # The step is odd, so that the sample reaches every column of a mask.
        sample = torch.arange(0, tensor.numel(), tensor.numel() // SAMPLE | 1, device=tensor.device)
        values = values[torch.unravel_index(sample, tensor.shape)]
    values = values.cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return f"{words} {digest(tensor_as_numpy(values.view(torch.uint8)).tobytes())}"
