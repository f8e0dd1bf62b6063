"""What the fused kernel is tested on, by the shim and on a GPU alike, and what it has to make of it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from lightning_accel.data.single_pass import Kind, SinglePass

Array = Any  # of NumPy or CuPy
NumpyArray = np.ndarray[Any, Any]

TORCH_DTYPES: dict[Kind, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

# Image and crop: several tiles; one of a single turn; odd and tiny widths, which a thread's pixels cross; larger than
# the image on all sides; a multiple of everything.
SIZES = [
    ((40, 30), (41, 29)),
    ((9, 11), (8, 8)),
    ((5, 7), (5, 7)),
    ((6, 3), (9, 1)),
    ((3, 5), (9, 11)),
    ((32, 32),) * 2,
]


def make_pass(count: int, channels: int, size: tuple[int, int], crop: tuple[int, int], seed: int = 0) -> SinglePass:
    """Random crops of images with a padding of 4, every other one flipped."""
    rng = np.random.default_rng(seed)
    (height, width), (out_height, out_width) = size, crop
    step = np.where(np.arange(count) % 2, -1, 1).astype(np.int32)
    left = rng.integers(-4, max(width + 4 - out_width, -3), count, dtype=np.int32)
    return SinglePass(
        height=out_height,
        width=out_width,
        top=rng.integers(-4, max(height + 4 - out_height, -3), count, dtype=np.int32),
        left=np.where(step > 0, left, left + out_width - 1).astype(np.int32),
        step=step,
        scale=rng.uniform(0.01, 0.03, channels).astype(np.float32),
        bias=rng.uniform(-3, 0, channels).astype(np.float32),
        fill=rng.uniform(-3, -2, channels).astype(np.float32),
    )


def make_images(shape: tuple[int, ...], dtype: str, seed: int = 0) -> NumpyArray:
    rng = np.random.default_rng(seed)
    if dtype == "uint8":
        return rng.integers(0, 256, shape, dtype=np.uint8)
    return rng.standard_normal(shape, dtype=np.float32) * 100


def views(images: Array, xp: Any) -> list[Array]:
    """The same images, otherwise in memory: with the channels last, as a part of larger ones, all of it backwards."""
    padded = xp.pad(images, ((1, 0), (0, 2), (3, 1), (2, 5)), constant_values=1)
    return [
        images,
        xp.ascontiguousarray(images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
        padded[1:, : images.shape[1], 3:-1, 2:-5],
        xp.ascontiguousarray(images[:, ::-1, ::-1, ::-1])[:, ::-1, ::-1, ::-1],
    ]


def elements(array: Array) -> list[int]:
    """Strides, in elements."""
    return [stride // array.itemsize for stride in array.strides]


def reference(images: NumpyArray, single_pass: SinglePass) -> NumpyArray:
    """``(N, C, h, w)`` float32, as SinglePass says, rounded once."""
    count, channels, in_height, in_width = images.shape
    scale, bias = single_pass.scale.astype(np.longdouble), single_pass.bias.astype(np.longdouble)
    out = np.empty((count, channels, single_pass.height, single_pass.width), np.float32)
    for n, i, j in itertools.product(range(count), range(single_pass.height), range(single_pass.width)):
        y = int(single_pass.top[n]) + i
        x = int(single_pass.left[n]) + int(single_pass.step[n]) * j
        is_inside = 0 <= y < in_height and 0 <= x < in_width
        out[n, :, i, j] = images[n, :, y, x] * scale + bias if is_inside else single_pass.fill
    return out


def assert_agrees(bits: NumpyArray, expected: NumpyArray, kind: Kind) -> None:
    """The output's bits with float32 values. Equal, but for one unit where the long double's sum was rounded."""
    wanted = torch.from_numpy(expected).to(TORCH_DTYPES[kind])
    wanted_bits = wanted.view(torch.int32 if kind == "float32" else torch.int16).numpy()
    apart = np.abs(bits.view(wanted_bits.dtype).astype(np.int64) - wanted_bits)
    assert apart.max() <= 1
    assert (apart > 0).mean() < 1e-3


def hard_values() -> NumpyArray:
    """Every bfloat16 and float16, what lies half way to the next and just beside that, and a million random floats."""
    bfloat16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    float16 = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        between = (float16[:-1] + float16[1:]) / 2
    ends = np.array([65520, -65520], np.float32)  # half way to what would follow the largest float16
    halves = np.concatenate([(bfloat16.view(np.uint32) | 0x8000).view(np.float32), between, ends])
    beside = [(halves.view(np.uint32) + offset).view(np.float32) for offset in (np.uint32(1), np.uint32(2**32 - 1))]
    noise = np.random.default_rng(0).integers(0, 2**32, 10**6, dtype=np.uint32).view(np.float32)
    return np.concatenate([bfloat16, float16, halves, *beside, noise])


def assert_converted(bits: NumpyArray, values: NumpyArray, kind: Kind) -> None:
    """To the very bits that torch casts to; NaN to some NaN."""
    made = torch.from_numpy(bits.view(np.int16)).view(TORCH_DTYPES[kind])
    wanted = torch.from_numpy(values).to(TORCH_DTYPES[kind])
    is_nan = torch.from_numpy(np.isnan(values))
    assert torch.equal(made.isnan(), is_nan)
    assert torch.equal(made.view(torch.int16)[~is_nan], wanted.view(torch.int16)[~is_nan])
