"""The fused kernel without a GPU: how it is launched, what it computes (through a shim), that nvcc compiles it."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from lightning_accel.data import single_pass as kernels
from lightning_accel.data.single_pass import Kind, Launch, SinglePass, Specialisation, pack, plan_launch
from support.single_pass_cases import (
    SIZES,
    TORCH_DTYPES,
    NumpyArray,
    assert_agrees,
    assert_converted,
    elements,
    hard_values,
    make_images,
    make_pass,
    reference,
    views,
)

pytestmark = pytest.mark.numbers

MARGIN, POISON = 1 << 15, 0xCD  # more than a tile that is written too far


# -- the plan of a launch ----------------------------------------------------------------------------------------------


def plan(
    shape: Sequence[int], strides: Sequence[int] | None = None, *, crop: tuple[int, int], **others: object
) -> Launch:
    if strides is None:
        strides = elements(np.empty((1, *shape[1:]), np.uint8))
    single_pass = make_pass(shape[0], shape[1], (shape[2], shape[3]), crop)
    given = {"kind": "bfloat16", "channels_last": True, **others}
    return plan_launch(shape, strides, "uint8", single_pass, **given)


def test_the_usual_batch_is_staged_in_tiles_that_fill_its_samples() -> None:
    launch = plan((256, 3, 224, 224), crop=(224, 224))
    assert launch.specialisation.options == (
        "-DINPUT=UInt8",
        "-DOUTPUT=BFloat16",
        "-DCHANNELS=3",
        "-DCHANNELS_LAST=true",
        "-DOFFSET=unsigned int",
    )
    assert (launch.tiles, launch.threads, launch.shared_bytes) == (49, 128, 1024 * 3 * 2)
    assert launch.numbers == (3, 224, 224, 224, 224, 512 // 224, 512 % 224)
    assert launch.samples == ((0, 256),)


def test_small_samples_get_small_blocks() -> None:
    assert plan((2, 3, 8, 8), crop=(8, 8)).threads == 32
    assert plan((2, 3, 8, 8), crop=(8, 8)).tiles == 1


@pytest.mark.parametrize(
    ("channels", "channels_last", "expected"),
    [(3, True, (3, True)), (3, False, (3, False)), (5, True, (0, True)), (1, True, (1, False)), (4, False, (4, False))],
)
def test_kernels_are_shared_by_unusual_channel_counts(
    channels: int, channels_last: bool, expected: tuple[int, bool]
) -> None:
    launch = plan((2, channels, 8, 8), crop=(8, 8), channels_last=channels_last)
    assert (launch.specialisation.channels, launch.specialisation.channels_last) == expected
    assert (launch.shared_bytes > 0) == expected[1] * (expected[0] > 0)


@pytest.mark.parametrize(
    ("strides", "wide"),
    [
        ((48, 16, 4, 1), False),
        ((48, -16, 4, 1), True),
        ((2**40, 2**31, 4, 1), True),
        ((2**40, 2**30, 4, 1), False),
        ((-48, 16, 4, 1), False),  # the sample's own stride is always of 64 bits
    ],
)
def test_offsets_of_64_bits_are_used_where_32_do_not_do(strides: tuple[int, ...], wide: bool) -> None:
    assert plan((2, 3, 4, 4), strides, crop=(4, 4)).specialisation.wide is wide


def test_what_a_launch_cannot_take_is_said() -> None:
    with pytest.raises(ValueError, match="at most 1073741824 pixels of a sample, asked was 32769x32769"):
        plan((1, 3, 8, 8), crop=(32769, 32769))
    single_pass = make_pass(1, 3, (8, 8), (8, 8))
    with pytest.raises(TypeError, match="uint8 or float32, these are int16"):
        plan_launch((1, 3, 8, 8), (1, 1, 1, 1), "int16", single_pass, kind="float32", channels_last=True)


def test_parameters_are_packed_in_the_order_that_the_kernel_reads() -> None:
    single_pass = make_pass(5, 3, (8, 8), (8, 8))
    packed = pack(single_pass)
    samples, levels = packed[:60].view(np.int32).reshape(5, 3), packed[60:].view(np.float32).reshape(3, 3)
    assert np.array_equal(samples.T, [single_pass.top, single_pass.left, single_pass.step])
    assert np.array_equal(levels, [single_pass.scale, single_pass.bias, single_pass.fill])


# -- the shim ----------------------------------------------------------------------------------------------------------


class Call(ctypes.Structure):
    """As in kernel_shim.cpp."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("images", "samples", "levels", "out")],
        ("strides", ctypes.c_longlong * 4),
        ("first_sample", ctypes.c_int),
        ("numbers", ctypes.c_int * 7),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the shim needs g++ on Linux")
    target = tmp_path_factory.mktemp("shim") / "kernel_shim.so"
    flags = ["-std=c++14", "-O0", "-fsanitize=undefined", "-fno-strict-aliasing", "-shared", "-fPIC"]
    shim = Path(__file__).with_name("kernel_shim.cpp")
    subprocess.run([compiler, *flags, f"-I{kernels.SOURCE.parent}", str(shim), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture
def shim(library: ctypes.CDLL, capfd: pytest.CaptureFixture[str]) -> Iterator[ctypes.CDLL]:
    """Fails a test in which the sanitizer saw overflow, a misaligned access, a shift too far."""
    yield library
    assert "runtime error" not in capfd.readouterr().err


def span(array: NumpyArray) -> tuple[int, int]:
    """The first address of an array and the one after its last, with strides of any sign."""
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    first = array.ctypes.data + sum(min(0, r) for r in reach)
    return first, array.ctypes.data + sum(max(0, r) for r in reach) + array.itemsize


def launch_on_shim(
    shim: ctypes.CDLL, launch: Launch, images: NumpyArray, single_pass: SinglePass, misaligned_by: int = 0
) -> NumpyArray:
    """The output's bits in the order of memory. Checks loads, shared memory, barriers, what lies beside the output."""
    chosen = launch.specialisation
    item = np.dtype(np.uint32 if chosen.kind == "float32" else np.uint16)
    size = images.shape[0] * images.shape[1] * single_pass.height * single_pass.width
    memory = np.full(2 * MARGIN + 16 + size * item.itemsize, POISON, np.uint8)
    begin = MARGIN + -(memory.ctypes.data + MARGIN) % 16 + misaligned_by * item.itemsize
    end = begin + size * item.itemsize
    packed = pack(single_pass)
    samples_at, levels_at = packed.ctypes.data, packed.ctypes.data + 12 * images.shape[0]
    readable = (*span(images), samples_at, levels_at, levels_at, samples_at + packed.size)
    for first, samples in launch.samples:
        call = Call(
            images.ctypes.data,
            samples_at,
            levels_at,
            memory.ctypes.data + begin,
            (ctypes.c_longlong * 4)(*launch.strides),
            first,
            (ctypes.c_int * 7)(*launch.numbers),
        )
        status = shim.launch(
            *(chosen.source == "float32", list(TORCH_DTYPES).index(chosen.kind), chosen.channels),
            *(chosen.channels_last, chosen.wide, launch.tiles, samples, launch.threads, launch.shared_bytes),
            (ctypes.c_void_p * 6)(*readable),
            ctypes.byref(call),
        )
        assert status == 0, "shared memory or barriers" if status < 0 else f"{status} loads from elsewhere"
    assert (memory[:begin] == POISON).all()
    assert (memory[end:] == POISON).all()
    return memory[begin:end].copy().view(item)


def in_order(bits: NumpyArray, shape: tuple[int, ...], channels_last: bool) -> NumpyArray:
    """Bits in the order of memory as ``(N, C, h, w)``."""
    n, c, h, w = shape
    return bits.reshape(n, h, w, c).transpose(0, 3, 1, 2) if channels_last else bits.reshape(shape)


@pytest.mark.parametrize("channels_last", [False, True], ids=["planes", "channels last"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize(
    ("channels", "kind"),
    [
        pytest.param(channels, kind, marks=[] if channels == 3 or kind == "bfloat16" else [pytest.mark.slow])
        for channels, kind in itertools.product((1, 3, 4, 5), TORCH_DTYPES)
    ],
)
def test_the_kernel_computes_what_single_pass_says(
    shim: ctypes.CDLL, channels: int, dtype: str, kind: Kind, channels_last: bool
) -> None:
    for number, (size, crop) in enumerate(SIZES):
        count = 1 if number == 1 else 3
        single_pass = make_pass(count, channels, size, crop, seed=number)
        images = make_images((count, channels, *size), dtype, seed=number)
        expected = reference(images, single_pass)
        for view in views(images, np):
            launch = plan_launch(view.shape, elements(view), dtype, single_pass, kind=kind, channels_last=channels_last)
            for misaligned_by in (0, 1):  # elements that the output's memory begins after a multiple of 16 bytes
                bits = launch_on_shim(shim, launch, view, single_pass, misaligned_by)
                assert_agrees(in_order(bits, expected.shape, channels_last), expected, kind)


@pytest.mark.parametrize("wide", [False, True])
def test_more_samples_than_a_grid_holds_take_several_launches(
    shim: ctypes.CDLL, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MAX_GRID_Y", 3)
    images, single_pass = make_images((7, 3, 6, 6), "uint8"), make_pass(7, 3, (6, 6), (5, 5))
    launch = plan_launch(images.shape, elements(images), "uint8", single_pass, kind="bfloat16", channels_last=True)
    assert launch.samples == ((0, 3), (3, 3), (6, 1))
    launch = dataclasses.replace(launch, specialisation=dataclasses.replace(launch.specialisation, wide=wide))
    expected = reference(images, single_pass)
    bits = launch_on_shim(shim, launch, images, single_pass)
    assert_agrees(in_order(bits, expected.shape, True), expected, "bfloat16")


def test_conversions_round_as_torch_does(shim: ctypes.CDLL) -> None:
    values = hard_values()
    float16, bfloat16 = np.empty(values.size, np.uint16), np.empty(values.size, np.uint16)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (values, float16, bfloat16)]
    shim.convert(pointers[0], ctypes.c_longlong(values.size), *pointers[1:])
    assert_converted(float16, values, "float16")
    assert_converted(bfloat16, values, "bfloat16")


# -- nvcc --------------------------------------------------------------------------------------------------------------

ALL_KERNELS = """
#include "single_pass.cu"
#define KERNEL(NAME, IN, OUT, COUNT, LAST, OFFSET) __global__ void NAME( \\
    const IN* images, const int* samples, const float* levels, OUT* out, long long n, long long c, long long h, \\
    long long w, int first, int channels, int in_height, int in_width, int height, int width, int rows, \\
    int columns) { \\
    make_tile<IN, OUT, COUNT, LAST, OFFSET>(images, samples, levels, out, n, c, h, w, first, channels, in_height, \\
                                            in_width, height, width, rows, columns); }
"""


def specialisations() -> list[Specialisation]:
    return [
        Specialisation(channels=channels, source=source, kind=kind, channels_last=channels_last, wide=wide)
        for channels, source, kind, channels_last, wide in itertools.product(
            (0, *kernels.CHANNEL_COUNTS), kernels.INPUTS, kernels.OUTPUTS, (False, True), (False, True)
        )
        if not (channels == 1 and channels_last)
    ]


def nvcc(*arguments: str) -> str:
    """What the compiler says; with the options of CuPy, and the oldest standard that it compiles by."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc is not on the PATH")
    common = ["-std=c++14", "-ftz=true", "-Werror=all-warnings", f"-I{kernels.SOURCE.parent}"]
    done = subprocess.run([compiler, *common, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("age", ["oldest", "sm_90"])
def test_nvcc_compiles_every_kernel(age: str, tmp_path: Path) -> None:
    """For Hopper, and for the oldest that this nvcc knows, which has not the newest one's conversions."""
    arch = re.findall(r"compute_\d+", nvcc("--list-gpu-arch"))[0] if age == "oldest" else age
    lines = [
        f"KERNEL(k{number}, {', '.join(option.partition('=')[2] for option in specialisation.options)})"
        for number, specialisation in enumerate(specialisations())
    ]
    source = tmp_path / "all.cu"
    source.write_text(ALL_KERNELS + "\n".join(lines) + "\n", encoding="utf-8")
    said = nvcc("-ptx", f"-arch={arch}", str(source), "-o", str(tmp_path / "all.ptx"))
    assert not said.strip()
    assert (tmp_path / "all.ptx").read_text().count(".entry") == len(lines)


@pytest.mark.parametrize("kind", list(TORCH_DTYPES))
@pytest.mark.parametrize("channels_last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_usual_kernels_keep_everything_in_registers(kind: Kind, channels_last: bool, tmp_path: Path) -> None:
    """48 let ten blocks of 128 threads run on a multiprocessor at once, which is what hides the loads."""
    usual = Specialisation(channels=3, source="uint8", kind=kind, channels_last=channels_last, wide=False)
    target = str(tmp_path / "kernel.cubin")
    said = nvcc("-cubin", "-arch=sm_90", "-Xptxas=-v", *usual.options, str(kernels.SOURCE), "-o", target)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None
    assert int(registers[1]) <= 48
