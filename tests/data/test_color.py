"""Normalisation against torch, jitter of colours against Python's colorsys."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_accel.data import ColorJitter, Normalize, Position, Preprocess, Transform
from lightning_accel.data.color import Factors
from lightning_accel.data.tensor_arrays import NumpyArrays
from lightning_accel.data.transform import Shape

pytestmark = pytest.mark.numbers

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def applied(transform: Transform, images: Tensor, position: Position | None = None, **settings: Any) -> Tensor:
    result: Tensor = Preprocess([transform], seed=0, **settings)(images, position)
    return result


def images_of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=dtype) if dtype == torch.uint8 else torch.rand(shape).to(dtype)


def normalized_by_torch(images: Tensor, mean: Any, std: Any) -> Tensor:
    """``(N, C, H, W)``, in float64."""
    values = images.double() / (255 if images.dtype == torch.uint8 else 1)
    mean, std = (torch.tensor(numbers, dtype=torch.float64).reshape(1, -1, 1, 1) for numbers in (mean, std))
    return (values - mean) / std


# -- Normalize ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("channels", "mean", "std"),
    [(3, MEAN, STD), (3, 0.5, 0.25), (1, 0.13, 0.31), (1, [0.13], [0.31]), (4, (0.1, 0.2, 0.3, 0.4), 0.5), (3, 0, 1)],
)
def test_normalize_is_minus_mean_by_std(dtype: torch.dtype, channels: int, mean: Any, std: Any, fuse: bool) -> None:
    images = images_of(dtype, 4, channels, 7, 9)
    expected = normalized_by_torch(images, mean, std)
    transform = Normalize(mean, std)
    # In float32, a rounding each for the scale, the offset, the product and the sum.
    off = 4 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    torch.testing.assert_close(applied(transform, images, fuse=fuse).double(), expected, atol=off, rtol=0)
    nhwc = applied(transform, images.permute(0, 2, 3, 1).contiguous(), fuse=fuse)
    torch.testing.assert_close(nhwc.permute(0, 3, 1, 2).double(), expected, atol=off, rtol=0)


def test_normalize_is_the_same_in_evaluation() -> None:
    images = images_of(torch.uint8, 2, 3, 4, 4)
    evaluated = applied(Normalize(MEAN, STD), images, Position(training=False))
    assert torch.equal(evaluated, applied(Normalize(MEAN, STD), images))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_normalized_images_are_rounded_once_to_the_step_s_dtype_as_torch_rounds(dtype: torch.dtype) -> None:
    images = images_of(torch.uint8, 2, 3, 16, 16)
    exact = applied(Normalize(MEAN, STD), images)
    assert torch.equal(applied(Normalize(MEAN, STD), images, dtype=dtype), exact.to(dtype))


def test_means_for_two_channels_tell_which_axis_holds_them() -> None:
    images = images_of(torch.float32, 2, 4, 5, 2)
    expected = normalized_by_torch(images.permute(0, 3, 1, 2), (0.1, 0.9), (0.5, 0.2)).permute(0, 2, 3, 1)
    torch.testing.assert_close(applied(Normalize((0.1, 0.9), (0.5, 0.2)), images).double(), expected, atol=1e-5, rtol=0)


def test_means_of_the_wrong_number_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"Normalize: 3 means .* images of 1 channels, \(2, 1, 4, 4\)"):
        applied(Normalize(MEAN, STD), torch.rand(2, 1, 4, 4))


@pytest.mark.parametrize(("mean", "std"), [((0.1, 0.2), (0.1, 0.2, 0.3)), ([], 0.5), (0.5, []), ([], [])])
def test_means_and_stds_that_do_not_match_are_refused_at_once(mean: Any, std: Any) -> None:
    with pytest.raises(ValueError, match=r"Normalize.*(mean|std)"):
        Normalize(mean, std)


@pytest.mark.parametrize("std", [0, -1.0, (0.1, 0.0, 0.1), float("nan")])
def test_a_std_that_is_none_is_refused_at_once(std: Any) -> None:
    with pytest.raises(ValueError, match=r"Normalize\(std="):
        Normalize(0.5, std)


@pytest.mark.parametrize("mean", ["0.5", "12", None, {"a": 1}, ["a", "b", "c"], [[0.1, 0.2]]])
def test_a_mean_that_is_no_number_is_refused_at_once(mean: Any) -> None:
    with pytest.raises(TypeError, match=r"Normalize\(mean=.*give a number"):
        Normalize(mean, 0.5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int8])
def test_images_of_a_dtype_that_are_none_are_refused_with_what_is_taken(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"Normalize: the images are {str(dtype)[6:]}; it takes uint8, float16"):
        applied(Normalize(MEAN, STD, key=0), [torch.zeros(2, 3, 4, 4, dtype=dtype)])


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 5, 3, 4, 4), (2, 7)])
def test_images_of_a_shape_that_are_none_are_refused_with_what_is_taken(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"Normalize: the images have shape .*; it takes four dimensions, \(N, C, H"):
        applied(Normalize(MEAN, STD, key="x"), {"x": torch.zeros(shape)})


# -- ColorJitter -------------------------------------------------------------------------------------------------------


def jittered(images: Tensor, **factors: float) -> Tensor:
    """The images, with the same factor for each."""
    settings = {name: 0.5 if name == "hue" else 1.0 for name in factors}
    neutral = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
    drawn = Factors(**{name: np.full(len(images), value, np.float32) for name, value in (neutral | factors).items()})
    return torch.from_numpy(ColorJitter(**settings).apply(images.numpy(), drawn, NumpyArrays()))


def grey_of(images: Tensor) -> Tensor:
    """Luma of ITU-R BT.601, as torchvision has it."""
    weights = torch.tensor([0.299, 0.587, 0.114]).reshape(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True)


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
def test_brightness_multiplies_and_stays_in_range(factor: float) -> None:
    images = torch.rand(3, 3, 6, 5)
    torch.testing.assert_close(jittered(images, brightness=factor), (images * factor).clamp(0, 1))


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
def test_contrast_blends_with_the_mean_grey_of_each_image(factor: float) -> None:
    images = torch.rand(3, 3, 6, 5) * torch.tensor([0.2, 0.6, 1.0]).reshape(3, 1, 1, 1)
    mean = grey_of(images).mean(dim=(1, 2, 3), keepdim=True)
    expected = (factor * images + (1 - factor) * mean).clamp(0, 1)
    torch.testing.assert_close(jittered(images, contrast=factor), expected)


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
def test_saturation_blends_with_the_image_in_grey(factor: float) -> None:
    images = torch.rand(3, 3, 6, 5)
    expected = (factor * images + (1 - factor) * grey_of(images)).clamp(0, 1)
    torch.testing.assert_close(jittered(images, saturation=factor), expected)


@pytest.mark.parametrize("turn", [-0.5, -0.2, 0.0, 0.1, 1 / 3, 0.5])
def test_hue_is_turned_as_colorsys_turns_it(turn: float) -> None:
    corners = torch.tensor([[r, g, b] for r in (0.0, 1.0) for g in (0.0, 1.0) for b in (0.0, 1.0)] + [[0.3] * 3] * 2)
    pixels = torch.cat([torch.rand(54, 3), corners])
    expected = []
    for hue, saturation, value in (colorsys.rgb_to_hsv(*pixel.tolist()) for pixel in pixels):
        expected.append(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value))
    actual = jittered(pixels.T.reshape(1, 3, 8, 8), hue=turn)
    torch.testing.assert_close(actual, torch.tensor(expected).T.reshape(1, 3, 8, 8), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_no_strength_is_no_change(dtype: torch.dtype) -> None:
    images = images_of(dtype, 2, 3, 8, 8)
    unchanged = applied(ColorJitter(), images)
    assert unchanged.dtype == dtype
    torch.testing.assert_close(unchanged, images, atol=1e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_jitter_keeps_dtype_and_range_and_differs_from_image_to_image(dtype: torch.dtype) -> None:
    images = images_of(dtype, 1, 3, 8, 8).repeat(8, 1, 1, 1)
    changed = applied(ColorJitter(0.8, 0.8, 0.8, 0.5), images)
    assert changed.dtype == dtype
    assert 0 <= changed.min() <= changed.max() <= (255 if dtype == torch.uint8 else 1)
    assert len({tuple(image.flatten().tolist()) for image in changed}) == 8


def test_uint8_is_jittered_as_the_floats_that_it_stands_for() -> None:
    images = images_of(torch.uint8, 4, 3, 8, 8)
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    expected = applied(jitter, images.float() / 255) * 255
    assert (applied(jitter, images).float() - expected).abs().max() < 0.501


def test_factors_reach_from_one_less_to_one_more_but_not_below_zero() -> None:
    jitter = ColorJitter(0.4, 3.0, 0.1, 0.2)
    drawn = jitter.draw(Shape(4000, 3, 4, 4), np.random.default_rng(0))
    assert drawn is not None
    for factors, (least, most) in zip(drawn, [(0.6, 1.4), (0, 4), (0.9, 1.1), (-0.2, 0.2)], strict=True):
        margin = 0.01 * (most - least)
        assert least <= factors.min() < least + margin
        assert most - margin < factors.max() <= most


def test_nothing_is_jittered_in_evaluation() -> None:
    images = images_of(torch.uint8, 2, 3, 4, 4)
    assert torch.equal(applied(ColorJitter(1, 1, 1, 0.5), images, Position(training=False)), images)


def test_floats_beyond_one_are_refused_not_cut_off() -> None:
    """Floats of 0…255 would otherwise come out as images of ones."""
    with pytest.raises(ValueError, match=r"ColorJitter.*255"):
        applied(ColorJitter(0.1), torch.rand(2, 3, 4, 4) * 255)


@pytest.mark.parametrize("channels", [1, 4])
def test_colours_of_images_without_any_are_refused(channels: int) -> None:
    images = torch.rand(2, channels, 5, 5)
    with pytest.raises(ValueError, match=rf"ColorJitter\(saturation=0.5.*images of {channels} channels"):
        applied(ColorJitter(saturation=0.5), images)
    assert applied(ColorJitter(0.5, 0.5), images).shape == images.shape


@pytest.mark.parametrize(
    "setting",
    [{"brightness": -1}, {"contrast": "1"}, {"hue": 0.6}, {"saturation": True}, {"brightness": float("inf")}],
)
def test_a_strength_that_is_none_is_refused_at_once(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"ColorJitter\({next(iter(setting))}="):
        ColorJitter(**setting)


def test_jitter_after_normalisation_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="ColorJitter after Normalize"):
        Preprocess([Normalize(MEAN, STD), ColorJitter(0.1)])


def test_means_of_0_to_255_are_refused_for_uint8_images() -> None:
    with pytest.raises(ValueError, match=r"taken as 0 to 1, not as 0 to 255: divide both by 255"):
        applied(Normalize((123, 116, 103), (58, 57, 57)), torch.zeros(1, 3, 2, 2, dtype=torch.uint8))
