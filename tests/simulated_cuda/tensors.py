"""Methods of ``torch.Tensor`` that look past autograd, at what a tensor of the device has not: memory of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from simulated_cuda import memory
from simulated_cuda.waits import begin_wait, end_wait
from simulated_cuda.wrappers import is_simulated, of_class, set_values, values_of, wrapped

_DATA: Any = torch._C.TensorBase.data
_TORCH = {
    name: getattr(Tensor, name)
    for name in (
        "untyped_storage", "set_", "data_ptr", "__reduce_ex__", "__deepcopy__", "__repr__", "numpy", "tolist",
        "as_subclass",
    )
}  # fmt: skip


class Storage(torch.UntypedStorage):
    """What :meth:`torch.Tensor.untyped_storage` gives: the values' own, so that it lives as long as they do."""

    index = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def is_pinned(self, *_: Any) -> bool:
        return False

    def clone(self) -> Any:
        return torch.UntypedStorage(self.nbytes()).copy_(self)  # type: ignore[no-untyped-call]


def _untyped_storage(self: Tensor) -> Any:
    if not is_simulated(self):
        return _TORCH["untyped_storage"](self)
    storage = _TORCH["untyped_storage"](values_of(self))
    storage.__class__, storage.index = Storage, self.device.index
    return storage


def _set_(self: Tensor, source: Any = None, *layout: Any) -> Tensor:
    if not isinstance(source, Storage):
        return _TORCH["set_"](self) if source is None else _TORCH["set_"](self, source, *layout)
    if not is_simulated(self):
        raise RuntimeError("cannot set the storage of a tensor on device cpu to a storage on device cuda")
    values = _TORCH["set_"](torch.empty(0, dtype=self.dtype), source, *layout)
    self.data = wrapped(values, source.device.index)
    return self


def _set_data(self: Tensor, new: Tensor) -> None:
    if not is_simulated(self) and not is_simulated(new):
        _DATA.__set__(self, new)
        return
    new = new.detach()
    if is_simulated(self) and is_simulated(new):
        set_values(self, values_of(new))
        _DATA.__set__(self, new)
        return
    # Another kind of device: the two implementations change places, and the object stays.
    requires_grad, grad, attributes = self.requires_grad, self.grad, dict(self.__dict__)
    of_class(new, type(self))
    fresh = values_of(new) if is_simulated(new) else None
    torch._C._swap_tensor_impl(self, new)
    self.__dict__.update(attributes)
    set_values(self, fresh)
    self.requires_grad_(requires_grad)
    if grad is not None:
        self.grad = grad.to(self.device)


_NEW_PARAMETER: Any = nn.Parameter.__new__


def _new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    if data is None or not is_simulated(data) or type(data) not in (Tensor, nn.Parameter):
        return _NEW_PARAMETER(cls, data, requires_grad)
    return of_class(data.detach(), cls).requires_grad_(requires_grad)


def _as_subclass(self: Tensor, cls: Any) -> Any:
    if not is_simulated(self):
        return _TORCH["as_subclass"](self, cls)
    return of_class(torch.ops.aten.alias(self), cls)


_MAKE_SUBCLASS: Any = Tensor._make_subclass


def _make_subclass(cls: Any, data: Tensor, requires_grad: bool = False, **options: Any) -> Any:
    if not is_simulated(data):
        return _MAKE_SUBCLASS(cls, data, requires_grad, **options)
    return of_class(data.detach(), cls).requires_grad_(requires_grad)


def _reduce_ex(self: Tensor, protocol: int) -> Any:
    if not is_simulated(self):
        return _TORCH["__reduce_ex__"](self, protocol)
    values = values_of(self).detach()
    if self.is_leaf and self.requires_grad:
        values.requires_grad_()
    values.__class__ = type(self)
    return _TORCH["__reduce_ex__"](values, protocol)


def _deepcopy(self: Tensor, memo: dict[Any, Any]) -> Any:
    if not is_simulated(self):
        return _TORCH["__deepcopy__"](self, memo)
    if id(self) in memo:
        return memo[id(self)]
    if not self.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    values = values_of(self)
    storage, key = values.untyped_storage(), ("storage", values.untyped_storage()._cdata)
    if key not in memo:
        memo[key] = storage.clone()  # type: ignore[no-untyped-call]
    layout = values.storage_offset(), values.size(), values.stride()
    with torch.no_grad():
        copied: Any = wrapped(torch.empty(0, dtype=values.dtype).set_(memo[key], *layout), self.device.index)
    of_class(copied, type(self))
    copied.requires_grad_(self.requires_grad)
    if self.grad is not None:
        copied.grad = _deepcopy(self.grad, memo)
    fresh = values_of(copied)
    copied.__dict__.update(self.__dict__)
    set_values(copied, fresh)
    memo[id(self)] = copied
    return copied


def _repr(self: Tensor, **options: Any) -> str:
    if not is_simulated(self):
        return str(_TORCH["__repr__"](self, **options))
    return f"{values_of(self)!r}"[:-1] + f", device='{self.device}')"


def _numpy(self: Tensor, **options: Any) -> Any:
    if is_simulated(self):
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host"
            " memory first."
        )
    return _TORCH["numpy"](self, **options)


def _tolist(self: Tensor) -> Any:
    if is_simulated(self):
        begin_wait("tolist", self.device.index)
        end_wait(self.device.index)
        return values_of(self).tolist()
    return _TORCH["tolist"](self)


def _data_ptr(self: Tensor) -> int:
    return int(values_of(self).data_ptr() if is_simulated(self) else _TORCH["data_ptr"](self))


def _record_stream(self: Tensor, stream: Any) -> None:
    block = memory.BLOCKS.get(memory.address_of(values_of(self)))
    if block is not None:
        block.told.add((stream.device_index, stream.stream_id))


def _new_tensor(self: Tensor, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    place = self.device if device is None else device
    return torch.tensor(data, dtype=dtype or self.dtype, device=place, requires_grad=requires_grad)


_AS_TENSOR = torch.as_tensor


def _to_device_by_copy(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Factories from data of the host's: torch copies that past every dispatcher."""

    @functools.wraps(make)
    def made(*args: Any, requires_grad: bool = False, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            given: dict[str, Any] = {} if device is None else {"device": device}
            if requires_grad:
                given["requires_grad"] = True
            return make(*args, **given, **options)
        place = torch.device(device)
        if args and is_simulated(args[0]) and make is _AS_TENSOR:
            return args[0].to(place, **options)
        return make(*args, device="cpu", **options).to(place).requires_grad_(requires_grad)

    return made


def install() -> None:
    """Has tensors of the device answer as on a real one."""
    cls: Any = Tensor
    cls.data = property(lambda self: _DATA.__get__(self), _set_data)
    nn.Parameter.__new__ = staticmethod(_new_parameter)  # type: ignore[method-assign]
    replaced = {
        "untyped_storage": _untyped_storage, "set_": _set_, "data_ptr": _data_ptr, "__reduce_ex__": _reduce_ex,
        "__deepcopy__": _deepcopy, "__repr__": _repr, "numpy": _numpy, "tolist": _tolist, "new_tensor": _new_tensor,
        "record_stream": _record_stream, "as_subclass": _as_subclass, "_make_subclass": staticmethod(_make_subclass),
    }  # fmt: skip
    for name, method in replaced.items():
        setattr(cls, name, method)
    torch.tensor = _to_device_by_copy(torch.tensor)
    torch.as_tensor = _to_device_by_copy(torch.as_tensor)
