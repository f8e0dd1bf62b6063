"""The fused kernel on a GPU, compiled and launched by CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_accel.data.single_pass import Kind, SinglePass, run_on_gpu
from lightning_accel.data.tensor_arrays import cupy_stream
from support.single_pass_cases import (
    SIZES,
    TORCH_DTYPES,
    Array,
    NumpyArray,
    assert_agrees,
    assert_converted,
    hard_values,
    make_images,
    make_pass,
    reference,
    views,
)

pytestmark = [pytest.mark.gpu, pytest.mark.needs_kernels("CuPy compiles them")]


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def new_output(shape: tuple[int, ...], kind: Kind, channels_last: bool, misaligned_by: int = 0) -> Tensor:
    """NaN everywhere; in memory of torch's that begins so many elements after its own beginning."""
    n, c, h, w = shape
    memory = torch.full((n * c * h * w + misaligned_by,), float("nan"), dtype=TORCH_DTYPES[kind], device="cuda")
    memory = memory[misaligned_by:]
    return memory.view(n, h, w, c).permute(0, 3, 1, 2) if channels_last else memory.view(shape)


def writable(cupy: Any, out: Tensor) -> Array:
    """As the kernel takes it: CuPy has no bfloat16."""
    return (
        cupy.from_dlpack(out.view(torch.int16)).view("uint16") if out.dtype == torch.bfloat16 else cupy.from_dlpack(out)
    )


def bits_of(out: Tensor) -> NumpyArray:
    return out.view(torch.int32 if out.dtype == torch.float32 else torch.int16).cpu().numpy()


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.stream(stream), cupy_stream(stream):
        yield


@pytest.mark.parametrize("channels_last", [False, True], ids=["planes", "channels last"])
@pytest.mark.parametrize("kind", list(TORCH_DTYPES))
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("channels", [1, 3, 4, 5])
def test_the_kernel_computes_what_single_pass_says(
    cupy: Any, channels: int, dtype: str, kind: Kind, channels_last: bool
) -> None:
    for number, (size, crop) in enumerate([*SIZES, ((130, 120), (128, 112))]):
        count = 1 if number == 1 else 3
        single_pass = make_pass(count, channels, size, crop, seed=number)
        images = make_images((count, channels, *size), dtype, seed=number)
        expected = reference(images, single_pass)
        for view in views(cupy.asarray(images), cupy):
            for misaligned_by in (0, 1):
                out = new_output(expected.shape, kind, channels_last, misaligned_by)
                run_on_gpu(view, single_pass, writable(cupy, out), kind=kind, channels_last=channels_last)
                assert_agrees(bits_of(out), expected, kind)


def test_more_samples_than_a_grid_holds(cupy: Any) -> None:
    images, single_pass = make_images((70000, 1, 2, 2), "uint8"), make_pass(70000, 1, (2, 2), (2, 2))
    out = new_output(images.shape, "float32", False)
    run_on_gpu(cupy.asarray(images), single_pass, writable(cupy, out), kind="float32", channels_last=False)
    for part in (slice(0, 100), slice(65500, 65600), slice(69900, 70000)):
        cut = {name: getattr(single_pass, name)[part] for name in ("top", "left", "step")}
        few = SinglePass(
            height=2, width=2, **cut, scale=single_pass.scale, bias=single_pass.bias, fill=single_pass.fill
        )
        assert_agrees(bits_of(out[part]), reference(images[part], few), "float32")


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_conversions_round_as_torch_does(cupy: Any, kind: Kind) -> None:
    """Subnormal numbers too, although CuPy has everything compiled to flush them."""
    values = hard_values()
    one, zero = np.ones(1, np.float32), np.zeros(1, np.int32)
    single_pass = SinglePass(
        height=1, width=values.size, top=zero, left=zero, step=zero + 1, scale=one, bias=-0.0 * one, fill=one
    )
    out = new_output((1, 1, 1, values.size), kind, False)
    images = cupy.asarray(values.reshape(1, 1, 1, -1))
    run_on_gpu(images, single_pass, writable(cupy, out), kind=kind, channels_last=False)
    assert_converted(bits_of(out).reshape(-1), values, kind)


def test_nothing_waits_for_the_gpu(cupy: Any) -> None:
    """On a side stream that is busy: the host is through before the stream is, and parameters are not overwritten."""
    images = make_images((4, 3, 40, 40), "uint8")
    passes = [make_pass(4, 3, (40, 40), (32, 32), seed=seed) for seed in range(4)]
    on_device = cupy.asarray(images)
    outs = [new_output((4, 3, 32, 32), "bfloat16", True) for _ in passes]
    targets = [writable(cupy, out) for out in outs]
    stream, busy = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()

    def run_all() -> None:
        with on_stream(stream):
            torch.cuda._sleep(1_000_000_000)  # cycles: half a second
            busy.record()
            for single_pass, target in zip(passes, targets, strict=True):
                run_on_gpu(on_device, single_pass, target, kind="bfloat16", channels_last=True)

    run_all()  # compiles, and leaves memory for the parameters of all that may be under way at once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_all()
        assert not busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    for out, single_pass in zip(outs, passes, strict=True):
        assert_agrees(bits_of(out), reference(images, single_pass), "bfloat16")


def test_a_stream_that_is_not_torchs_is_refused(cupy: Any) -> None:
    images, single_pass = cupy.asarray(make_images((1, 3, 8, 8), "uint8")), make_pass(1, 3, (8, 8), (8, 8))
    out = writable(cupy, new_output((1, 3, 8, 8), "float32", False))
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(AssertionError, match="two streams"):
        run_on_gpu(images, single_pass, out, kind="float32", channels_last=False)
