"""Lets code that reads a tensor by its layout compute what it would on the user's own, and says where that was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_accel.core.layout import FORMAT_NAMES, is_channels_last
from lightning_accel.core.torch_private.modes import without_function_modes
from lightning_accel.core.tree import tensors_in
from lightning_accel.techniques.layout_draws import LayoutDraws

_VIEWS = (Tensor.view, Tensor.view_as)
_STRIDED = (Tensor.as_strided, torch.as_strided)
_QUESTIONS = (Tensor.is_contiguous, Tensor.stride)
_MEMORY = (Tensor.data_ptr, Tensor.untyped_storage)


# What code may ask of a weight whose layout it does not care for.
_HARMLESS = frozenset(
    getattr(Tensor, name).__get__ for name in ("requires_grad", "grad", "shape", "dtype", "device", "is_leaf")
)


class LayoutShown(TorchFunctionMode):
    """Has the user's own layout restored, once, as soon as code does anything with a tensor in channels_last."""

    def __init__(self, show: Callable[[], None]) -> None:
        super().__init__()
        self._show: Callable[[], None] | None = show

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # what is done here cannot be traced, and is not the user's
            return func(*args, **kwargs)
        if self._show is not None and func not in _HARMLESS and any(map(is_channels_last, tensors_in((args, kwargs)))):
            show, self._show = self._show, None
            show()
        return func(*args, **kwargs)

    @override
    def __exit__(self, *exception: object) -> None:
        # The code in between may have entered a mode that stays, or left one of earlier: that took the uppermost.
        with without_function_modes() as modes:
            if self in modes:
                modes.remove(self)
            else:
                del modes[-1:]


class LayoutRescue(TorchFunctionMode):
    """Answers calls that depend on the layout of an image as if it were contiguous.

    ``x.view(x.size(0), -1)`` on a channels_last tensor raises, ``x.as_strided(...)`` reads other elements, and code
    that asks for strides may go another way. While this is active a step computes what it should, so that the layout
    can be taken back instead of the run breaking.
    """

    def __init__(self, draws: LayoutDraws) -> None:
        super().__init__()
        self._draws = draws
        self.place = ""  # where the user's code did so first, and what; empty if it did not

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func not in (*_VIEWS, *_STRIDED, *_QUESTIONS, *_MEMORY) or not _is_laid_out(args[0]):
            return self._draws.call(func, args, kwargs)
        if func in _VIEWS:
            try:
                return func(*args, **kwargs)
            except RuntimeError:
                self._note(func, "lays out otherwise; .reshape() or .flatten() there would allow it")
        elif func in _STRIDED:
            if _is_ours(sys._getframe(1)):  # the memory of a saved tensor, in the order that it has, to be packed
                return func(*args, **kwargs)
            self._note(func, "lays out otherwise; .reshape() or .flatten() there would allow it")
        elif _is_users(sys._getframe(1)):
            self._note(func, "lays out otherwise: what it does may depend on it")
            if func in _MEMORY:  # of a copy it would be gone by the time it is used
                return func(*args, **kwargs)
        else:
            return func(*args, **kwargs)
        return func(args[0].contiguous(), *args[1:], **kwargs)

    def _note(self, func: Any, why: str) -> None:
        frame = sys._getframe(2)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.place = self.place or f"{place} calls .{func.__name__}() on a tensor that channels_last {why}"


def _is_laid_out(tensor: Any) -> bool:
    is_image = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.dim() in FORMAT_NAMES
    return is_image and not tensor.is_contiguous()


def _is_users(frame: FrameType) -> bool:
    # Torch's own code asks too, and knows what to do with the answer.
    return not _is_ours(frame) and not _module_of(frame).startswith("torch.")


def _is_ours(frame: FrameType) -> bool:
    return _module_of(frame).startswith("lightning_accel.")


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
