"""Tensors of the device: below autograd, every operation on them comes here."""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from simulated_cuda import captures, copies, memory
from simulated_cuda.operations import INDEXING, MIXING, WAITING, Operation, compute, operation
from simulated_cuda.streams import TIMELINE, current_device, current_stream

_VALUES = "_simulated_values"  # the attribute of a tensor of the device that holds the processor's tensor in its stead
_FOREIGN = "Expected all tensors to be on the same device, but found at least two devices, {} and {}! ({})"

SYNCHRONISATIONS: list[str] = []
"""The operations for which the host has waited for a device, in order."""

_sync_debug_mode = 0


def set_sync_debug_mode(mode: int) -> None:
    """As torch's: 1 warns of the host's waiting, 2 makes it an error."""
    global _sync_debug_mode
    _sync_debug_mode = mode


def get_sync_debug_mode() -> int:
    """As torch's."""
    return _sync_debug_mode


class _Simulated(Tensor):
    """What a tensor of the device is made as: its class is an ordinary tensor's from then on."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __torch_dispatch__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, types, args, kwargs)


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
    memory.allocate(values, device)
    is_strided = values.layout == torch.strided
    tensor = Tensor._make_wrapper_subclass(
        _Simulated,
        values.size(),
        strides=values.stride() if is_strided else None,
        storage_offset=values.storage_offset() if is_strided else 0,
        dtype=values.dtype,
        layout=values.layout,
        device=torch.device("cuda", device),
        requires_grad=False,
    )
    set_values(tensor, values)
    tensor.__class__ = Tensor
    return tensor


def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """An operation that has at least one argument of a class with a dispatch of its own, or of the device's."""
    kwargs = kwargs or {}
    if any(getattr(one, "__torch_dispatch__", dispatch) not in _OURS for one in types):
        return NotImplemented
    call = _Call(func, args, kwargs)
    call.is_engines = sys._getframe().f_back is None  # no Python has called it: it is autograd's own thread
    if call.device is None:  # a subclass of a program's own, on the host
        with no_dispatch():
            return func(*args, **kwargs)
    return call.run()


class _Call:
    """One operation, with the processor's tensors in place of the device's."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.known: Operation = operation(func)
        self.device: int | None = None
        self.is_engines = False
        self._host: list[Tensor] = []
        self.values_args = self._unwrapped(args)
        self.values_kwargs = {name: self._unwrapped(value) for name, value in kwargs.items()}

    def _unwrapped(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if is_simulated(value):
                self._take_device(value)
                return values_of(value)
            self._host.append(value)
        elif isinstance(value, (list, tuple)):
            return type(value)(self._unwrapped(one) for one in value)
        elif isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return value

    def _take_device(self, tensor: Tensor) -> None:
        index = tensor.device.index
        if self.device is None:
            self.device = index
        elif index != self.device and self.known.name != "aten::copy_":
            raise RuntimeError(_FOREIGN.format(f"cuda:{self.device}", f"cuda:{index}", self.func))

    def _check_host_tensors(self) -> None:
        name = self.known.name
        if name in INDEXING and not is_simulated(self.args[0]):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        for tensor in self._host:
            if tensor.dim() and tensor.device.type == "cpu" and name not in MIXING:
                raise RuntimeError(_FOREIGN.format(f"cuda:{self.device}", "cpu", self.func))

    def run(self) -> Any:
        """Does it, enters what it uses in the books, and wraps what comes of it."""
        name = self.known.name
        if name == "aten::copy_":
            return _copy(self.args[0], self.args[1], _non_blocking(self.args, self.kwargs), self)
        target = self.kwargs.get("device")
        if name == "aten::_to_copy" and target is not None and torch.device(target) != self._cuda:
            return self._to_other_device(torch.device(target))
        self._check_host_tensors()
        if name == "aten::_pin_memory":
            raise RuntimeError("cannot pin a tensor of a CUDA device: only dense CPU tensors can be pinned")
        if name == "aten::is_pinned":
            return False
        if self._waits():
            synchronised(name, self._device)
        kwargs = {key: value for key, value in self.values_kwargs.items() if key not in ("pin_memory", "non_blocking")}
        return self._wrapped(self.launch(self.values_args, kwargs))

    @property
    def _device(self) -> int:
        assert self.device is not None
        return self.device

    @property
    def _cuda(self) -> torch.device:
        return torch.device("cuda", self._device)

    def _waits(self) -> bool:
        name = self.known.name
        if name == "aten::repeat_interleave":
            return self.kwargs.get("output_size") is None
        if name in INDEXING:
            indices = [one for one in self.args[1] if one is not None]
            return any(one.dtype in (torch.bool, torch.uint8) or not is_simulated(one) for one in indices)
        return name in WAITING

    def launch(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Computes it on the current stream, or has the stream's capture note it."""
        stream = current_stream(self._device)
        capture = None if self.known.is_view and captures.of_stream(stream) is None else captures.of_launch(stream)
        written = [one for one in self._written(args, kwargs) if one.layout == torch.strided]
        if capture is not None:
            capture.recording.before(written)
        results = compute(self.func, args, kwargs, self._device)
        if capture is not None:
            capture.recording.add(self.func, args, kwargs, self._device, results)
        self._uses = (stream, {memory.address_of(one) for one in written}) if capture is None else None
        return results

    def _written(self, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
        found: list[Tensor] = []
        for position, name in self.known.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            found += [
                one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, Tensor)
            ]
        return found

    def _wrapped(self, results: Any) -> Any:
        if self.known.returns_list:
            alias = self.known.aliases[0]
            wrapped_results: Any = type(results)(self._one(result, alias) for result in results)
        elif isinstance(results, (list, tuple)):
            pairs = zip(results, self.known.aliases, strict=True)
            wrapped_results = type(results)(self._one(result, alias) for result, alias in pairs)
        else:
            wrapped_results = self._one(results, self.known.aliases[0] if self.known.aliases else None)
        if not self.known.is_view and self._uses is not None:
            self._enter(results)
        if self.known.changes_layout and is_simulated(self.args[0]):
            take_layout(self.args[0])
        return wrapped_results

    def _enter(self, results: Any) -> None:
        assert self._uses is not None
        stream, writes = self._uses
        reads: set[int] = set()
        _addresses((self.args, tuple(self.kwargs.values())), reads)
        if isinstance(results, (Tensor, list, tuple)):
            fresh = [one for one in (results if isinstance(results, (list, tuple)) else [results])]
            writes |= {memory.address_of(one) for one in fresh if isinstance(one, Tensor)} - reads
        memory.used_by_kernel(str(self.func), stream, reads - writes, writes, self.is_engines)

    def _one(self, result: Any, alias: tuple[int, str, bool] | None) -> Any:
        if not isinstance(result, Tensor):
            return result
        if alias is None:
            return wrapped(result, self._device)
        position, name, is_same = alias
        source = self.args[position] if position < len(self.args) else self.kwargs.get(name)
        if is_same and isinstance(source, Tensor):
            return source
        if not is_simulated(source):
            return wrapped(result, self._device)
        with torch.inference_mode(source.is_inference()):
            view = wrapped(result, self._device)
        with no_dispatch(), contextlib.suppress(RuntimeError):  # other layouts have no storage
            torch._functionalize_unsafe_set(view, source)
        return view

    def _to_other_device(self, target: torch.device) -> Any:
        source = self.args[0]
        dtype = self.kwargs.get("dtype") or source.dtype
        values = values_of(source)
        if target.type == "cuda":
            copied = wrapped(
                torch.empty_like(values, dtype=dtype), current_device() if target.index is None else target.index
            )
            return _copy(copied, source, _non_blocking(self.args, self.kwargs), self)
        if source.layout != torch.strided:
            synchronised(self.known.name, self._device)
            return values.to(dtype, copy=True)
        is_async = _non_blocking(self.args, self.kwargs)
        layout = self.kwargs.get("memory_format") or torch.preserve_format
        copied = torch.empty_like(values, dtype=dtype, memory_format=layout, pin_memory=is_async and values.numel() > 0)
        return _copy(copied, source, is_async, self)


def _addresses(value: Any, found: set[int]) -> None:
    if isinstance(value, Tensor):
        if is_simulated(value):
            found.add(memory.address_of(values_of(value)))
    elif isinstance(value, (list, tuple)):
        for one in value:
            _addresses(one, found)


def _non_blocking(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))


def synchronised(operation_name: str, device: int) -> None:
    """The host's waiting for the current stream.

    Raises:
        RuntimeError: :func:`torch.cuda.set_sync_debug_mode` does not allow it, or a capture.
    """
    SYNCHRONISATIONS.append(operation_name)
    stream = current_stream(device)
    captures.wait_for_streams([stream])
    if _sync_debug_mode == 2:
        raise RuntimeError("called a synchronizing CUDA operation")
    if _sync_debug_mode == 1:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
    TIMELINE.wait_on_host([TIMELINE.mark(stream)])


def _copy(target: Tensor, source: Tensor, is_async: bool, call: _Call) -> Tensor:
    """``target.copy_(source)``, one of which is the device's."""
    from_device, to_device = is_simulated(source), is_simulated(target)
    device = (source if from_device else target).device.index
    to = values_of(target) if to_device else target.detach()
    come_from = values_of(source) if from_device else source.detach()
    stream = current_stream(device)
    if from_device and to_device:
        if source.device != target.device:  # either side's current stream waits for the other's
            other = current_stream(target.device.index)
            TIMELINE.wait(stream, TIMELINE.mark(other))
        _launch_copy(stream, to, come_from, device)
        if source.device != target.device:
            TIMELINE.wait(other, TIMELINE.mark(stream))
        return target
    host = target if from_device else source
    # What has another dtype, or gaps, goes through memory of torch's own, which nobody can race for.
    is_pinned = host.layout == torch.strided and host.numel() > 0 and host.is_pinned()
    is_direct = is_pinned and host.dtype == (target if to_device else source).dtype and host.is_contiguous()
    if is_pinned and captures.of_stream(stream) is None:
        copies.deliver(host, stream, "reads" if to_device else "writes")
    if is_async and is_direct and from_device and captures.of_launch(stream) is None:
        memory.used_by_kernel("a copy to the host", stream, {memory.address_of(come_from)}, set())
        copies.to_host(stream, TIMELINE.launch(stream), to, come_from)
        return target
    if not is_async:
        if from_device:
            memory.used_by_kernel("a copy to the host", stream, {memory.address_of(come_from)}, set())
        synchronised("aten::copy_", device)
    _launch_copy(stream, to, come_from, device)
    if is_async and is_direct and captures.of_stream(stream) is None:
        copies.from_host(stream, TIMELINE.launch(stream), come_from)
    return target


def _launch_copy(stream: Any, to: Tensor, come_from: Tensor, device: int) -> None:
    capture = captures.of_launch(stream)
    if capture is not None:
        capture.recording.before([to])
    to.copy_(come_from)
    if capture is not None:
        capture.recording.add(torch.ops.aten.copy_.default, (to, come_from), {}, device, to)
    else:
        memory.used_by_kernel("a copy", stream, {memory.address_of(come_from)}, {memory.address_of(to)})


_SET_DATA = torch._C.TensorBase.data.__set__


def take_layout(tensor: Tensor) -> None:
    """Gives a tensor of the device the sizes and strides that its values have by now."""
    fresh = wrapped(values_of(tensor), tensor.device.index)
    with torch.no_grad():
        _SET_DATA(tensor, fresh)


def _factory_device(device: Any) -> int:
    index = torch.device(device).index if device is not None else None
    return current_device() if index is None else index


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> Tensor:  # fmt: skip
    values = torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format)
    return _made(
        torch.ops.aten.empty.memory_format, (size,), {"dtype": dtype, "device": torch.device("cpu")}, values, device
    )


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> Tensor:  # fmt: skip
    values = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    return _made(
        torch.ops.aten.empty_strided.default,
        (size, stride),
        {"dtype": dtype, "device": torch.device("cpu")},
        values,
        device,
    )


def _made(func: Any, args: Any, kwargs: dict[str, Any], values: Tensor, device: Any) -> Tensor:
    """The memory that every other factory fills."""
    index = _factory_device(device)
    capture = captures.of_launch(current_stream(index))
    tensor = wrapped(values, index)
    if capture is not None:
        capture.recording.add(func, args, kwargs, index, values)
    return tensor


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """The formula itself: torch would choose a kernel."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    attention = torch.ops.aten._scaled_dot_product_attention_math
    return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


class _DispatchOfClass:
    """The dispatch that classes of tensors inherit: none, as ever, if no tensor of the device is of the class."""

    def __get__(self, instance: Any, cls: type) -> Any:
        return dispatch if cls in _CLASSES else torch._C._disabled_torch_dispatch_impl


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


_OURS = (dispatch, _Simulated.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
_LIBRARIES = [torch.library.Library("aten", "IMPL", key) for key in ("CUDA", "AutogradCUDA")]


def install() -> None:
    """Has torch bring tensors of a CUDA device here."""
    cls: Any = Tensor
    cls.__torch_dispatch__ = _DispatchOfClass()
    cls.__init_subclass__ = classmethod(_keep_torch_function)
    _LIBRARIES[0].impl("empty.memory_format", _empty)
    _LIBRARIES[0].impl("empty_strided", _empty_strided)
    for library in _LIBRARIES:
        library.impl("scaled_dot_product_attention", _attention)
