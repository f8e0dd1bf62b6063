"""Channels_last where it is right: in force in every convolution and batch that it suits, with the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.core.report import AccelError, AccelWarning
from support.models import TASKS, TinyCNN, images
from support.techniques.memory_format_cases import (
    FORMATS,
    IN_FORCE_NOWHERE,
    assert_same_step,
    is_channels_last,
    laid_out,
    step,
)

pytestmark = [pytest.mark.numbers, IN_FORCE_NOWHERE]


class ConvolutionInputs(TorchDispatchMode):
    """Notes, for every convolution that runs, whether its input is channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "convolution":
            self.layouts.append(is_channels_last(args[0]))
        return func(*args, **(kwargs or {}))


def test_every_convolution_gets_a_channels_last_input() -> None:
    model = TinyCNN()
    handle = laid_out(model)
    step(model, handle, images(0)[0])
    with ConvolutionInputs() as seen:
        step(model, handle, images(1)[0])
    assert seen.layouts == [True] * 5
    handle.undo()
    with ConvolutionInputs() as seen:
        step(model, None, images(1)[0])
    assert seen.layouts == [False] * 5


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "2d": (lambda: nn.Conv2d(4, 8, 3), (2, 4, 6, 6), True),
    "3d": (lambda: nn.Conv3d(4, 8, 3), (2, 4, 5, 6, 6), True),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 8, 3), (2, 4, 6, 6), True),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 8, 3), (2, 4, 5, 6, 6), True),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 6, 6), True),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 6, 6), False),
    "1x1": (lambda: nn.Conv2d(4, 8, 1), (2, 4, 6, 6), False),
    "1d": (lambda: nn.Conv1d(4, 8, 3), (2, 4, 6), False),
    "circular padding": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), (2, 4, 6, 6), True),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 8, 3)), (2, 4, 6, 6), False),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 8, 3)), (2, 4, 6, 6), False),
    "frozen": (lambda: nn.Conv2d(4, 8, 3).requires_grad_(False), (2, 4, 6, 6), True),
}


@pytest.mark.parametrize(("make", "shape", "changes"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("container", [nn.Sequential, lambda m: _Parts(nn.ModuleList([m])), lambda m: _Parts({"a": m})])
def test_every_kind_of_convolution_computes_the_same_and_is_restored(
    make: Callable[[], nn.Module], shape: tuple[int, ...], changes: bool, container: Callable[..., nn.Module]
) -> None:
    plain = nn.Sequential(container(make()), nn.ReLU())
    head = nn.Conv2d(3, 3, 3)  # so that there is always something to do
    plain.append(_Beside(head))
    model = copy.deepcopy(plain)
    strides = [p.stride() for p in model.parameters()]
    handle = laid_out(model, "auto", trust="unchecked")
    for _ in range(2):
        assert_same_step(model, handle, plain, torch.randn(shape))
    assert any(is_channels_last(p) for p in model[0].parameters() if p.dim() in FORMATS) is changes
    handle.undo()
    assert [p.stride() for p in model.parameters()] == strides


class _Parts(nn.Module):
    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = parts if isinstance(parts, nn.ModuleList) else nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values() if isinstance(self.parts, nn.ModuleDict) else self.parts:
            x = part(x)
        return x


class _Beside(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return x * self.part(torch.ones(1, 3, 4, 4)).mean()


@pytest.mark.parametrize(
    ("setting", "is_2d", "is_3d"),
    [("auto", True, True), ("channels_last", True, False), ("channels_last_3d", False, True)],
)
def test_a_named_format_is_for_its_dimensions_only(setting: str, is_2d: bool, is_3d: bool) -> None:
    model = nn.ModuleDict({"2d": nn.Conv2d(3, 4, 3), "3d": nn.Conv3d(3, 4, 3)})
    handle = laid_out(model, setting, trust="unchecked")
    with handle.step():
        pass
    assert (is_channels_last(model["2d"].weight), is_channels_last(model["3d"].weight)) == (is_2d, is_3d)
    handle.undo()


def test_off_leaves_every_layout_alone() -> None:
    model = TinyCNN()
    handle = laid_out(model, "off")
    image = images(0)[0]
    assert handle.batch(image) is image
    assert model.stem.weight.is_contiguous()
    assert handle.report.of("memory_format").status == "off"


def test_batches_are_left_as_they_are() -> None:
    """Callbacks see them, and noise is drawn for them: convolutions lay them out where they take them."""
    handle = laid_out(TinyCNN(), trust="unchecked")
    batch = images(0)
    assert handle.batch(batch) is batch
    handle.undo()


@pytest.mark.parametrize("batch", ["text", None, 3, ["a", 1], {"a": None}])
def test_a_batch_without_tensors_passes(batch: Any) -> None:
    handle = laid_out(TinyCNN(), trust="unchecked")
    assert handle.batch(batch) == batch
    handle.undo()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("starts_at", [0, 2])
def test_a_run_equals_the_plain_one_with_a_fused_optimizer_too(fused: bool, starts_at: int) -> None:
    """Accelerated from the start or in the middle, when the optimizer's state is contiguous already."""
    plain = TASKS["cnn"].model()
    model = copy.deepcopy(plain)
    nets = [(plain, None), (model, None)]
    # A large eps: Adam makes a full step of a gradient that is nothing but rounding.
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3, fused=fused) for net, _ in nets]
    handle = None
    for index in range(6):
        if index == starts_at:
            handle = laid_out(model)
        if index == 4:
            handle.undo()
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            step(net, handle if net is model and index < 4 else None, images(index)[0])
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)


def test_a_model_without_convolutions_is_no_reason_to_warn_unless_the_format_was_named() -> None:
    handle = laid_out(nn.Linear(2, 2), "auto")
    assert handle.report.of("memory_format").status == "no site in this model"
    handle.undo()
    with pytest.warns(AccelWarning, match="memory_format was asked for and found no site"):
        laid_out(nn.Linear(2, 2), "channels_last").undo()
    with pytest.raises(AccelError, match="strict"):
        laid_out(nn.Linear(2, 2), "channels_last", strict=True)


def test_a_reason_that_holds_for_many_convolutions_is_told_once() -> None:
    unsafe = nn.Sequential(*(nn.Conv2d(2, 2, 1, stride=2) for _ in range(3)))
    with pytest.warns(AccelWarning, match="found no site") as told:
        laid_out(unsafe, "channels_last").undo()
    assert str(told[0].message).count("writes past its memory") == 1
