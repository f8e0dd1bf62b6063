"""The trial of a memory layout: every operation on images in both layouts, beside a step that runs as it always did.

Nothing of the user's is called again for it: what is tried are torch's own convolutions, norms and poolings, on the
tensors that they are called with, whoever calls them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_accel.core.layout import FORMATS, in_format, is_channels_last
from lightning_accel.core.measured import Measurement, together
from lightning_accel.core.purse import Purse
from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.experiment.screening import screen
from lightning_accel.experiment.trial import NumbersComparison, Trial
from lightning_accel.experiment.trial_runs import TrialSide
from lightning_accel.techniques.layout_modes import LayoutDraws
from lightning_accel.techniques.technique_context import Verdict

# A 1x1 convolution with a stride, in channels_last and bfloat16, on two threads: its backward pass leaves a kernel in
# oneDNN's cache whose destruction crashes the interpreter as it ends (torch 2.13, and nothing of ours in between).
_LONE_SAMPLE = "batches of one sample: oneDNN's bfloat16 kernels for them crash when the program ends"

# So does one in float32 from 4 channels to 8, on AVX2, in its backward pass: "double free or corruption". For which
# other counts below a vector's width it writes past its memory, nothing says.
BREAKS_THE_HEAP = "oneDNN's strided 1x1 convolution of few channels in channels_last writes past its memory"
_FEW_CHANNELS = 16

_MAY_BE_WRONG_BY = 1.15  # as the times of a U-Net's parts were, beside whole steps
_NOT_TIMED = "not timed by itself, which would cost more than this run can pay: whole steps decide"

_CONVOLUTIONS = frozenset(("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"))
# What else takes longer, or less, in the other layout. Element-wise operations do not care.
_TIMED = _CONVOLUTIONS | {
    *("batch_norm", "instance_norm", "group_norm", "max_pool2d", "max_pool3d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "interpolate", "pad"),
}


def breaks_the_heap(kernel_size: Sequence[int], stride: Sequence[int], in_channels: int) -> bool:
    """Whether oneDNN is not to be given such a convolution in channels_last."""
    return max(kernel_size) == 1 and max(stride) > 1 and in_channels < _FEW_CHANNELS


class LayoutTrial(TorchFunctionMode):
    """Runs a step in the contiguous layout, and tries channels_last beside it, on what has one of so many ``dims``.

    Numbers are compared within the step, and times taken after it. Where live trials compare whole steps later, times
    refuse only what is much slower, and are not taken if the purse cannot pay for them.
    """

    def __init__(
        self,
        dims: tuple[int, ...],
        draws: LayoutDraws,
        *,
        by_clock: bool,
        is_judged_live: bool,  # whether live trials compare whole steps later
        purse: Purse | None,
    ) -> None:
        super().__init__()
        self._dims = dims
        self._draws = draws
        self._by_clock = by_clock
        self._is_judged_live = is_judged_live
        self._purse = purse
        self._compared: set[Any] = set()
        self._untimed: dict[Any, tuple[Trial, TrialSide, TrialSide]] = {}  # of kinds of calls
        self._calls: Counter[Any] = Counter()  # of the step, by their kinds
        self._times: list[Measurement] = []  # of all of them
        self._numbers: list[Measurement] = []
        self._failure: NumbersComparison | None = None

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name not in _TIMED:
            return self._draws.call(func, args, kwargs)
        # Weights that wait in channels_last must not put the step into it.
        args, kwargs = map_tensors(_own_layout, (args, kwargs))
        image = next(iter(tensors_in((args, kwargs))), None)
        if image is not None and image.dim() in self._dims and self._failure is None:
            self._try(func, image, args, kwargs)
        result = func(*args, **kwargs)
        self._draws.follow(result)
        return result

    @override
    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        untimed, self._untimed = self._untimed, {}
        if exception[0] is not None or self._failure is not None:
            return
        for kind, (trial, *sides) in untimed.items():
            found = trial.time(*sides)
            if found.kind == "too_dear" and self._is_judged_live:
                self._times.clear()
                return
            if found.failure:
                self._failure = found
                return
            self._times += [found.measured()] * self._calls[kind]

    def verdict(self) -> Verdict:
        """Whether channels_last is right, and worth it."""
        if self._draws.place:
            return Verdict("refused", self._draws.place, measured=together(self._numbers))
        if self._failure is not None:
            return Verdict(self._failure.kind, self._failure.failure, measured=together(self._numbers))
        if not self._compared:
            return Verdict("refused", "no convolution ran on the first step, so nothing was tried")
        figures = together([*self._numbers, *self._times])
        before, after = figures.original_ms, figures.candidate_ms
        if not before or not after:
            is_too_dear = self._by_clock and self._is_judged_live
            return Verdict("kept", _NOT_TIMED if is_too_dear else "", measured=figures)
        measured = f"convolutions, norms and pooling at {before / after:.2f}x the speed here"
        reason = f"{measured} ({before:.1f} → {after:.1f} ms a step)"
        if self._is_judged_live:
            is_kept = screen(before, after, by=_MAY_BE_WRONG_BY) != "slower"
        else:  # as fast is not enough: what was not timed, such as copies at the edges, may take more in that layout
            is_kept = screen(before, after) == "faster"
        return Verdict("kept" if is_kept else "refused", reason, measured=figures)

    def _try(self, func: Any, image: Tensor, args: Any, kwargs: Any) -> None:
        name = func.__name__
        kind = _kind(name, args, kwargs)
        device = image.device.type
        autocast = functools.partial(
            torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        )
        sides = TrialSide(func, autocast), TrialSide(func, autocast, self._in_channels_last)
        trial = Trial(
            nn.Module(),
            args,
            kwargs,
            with_gradients=torch.is_grad_enabled(),
            keeps_kernels=True,  # what oneDNN builds for a shape, megabytes for a network, among the step's tensors
            purse=self._purse,
            convolves=name in _CONVOLUTIONS,
        )
        if name in _CONVOLUTIONS and kind not in self._compared:
            self._compared.add(kind)
            if why := _unsafe(image, name, args, kwargs):
                self._failure = NumbersComparison(failure=why)
                return
            compared = trial.numbers(*sides)
            self._numbers.append(compared.measured())
            self._failure = compared if compared.failure else None
        if self._by_clock and self._failure is None:
            self._untimed.setdefault(kind, (trial, *sides))
            self._calls[kind] += 1

    def _in_channels_last(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def convert(tensor: Tensor) -> Tensor:
            return in_format(tensor, FORMATS[tensor.dim()]) if tensor.dim() in self._dims else tensor

        converted: tuple[Any, Any] = map_tensors(convert, (args, kwargs))
        return converted


def _own_layout(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if isinstance(tensor, nn.Parameter) and tensor.layout == torch.strided else tensor


def _kind(name: str, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What calls that take equally long have in common."""

    def of(value: Any) -> Any:
        return (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else repr(value)

    return name, *map(of, args), *((key, of(value)) for key, value in kwargs.items())


def _unsafe(image: Tensor, name: str, args: Any, kwargs: Any) -> str:
    """Why this call must not even be tried in the other layout; empty where it may."""
    if is_channels_last(image):
        return "images are in channels_last already: the layout is the user's"
    is_on_cpu = image.device.type == "cpu"
    casts_to_bfloat16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    if is_on_cpu and image.shape[0] == 1 and casts_to_bfloat16:
        return _LONE_SAMPLE
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    stride = kwargs.get("stride", args[3] if len(args) > 3 else 1)
    strides = (stride,) if isinstance(stride, int) else tuple(stride)
    is_plain = is_on_cpu and name in ("conv2d", "conv3d") and isinstance(weight, Tensor)
    if is_plain and breaks_the_heap(weight.shape[2:], strides, weight.shape[1]):
        return BREAKS_THE_HEAP
    return ""
