"""A single pass against plain indexing: every output pixel is looked up by itself."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("hypothesis")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_accel.data.single_pass import SinglePass, run_on_host

pytestmark = pytest.mark.numbers

Array = np.ndarray[Any, Any]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

passes = st.fixed_dictionaries(
    {
        "count": st.integers(0, 3),
        "channels": st.integers(1, 4),
        "image": st.tuples(st.integers(1, 6), st.integers(1, 6)),
        "out": st.tuples(st.integers(1, 9), st.integers(1, 9)),
        "seed": st.integers(0, 2**32),
    }
)


def drawn(count: int, channels: int, out: tuple[int, int], seed: int) -> SinglePass:
    """Crops that reach far beyond the image on every side, flipped or not."""
    rng = np.random.default_rng(seed)
    return SinglePass(
        height=out[0],
        width=out[1],
        top=rng.integers(-12, 12, count).astype(np.int32),
        left=rng.integers(-12, 18, count).astype(np.int32),
        step=rng.choice([-1, 1], count).astype(np.int32),
        scale=rng.uniform(0.001, 2, channels).astype(np.float32),
        bias=rng.uniform(-3, 3, channels).astype(np.float32),
        fill=rng.uniform(-3, 3, channels).astype(np.float32),
    )


def pixel_by_pixel(images: Array, one: SinglePass) -> Array:
    """As :class:`SinglePass` says, in float32."""
    count, channels, height, width = images.shape
    out = np.empty((count, channels, one.height, one.width), np.float32)
    for n, c, i, j in np.ndindex(*out.shape):
        row, column = one.top[n] + i, one.left[n] + one.step[n] * j
        inside = 0 <= row < height and 0 <= column < width
        out[n, c, i, j] = np.float32(images[n, c, row, column]) * one.scale[c] + one.bias[c] if inside else one.fill[c]
    return out


def run(images: Array, one: SinglePass, kind: Any, channels_last: bool = False) -> torch.Tensor:
    shape = (*images.shape[:2], one.height, one.width)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.full(shape, float("nan"), dtype=DTYPES[kind]).contiguous(memory_format=layout)
    bits = out.view(torch.int16).numpy().view(np.uint16) if kind == "bfloat16" else out.numpy()
    run_on_host(images, one, bits, kind=kind)
    return out


@settings(max_examples=80, deadline=None)
@given(passes, st.sampled_from(["uint8", "float32"]), st.sampled_from(list(DTYPES)), st.booleans(), st.booleans())
def test_every_pixel_is_the_one_that_the_pass_says(
    sizes: dict[str, Any], dtype: str, kind: Any, channels_last: bool, is_nhwc: bool
) -> None:
    count, channels, image, out, seed = (sizes[name] for name in ("count", "channels", "image", "out", "seed"))
    images = np.random.default_rng(seed).integers(0, 256, (count, channels, *image)).astype(dtype)
    if is_nhwc:
        images = np.ascontiguousarray(images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    one = drawn(count, channels, out, seed)
    actual = run(images, one, kind, channels_last)
    assert torch.equal(actual, torch.from_numpy(pixel_by_pixel(images, one)).to(DTYPES[kind]))


SPECIAL = [0.0, -0.0, 1.0, -1.0, 65504.0, 65520.0, 1e38, 3.4e38, float("inf"), -float("inf"), float("nan"), 1e-40, 6e-8]


@pytest.mark.parametrize("kind", list(DTYPES))
def test_values_are_rounded_as_torch_rounds_them(kind: Any) -> None:
    """Ties, overflow, subnormal numbers, infinities and what is no number."""
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)
    ties = (rng.integers(0, 2**15, 2000, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([np.float32(SPECIAL), anything, ties])
    values[np.isnan(values)] = np.nan  # none of those that a processor complains of
    images = values.reshape(1, 1, 1, -1)
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    place = {"top": np.int32([0]), "left": np.int32([0]), "step": np.int32([1])}
    plain = SinglePass(height=1, width=values.size, scale=one, bias=zero, fill=zero, **place)
    expected = torch.from_numpy(images).to(DTYPES[kind])
    torch.testing.assert_close(run(images, plain, kind), expected, rtol=0, atol=0, equal_nan=True)


# -- putting passes together -------------------------------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 2**16)),
        st.tuples(st.just("crop"), st.integers(0, 2**16)),
        st.tuples(st.just("normalize"), st.integers(0, 2**16)),
    ),
    max_size=5,
)


@settings(max_examples=80, deadline=None)
@given(steps)
def test_steps_put_together_are_the_steps_one_after_another(chosen: list[tuple[str, int]]) -> None:
    """Any order of flips, one padded crop and one normalisation."""
    images = np.random.default_rng(0).random((3, 2, 6, 7), dtype=np.float32)
    onto, expected, seen = SinglePass.copying(*images.shape), images, set()
    for name, seed in chosen:
        if name != "flip" and name in seen:
            continue
        seen.add(name)
        rng = np.random.default_rng(seed)
        if name == "flip":
            flags = rng.random(3) < 0.5
            onto.flip(flags)
            expected = np.where(flags[:, None, None, None], expected[..., ::-1], expected)
        elif name == "crop":
            height, width = onto.height - 1, onto.width
            top, left = rng.integers(-2, 4, 3), rng.integers(-2, 3, 3)
            onto.crop(top, left, height, width)
            padded = np.pad(expected, ((0, 0), (0, 0), (2, 2), (2, 2)))
            windows = zip(padded, top + 2, left + 2, strict=True)
            expected = np.stack([one[:, y : y + height, x : x + width] for one, y, x in windows])
        else:
            scale, bias = rng.uniform(0.5, 2, (2, 2)).astype(np.float32)
            onto.normalize(scale, bias)
            expected = expected * scale[:, None, None] + bias[:, None, None]
    actual = run(images, onto, "float32")
    np.testing.assert_array_equal(actual.numpy(), expected)
    assert (onto.height, onto.width) == expected.shape[2:]


def test_a_pass_of_nothing_is_a_copy() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5), np.uint8)
    actual = run(images, SinglePass.copying(*images.shape), "float32")
    np.testing.assert_array_equal(actual.numpy(), images)


def test_the_images_are_only_read() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5), np.uint8)
    images.flags.writeable = False
    one = drawn(2, 3, (4, 5), seed=1)
    assert torch.equal(run(images, one, "float32"), torch.from_numpy(pixel_by_pixel(images, one)))
