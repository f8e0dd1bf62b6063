"""Tensors of the device, without memory of their own: one of the processor's stands for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simulated_cuda import memory

_VALUES = "_simulated_values"  # the attribute that holds the processor's tensor


class _Simulated(Tensor):
    """What a tensor of the device is made as: its class is an ordinary tensor's from then on."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __torch_dispatch__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return NotImplemented  # it has to be there for a tensor to be made, and is never called


def is_simulated(value: Any) -> bool:
    """Whether it is a tensor of the device."""
    return isinstance(value, Tensor) and _VALUES in value.__dict__


def values_of(tensor: Tensor) -> Tensor:
    """The processor's tensor that stands for one of the device."""
    values: Tensor = tensor.__dict__[_VALUES]
    return values


def set_values(tensor: Tensor, values: Tensor | None) -> None:
    """Has another of the processor's tensors stand for it, or makes it the host's."""
    if values is None:
        tensor.__dict__.pop(_VALUES, None)
    else:
        tensor.__dict__[_VALUES] = values


_CLASSES: set[type] = {Tensor}


def of_class(tensor: Tensor, cls: type) -> Any:
    """A tensor of the device, which becomes one of a class."""
    _CLASSES.add(cls)
    tensor.__class__ = cls
    return tensor


def wrapped(values: Tensor, device: int) -> Tensor:
    """A tensor of the device that has these values, whose memory is entered in its book."""
    if values.layout != torch.strided:
        raise NotImplementedError(f"the simulated CUDA device has no tensors of layout {values.layout}")
    memory.allocate(values, device)
    tensor: Any = Tensor._make_wrapper_subclass(
        _Simulated,
        values.size(),
        strides=values.stride(),
        storage_offset=values.storage_offset(),
        dtype=values.dtype,
        device=torch.device("cuda", device),
        requires_grad=False,
    )
    set_values(tensor, values)
    tensor.__class__ = Tensor
    made: Tensor = tensor
    return made


class _DispatchOfClass:
    """The dispatch that classes of tensors inherit: none, as ever, if no tensor of the device is of the class."""

    def __init__(self, dispatch: Callable[..., Any]) -> None:
        self._dispatch = dispatch

    def __get__(self, instance: Any, cls: type) -> Any:
        return self._dispatch if cls in _CLASSES else torch._C._disabled_torch_dispatch_impl


def _torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    inherited: Any = Tensor.__torch_function__
    return inherited.__func__(cls, func, types, args, kwargs)


def _keep_torch_function(cls: Any, **options: Any) -> None:
    """Gives new classes a ``__torch_function__`` of their own.

    Torch takes the inherited one from every class whose dispatch is not that of ``Tensor``, as it is here.
    """
    super(Tensor, cls).__init_subclass__(**options)
    before_tensor = cls.__mro__[: cls.__mro__.index(Tensor)]
    if not any({"__torch_dispatch__", "__torch_function__"} & set(vars(one)) for one in before_tensor):
        cls.__torch_function__ = classmethod(_torch_function)


_DATA: Any = torch._C.TensorBase.data


def take_layout(tensor: Tensor) -> None:
    """Gives a tensor of the device the sizes and strides that its values have by now."""
    fresh = wrapped(values_of(tensor), tensor.device.index)
    with torch.no_grad():
        _DATA.__set__(tensor, fresh)


def install(dispatch: Callable[..., Any]) -> None:
    """Has torch bring operations on tensors of the device to a function.

    What only looks whether a class has a dispatch of its own sees none on the host.
    """
    cls: Any = Tensor
    cls.__torch_dispatch__ = _DispatchOfClass(dispatch)
    cls.__init_subclass__ = classmethod(_keep_torch_function)  # type: ignore[arg-type]
