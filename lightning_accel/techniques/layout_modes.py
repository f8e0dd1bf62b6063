"""What a layout may change for the user's code, and is kept from changing.

Random numbers are drawn in the order of a tensor's memory, which another layout would hand out otherwise. And code that
reads a tensor by its layout is to compute what it would on the user's own; where that was is said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_accel.core.layout import FORMAT_NAMES, is_channels_last
from lightning_accel.core.random_streams import same_state, torchs_streams
from lightning_accel.core.torch_private.modes import without_function_modes
from lightning_accel.core.torch_private.tensors import base_of, version_of
from lightning_accel.core.tree import storage_of, tensors_in
from lightning_accel.core.user_frames import is_ours, users_line

# These draw a number for each channel, or into memory of their own, whatever their input's strides are.
_WITHOUT_ORDER = frozenset(
    (F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, torch.feature_dropout, F.gumbel_softmax)
)

# These draw a number for each element, in the order of memory of their first argument.
_IN_ORDER = {
    *("dropout", "dropout_", "alpha_dropout", "rrelu", "rrelu_", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "bernoulli_", "normal", "normal_", "uniform_", "exponential_", "geometric_", "log_normal_"),
    *("cauchy_", "random_", "poisson", "binomial"),
}

_VIEWS = (Tensor.view, Tensor.view_as)
_STRIDED = (Tensor.as_strided, torch.as_strided)
_QUESTIONS = (Tensor.is_contiguous, Tensor.stride)
_MEMORY = (Tensor.data_ptr, Tensor.untyped_storage)
# These return the memory that they are given, or a copy where its layout does not allow that.
_COPYING = (Tensor.contiguous, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.ravel, torch.ravel)


# What code may ask of a weight whose layout it does not care for.
_HARMLESS = frozenset(
    getattr(Tensor, name).__get__ for name in ("requires_grad", "grad", "shape", "dtype", "device", "is_leaf")
)


class LayoutDraws:
    """Watches torch's random streams while functions are called.

    ``nn.Dropout`` and ``torch.randn_like`` fill memory from its beginning to its end: of an image in channels_last
    every element gets another number, and on a CPU ``randn_like`` takes another amount of them, by which the batches
    of the next epoch change. The user's streams are not ours to move.

    Where it ``foresees``, the step runs in the ordinary layout, and what would lie otherwise has to be told from where
    it comes: from convolutions. Else it is what is not contiguous.
    """

    def __init__(self, device: torch.device, *, foresees: bool = False) -> None:
        self.has_drawn = False  # whether anything was drawn
        self.place = ""  # what drew numbers in the order of memory, and where; empty if nothing did
        self.kinds: set[str] = set()  # which functions have drawn for three dimensions or more, and where
        self._follows = WeakTensorKeyDictionary() if foresees else None
        self._read = [read for read, _ in torchs_streams(device).values()]
        self._states = self._now()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of torch's, and looks at what it has drawn."""
        if self.draws_in_order(func, args):
            self.has_drawn = True
            return self.drawn_in_order(func, args, kwargs)
        result = func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if self.have_moved() or isinstance(kwargs.get("generator"), torch.Generator):
            self.has_drawn = True
            if func not in _WITHOUT_ORDER and any(map(self._has_another_order, tensors)):
                self._note(func)
        if self._follows is not None and any(tensor in self._follows for tensor in tensors):
            self.follow(result)
        return result

    def draws_in_order(self, func: Any, args: Any) -> bool:
        """Whether a function is about to draw for a tensor that lies in another order."""
        name = getattr(func, "__name__", "")
        if self._follows is not None or name not in _IN_ORDER or not (args and isinstance(args[0], Tensor)):
            return False
        if _wide_dims(args[0]) > 2:
            self.kinds.add(f"{users_line()} draws by {name}()")
        return self._has_another_order(args[0])

    def drawn_in_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Has it draw for the tensor as it would lie, so that every element gets the number that is its own."""
        self._note(func)
        result = func(args[0].contiguous(), *args[1:], **kwargs)
        self._states = self._now()
        return args[0].copy_(result) if func.__name__.endswith("_") else result

    def _note(self, func: Any) -> None:
        name = getattr(func, "__name__", str(func))
        self.place = self.place or f"{users_line()} draws by {name}() in the order in which a tensor lies in memory"

    def follow(self, result: Any) -> None:
        """Notes what a convolution has made."""
        assert self._follows is not None, "it is to foresee something"
        for tensor in tensors_in(result):
            self._follows[tensor] = True

    def have_moved(self) -> bool:
        """Whether a stream has moved since the last call."""
        before, self._states = self._states, self._now()
        return not all(map(same_state, self._states, before))

    def _now(self) -> list[Tensor]:
        return [read() for read in self._read]

    def _has_another_order(self, tensor: Tensor) -> bool:
        dims = _wide_dims(tensor)  # with fewer than three, it lies the same way in both layouts
        if self._follows is not None:
            return dims > 2 and (tensor in self._follows or isinstance(tensor, nn.Parameter))
        return dims > 1 and tensor.layout == torch.strided and not tensor.is_contiguous()


class LayoutDrawsInOrder(TorchFunctionMode):
    """Has numbers drawn for tensors as they would lie, in every step of a model that draws: no step feels it."""

    def __init__(self, draws: LayoutDraws) -> None:
        super().__init__()
        self._draws = draws

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._draws.draws_in_order(func, args):
            return self._draws.drawn_in_order(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


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
        self._copies: list[tuple[Tensor, str]] = []  # of images, that code got, each with where

    @property
    def written(self) -> str:
        """Where code got a copy to which it has written, unlike in the user's own layout; empty if nowhere."""
        return next((place for copy, place in self._copies if not copy.is_inference() and version_of(copy)), "")

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is torch.as_strided and not args:  # the only one that takes its tensor by name: input=, x= or a=
            args = tuple(kwargs.pop(name) for name, value in [*kwargs.items()] if isinstance(value, Tensor))
        if func in _COPYING and args and not is_ours(sys._getframe(1)):
            return self._own_or_copied(func, args, kwargs)
        if func not in (*_VIEWS, *_STRIDED, *_QUESTIONS, *_MEMORY) or not _is_laid_out(args[0]):
            return self._draws.call(func, args, kwargs)
        if func in _VIEWS:
            try:
                return func(*args, **kwargs)
            except RuntimeError:
                self._note(func, "lays out otherwise; .reshape() or .flatten() there would allow it")
        elif func in _STRIDED:
            if is_ours(sys._getframe(1)):  # the memory of a saved tensor, in the order that it has, to be packed
                return func(*args, **kwargs)
            self._note(func, "lays out otherwise; .reshape() or .flatten() there would allow it")
        elif _is_users(sys._getframe(1)):
            self._note(func, "lays out otherwise: what it does may depend on it")
            if func in _MEMORY:  # of a copy it would be gone by the time it is used
                return func(*args, **kwargs)
        else:
            return func(*args, **kwargs)
        copy = args[0].contiguous()
        self._copies.append((copy, self.place))
        return func(copy, *args[1:], **kwargs)

    def _own_or_copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        is_copy = storage_of(result) is not storage_of(args[0])
        place = _place(func, "lays out otherwise, and writes to the result")
        if is_copy and _is_laid_out(args[0]):
            self._copies.append((result, place))
        elif not is_copy and _is_laid_out(base_of(args[0])) and args[0].is_contiguous():
            result = func(args[0].clone(), *args[1:], **kwargs)  # as in the user's own layout
            self._copies.append((result, place))
        return result

    def _note(self, func: Any, why: str) -> None:
        self.place = self.place or _place(func, why)


def _place(func: Any, why: str) -> str:
    frame = sys._getframe(3)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return f"{place} calls .{func.__name__}() on a tensor that channels_last {why}"


def _wide_dims(tensor: Tensor) -> int:
    return sum(size > 1 for size in tensor.shape)


def _is_laid_out(tensor: Any) -> bool:
    is_image = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.dim() in FORMAT_NAMES
    return is_image and not tensor.is_contiguous()


def _is_users(frame: FrameType) -> bool:
    # Torch's own code asks too, and knows what to do with the answer.
    return not (is_ours(frame) or str(frame.f_globals.get("__name__")).startswith("torch."))
