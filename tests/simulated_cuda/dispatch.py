"""Tensors of the device: below autograd, every operation on them comes here."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from simulated_cuda import captures, memory, wrappers
from simulated_cuda.operations import INDEXING, MIXING, PRODUCTS, WAITING, Operation, compute, operation
from simulated_cuda.streams import current_device, current_stream
from simulated_cuda.transfers import copy_
from simulated_cuda.waits import begin_wait, end_wait
from simulated_cuda.wrappers import is_simulated, take_layout, values_of, wrapped

_FOREIGN = "Expected all tensors to be on the same device, but found at least two devices, {} and {}! ({})"


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
            return copy_(self.args[0], self.args[1], _non_blocking(self.args, self.kwargs))
        target = self._target() if name == "aten::_to_copy" else self._cuda
        if target != self._cuda:
            return self._to_other_device(target)
        self._check_host_tensors()
        if name == "aten::_pin_memory":
            raise RuntimeError("cannot pin a tensor of a CUDA device: only dense CPU tensors can be pinned")
        if name == "aten::is_pinned":
            return False
        if name in PRODUCTS and not self.args[0].is_floating_point() and not self.args[0].is_complex():
            raise NotImplementedError(f'"addmm_cuda" not implemented for {self.args[0].dtype}')
        waits = self._waits()
        if waits:
            begin_wait(name, self._device)
        kwargs = {key: value for key, value in self.values_kwargs.items() if key not in ("pin_memory", "non_blocking")}
        results = self._wrapped(self.launch(self.values_args, kwargs))
        if waits:
            end_wait(self._device)
        return results

    def _target(self) -> torch.device:
        """Of a copy."""
        given = self.kwargs.get("device")
        if given is None:
            return self._cuda
        target = torch.device(given)
        return torch.device("cuda", current_device()) if target.type == "cuda" and target.index is None else target

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
        written = self._written(args, kwargs)
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
            fresh = results if isinstance(results, (list, tuple)) else [results]
            writes |= {memory.address_of(one) for one in fresh if isinstance(one, Tensor)} - reads
        memory.used_by_kernel(str(self.func), stream, reads - writes, writes, self.is_engines)

    def _one(self, result: Any, alias: tuple[int, str, bool] | None) -> Any:
        if not isinstance(result, Tensor):
            return result
        if alias is None:
            return wrapped(result, self._device)
        position, name, is_same = alias
        source: Any = self.args[position] if position < len(self.args) else self.kwargs.get(name)
        if is_same and isinstance(source, Tensor):
            return source
        if not is_simulated(source):
            return wrapped(result, self._device)
        with torch.inference_mode(source.is_inference()):
            view = wrapped(result, self._device)
        with no_dispatch():
            torch._functionalize_unsafe_set(view, source)
        return view

    def _to_other_device(self, target: torch.device) -> Any:
        source = self.args[0]
        dtype = self.kwargs.get("dtype") or source.dtype
        values = values_of(source)
        is_async = _non_blocking(self.args, self.kwargs)
        layout = self.kwargs.get("memory_format") or torch.preserve_format
        if target.type == "cuda":
            copied = wrapped(torch.empty_like(values, dtype=dtype, memory_format=layout), target.index)
            return copy_(copied, source, is_async)
        copied = torch.empty_like(values, dtype=dtype, memory_format=layout, pin_memory=is_async and values.numel() > 0)
        return copy_(copied, source, is_async)


def _addresses(value: Any, found: set[int]) -> None:
    if isinstance(value, Tensor):
        if is_simulated(value):
            found.add(memory.address_of(values_of(value)))
    elif isinstance(value, (list, tuple)):
        for one in value:
            _addresses(one, found)


def _non_blocking(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))


_OURS = (dispatch, torch._C._disabled_torch_dispatch_impl)


def install() -> None:
    """Has torch bring operations on tensors of the device here."""
    wrappers.install(dispatch)
