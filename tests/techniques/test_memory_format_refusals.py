"""Channels_last is taken back, with the reason, where it is wrong or slower, or where the weights are not ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.techniques.memory_format import convert_weights
from support.models import TinyCNN, ViewCNN, images
from support.techniques.memory_format_cases import (
    IN_FORCE_NOWHERE,
    assert_same_step,
    clock,
    is_channels_last,
    laid_out,
    step,
)

pytestmark = [pytest.mark.numbers, IN_FORCE_NOWHERE]


class Asking(nn.Module):
    """Goes another way, or nowhere, where an image is not contiguous."""

    def __init__(self, *, raises: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.raises = raises

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if not x.is_contiguous():
            if self.raises:
                raise RuntimeError("needs contiguous")
            return x * 2
        return x


class Striding(nn.Module):
    """Reads an image by strides of its own; torch's function takes the image by name, too."""

    def __init__(self, *, by_name: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.by_name:
            return torch.as_strided(input=x, size=x.shape, stride=x.contiguous().stride())
        return x.as_strided(x.shape, x.contiguous().stride())


class Repeated(nn.Module):
    """A block that gradient checkpointing tries as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(3, 4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (lambda: nn.Conv2d(3, 4, 3), {}),
        (Repeated, {}),
        (Repeated, {"gradient_checkpointing": {"mode": "full", "blocks": ["Conv2d"]}}),
    ],
    ids=["slower", "slower inside", "slower and checkpointed"],
)
def test_a_slower_layout_is_not_taken_and_every_step_is_the_plain_one(
    make: Callable[[], nn.Module], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(monkeypatch, 0.5)
    plain = nn.Sequential(make(), nn.Flatten())
    model = copy.deepcopy(plain)
    handle = laid_out(model, "auto", **more)
    for index in range(3):
        inputs = images(index)[0]
        assert torch.equal(step(model, handle, inputs), step(plain, None, inputs))
    (why,) = set(handle.report.refused("memory_format").values())
    assert "at 0.50x the speed here" in why
    assert not any(is_channels_last(p) for p in model.parameters() if p.dim() == 4)
    assert handle.batch(inputs) is inputs
    handle.undo()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Asking(raises=False), "calls .is_contiguous() on a tensor that channels_last lays out otherwise"),
        (lambda: Asking(raises=True), "calls .is_contiguous() on a tensor that channels_last lays out otherwise"),
        (Striding, "calls .as_strided() on a tensor that channels_last lays out otherwise"),
        (lambda: Striding(by_name=True), "calls .as_strided() on a tensor that channels_last lays out otherwise"),
    ],
    ids=["asks", "asks and raises", "reads by strides", "reads by strides and names"],
)
def test_code_that_looks_at_layouts_computes_as_ever_and_gets_its_own_back(
    make: Callable[[], nn.Module], reason: str
) -> None:
    plain = nn.Sequential(make(), nn.Flatten())
    model = copy.deepcopy(plain)
    handle = laid_out(model)
    for index in range(3):
        assert_same_step(model, handle, plain, images(index)[0])
    (why,) = set(handle.report.refused("memory_format").values())
    assert reason in why
    assert not any(is_channels_last(p) for p in model.parameters() if p.dim() == 4)
    handle.undo()


def test_a_convolution_with_other_numbers_in_channels_last_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library's kernel with a fault would have: one sample of the batch wrong, in that layout only."""
    sound = torch.conv2d

    def faulty(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = sound(x, *args, **kwargs)
        return torch.cat([y[:-1], 1.01 * y[-1:]]) if is_channels_last(x) else y

    def conv2d(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.overrides.handle_torch_function(faulty, (x,), x, *args, **kwargs)

    faulty.__name__ = "conv2d"
    monkeypatch.setattr(F, "conv2d", conv2d)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    handle = laid_out(model)
    step(model, handle, images(0)[0])
    (why,) = set(handle.report.refused("memory_format").values())
    assert "other numbers than the original" in why
    handle.undo()


def test_a_slower_layout_that_was_named_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 0.5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    handle = laid_out(model, "channels_last")
    step(model, handle, images(0)[0])
    assert handle.report.applied("memory_format") == ["0"]
    handle.undo()


def test_a_deterministic_run_decides_nothing_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, determinism_restored: None
) -> None:
    clock(monkeypatch, 0.5)
    torch.use_deterministic_algorithms(True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    handle = laid_out(model, "auto")
    step(model, handle, images(0)[0])
    assert handle.report.applied("memory_format") == ["0"]
    handle.undo()


class ViewsLikeAnother(ViewCNN):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return self.head(x.view_as(torch.empty(x.shape[0], 512)))


@pytest.mark.parametrize("kind", [ViewCNN, ViewsLikeAnother])
def test_view_inside_the_model_takes_the_layout_back_and_names_the_line(kind: type[ViewCNN]) -> None:
    plain = kind()
    model = copy.deepcopy(plain)
    handle = laid_out(model)
    for index in range(3):
        assert_same_step(model, handle, plain, images(index)[0])
    (why,) = set(handle.report.refused("memory_format").values())
    line = kind.forward.__code__.co_firstlineno + 2
    assert f"{kind.forward.__code__.co_filename}:{line} calls .view" in why
    assert model.conv.weight.is_contiguous()
    handle.undo()


def test_view_outside_the_model_takes_the_layout_back_and_names_the_line() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1))
    model = copy.deepcopy(plain)
    handle = laid_out(model)

    def flat(net: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: net(x).view(x.shape[0], -1)

    for index in range(2):
        inputs = images(index)[0]
        torch.testing.assert_close(step(model, handle, inputs, flat(model)), step(plain, None, inputs, flat(plain)))
        torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
    (why,) = set(handle.report.refused("memory_format").values())
    assert f"{__file__}:" in why
    handle.undo()


def test_view_that_appears_in_validation_only_takes_the_layout_back_then() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1))
    handle = laid_out(model)
    step(model, handle, images(0)[0])
    assert handle.report.applied("memory_format") == ["0"]
    with torch.no_grad(), handle.step("validate"):
        model(handle.batch(images(0)[0])).view(4, -1)
    assert handle.report.applied("memory_format") == []
    handle.undo()


def test_a_view_that_is_wrong_anyway_raises_as_it_would_without_us() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    handle = laid_out(model)
    with pytest.raises(RuntimeError, match="invalid for input"):
        step(model, handle, images(0)[0], lambda x: model(x).view(7, -1))
    handle.undo()


def test_a_weight_tied_between_convolutions_is_restored_when_the_layout_is_taken_back() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1))
    model[1].weight = model[0].weight
    handle = laid_out(model)
    for index in range(2):  # the first tries, the second is the first in channels_last
        step(model, handle, images(index)[0], lambda x: model(x).view(4, -1))
    assert model[0].weight.is_contiguous()
    handle.undo()
    assert model[0].weight.is_contiguous()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))


def compiled() -> nn.Module:
    model = TinyCNN()
    model.compile(backend="eager")
    return model


def in_shared_memory() -> nn.Module:
    return nn.Conv2d(3, 4, 3).share_memory()


def sliced() -> nn.Module:
    model = nn.Conv2d(3, 4, 3)
    model.weight = nn.Parameter(torch.randn(8, 3, 3, 3)[:4])
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lazy, "lazy parameters: run it once before"),
        (compiled, "inside a compiled module"),
        (lambda: nn.Sequential(torch.compile(TinyCNN(), backend="eager")), "inside a compiled module"),
        (in_shared_memory, "shared with other processes"),
        (sliced, "something else has the memory of its weight"),
    ],
    ids=["lazy", "compiled in place", "compiled wrapper", "shared memory", "sliced"],
)
def test_weights_that_are_not_ours_to_change_are_refused(make: Callable[[], nn.Module], reason: str) -> None:
    handle = laid_out(make(), "auto")
    assert handle.report.applied("memory_format") == []
    assert all(reason in why for why in handle.report.refused("memory_format").values())
    assert handle.report.refused("memory_format")
    handle.undo()


def test_a_convolution_that_never_ran_on_the_first_step_is_taken_back_with_the_reason() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Conv2d(3, 4, 3)})
    handle = laid_out(model)
    step(model, handle, torch.ones(2, 3), model["used"])
    assert "no convolution ran" in handle.report.refused("memory_format")["unused"]
    handle.undo()


@pytest.mark.parametrize("is_users", [False, True])
def test_a_users_weight_in_channels_last_leaves_all_to_them_and_a_transposed_one_does_not(is_users: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    other = nn.Parameter(torch.eye(4).T.view(4, 4, 1, 1), requires_grad=False)
    layout = torch.randn(4, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    model[0].register_parameter("other", nn.Parameter(layout) if is_users else other)
    refused = {claim.why_not for claim in convert_weights(model)}
    assert refused == {"0.other is in channels_last already: the layout is the user's" if is_users else ""}
