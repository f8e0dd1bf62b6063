"""Tensors and arrays share memory; what CuPy lacks is said with the mend; on a GPU CuPy is a guest of torch's."""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_accel import data
from lightning_accel.data import Map, Position, Preprocess, Transform, tensor_arrays
from lightning_accel.data.tensor_arrays import CupyArrays, NumpyArrays, why_no_cupy, writable

pytestmark = pytest.mark.numbers

CUDA = torch.device("cuda", 0)


# -- NumPy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float16, torch.float64, torch.complex64])
def test_a_tensor_is_an_array_of_the_same_memory_and_back(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 6, dtype=dtype)[1:, ::2]
    array = NumpyArrays().array(tensor)
    assert array.ctypes.data == tensor.data_ptr()
    back = NumpyArrays().tensor(array)
    assert (back.data_ptr(), back.stride(), back.dtype) == (tensor.data_ptr(), tensor.stride(), dtype)


@pytest.mark.parametrize(
    "tensor", [torch.rand(3, requires_grad=True) * 2, torch.tensor([1 + 2j]).conj(), torch.tensor(3)]
)
def test_gradients_and_conjugations_put_off_are_no_obstacle(tensor: torch.Tensor) -> None:
    assert NumpyArrays().array(tensor).tolist() == tensor.tolist()


def test_bfloat16_is_read_as_float32() -> None:
    tensor = torch.tensor([1.0, 3.140625]).bfloat16()
    array = NumpyArrays().array(tensor)
    assert array.dtype == np.float32
    assert array.tolist() == tensor.tolist()


def test_bfloat16_is_written_as_its_bits() -> None:
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    writable(NumpyArrays(), tensor)[:] = [0x3F80, 0xC000]
    assert tensor.tolist() == [1.0, -2.0]


def locked(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0)[::-1],
        locked(np.arange(6.0)),
        np.broadcast_to(np.float32(2), (3, 2)),
        np.zeros(3, [("a", "u1"), ("b", "f4")])["b"],
        np.arange(6, dtype=np.dtype("f8").newbyteorder()),
    ],
    ids=["backwards", "read-only", "broadcast", "field", "other byte order"],
)
def test_an_array_that_torch_cannot_share_is_copied(array: Any) -> None:
    tensor = NumpyArrays().tensor(array)
    assert tensor.tolist() == array.tolist()
    tensor[0] = 7
    assert tensor[0].unique().tolist() == [7]


# -- why there is no CuPy ----------------------------------------------------------------------------------------------


class CompileError(Exception):
    """As of CuPy's compiler."""


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    tensor_arrays._why_no_cupy.cache_clear()
    yield
    tensor_arrays._why_no_cupy.cache_clear()


@pytest.fixture
def simulated_cupy(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A module in CuPy's place, and a torch for CUDA 12: nothing of it computes, unless a test says so."""

    def fails(*arguments: Any) -> Any:
        raise CompileError(f"{simulated.error}\nmore of it")

    simulated = types.SimpleNamespace(error="nvrtc: error: invalid value for --gpu-architecture", built=12040)
    module = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: simulated.built)
    module.cuda = types.SimpleNamespace(runtime=runtime, PythonFunctionAllocator=fails)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    return simulated


def without_cupy(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails() -> Any:
        raise error

    monkeypatch.setattr(tensor_arrays, "_cupy", fails)


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_on_other_devices_cupy_has_no_business(device: str) -> None:
    assert why_no_cupy(torch.device(device)) == f"CuPy computes on CUDA devices, and this is {device}"


@pytest.mark.parametrize(("version", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_without_cupy_the_extra_for_torch_s_cuda_is_named(
    simulated_cupy: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: str, extra: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    without_cupy(monkeypatch, ModuleNotFoundError("No module named 'cupy'", name="cupy"))
    assert why_no_cupy(CUDA) == f"CuPy is not installed: pip install 'lightning-accel[{extra}]'"


def test_a_cupy_whose_libraries_are_missing_is_answered_with_what_is_missing(
    simulated_cupy: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy frames its message in rules, and says only in its middle what happened."""
    rule = "=" * 64
    message = f"\n{rule}\nFailed to import CuPy.\n\nIf you installed CuPy via wheels, ...\n\nOriginal error:\n"
    message += f"  ImportError: libnvrtc.so.11.2: cannot open shared object file\n{rule}\n"
    without_cupy(monkeypatch, ImportError(message))
    reason = why_no_cupy(CUDA)
    assert reason is not None
    assert "libnvrtc.so.11.2" in reason
    assert "===" not in reason
    assert "\n" not in reason
    assert reason.endswith("pip install 'lightning-accel[cuda12]'")


def test_a_module_that_cupy_misses_is_said_and_does_not_end_the_run(
    simulated_cupy: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cupy(monkeypatch, ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"))
    reason = why_no_cupy(CUDA)
    assert reason is not None
    assert "fastrlock" in reason


def test_a_cupy_for_another_cuda_is_answered_with_both_and_the_exchange(simulated_cupy: types.SimpleNamespace) -> None:
    simulated_cupy.built = 11080
    assert why_no_cupy(CUDA) == (
        "this CuPy was built for CUDA 11 and torch for CUDA 12 (nvrtc: error: invalid value for --gpu-architecture):"
        " pip uninstall cupy-cuda11x, then pip install 'lightning-accel[cuda12]'"
    )


def test_a_cupy_that_cannot_compile_is_answered_with_its_error(simulated_cupy: types.SimpleNamespace) -> None:
    assert why_no_cupy(CUDA) == (
        "CuPy does not work on this device (CompileError: nvrtc: error: invalid value for --gpu-architecture):"
        " reinstall cupy-cuda12x"
    )


@pytest.mark.parametrize(("factor", "reason"), [(2, None), (3, "CuPy computes wrong numbers on this device")])
def test_a_cupy_is_judged_by_what_it_computes(
    simulated_cupy: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, factor: int, reason: str | None
) -> None:
    class Simulated(NumpyArrays):
        def __init__(self, device: torch.device) -> None:
            pass

        def array(self, tensor: torch.Tensor) -> Any:
            return super().array(tensor) * factor // 2

    monkeypatch.setattr(tensor_arrays, "CupyArrays", Simulated)
    monkeypatch.setattr(torch, "arange", lambda count, device: torch.tensor(range(count)))
    assert (why_no_cupy(CUDA) or "").startswith(reason or "")
    assert (why_no_cupy(CUDA) is None) == (reason is None)


def test_it_is_tried_once_a_device(simulated_cupy: types.SimpleNamespace) -> None:
    first = why_no_cupy(CUDA)
    simulated_cupy.error = "another"
    assert why_no_cupy(CUDA) == why_no_cupy(torch.device("cuda")) == first
    assert "another" in (why_no_cupy(torch.device("cuda", 1)) or "")


def test_without_cupy_the_chain_runs_on_the_host_and_says_why(simulated_cupy: types.SimpleNamespace) -> None:
    chain = Preprocess([data.Normalize(0.5, 0.5)], device="cuda")
    assert chain.on_host
    assert chain.complaint == why_no_cupy(CUDA)
    assert chain.describe() == "Normalize with NumPy on the host, before the transfer"
    assert chain(torch.ones(1, 3, 2, 2)).unique().tolist() == [1.0]


@pytest.mark.parametrize("version", [13, 14])
def test_cupy_is_on_torchs_stream_without_a_warning_of_its_own(
    simulated_cupy: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """CuPy 14 takes the stream itself, and warns of ``ExternalStream``."""
    given: list[Any] = []

    def external(pointer: int, device: int) -> Any:
        if version > 13:
            warnings.warn("ExternalStream is deprecated", DeprecationWarning, stacklevel=2)
        given.append(pointer)
        return contextlib.nullcontext()

    def from_external(stream: Any) -> Any:
        given.append(stream.__cuda_stream__()[1])
        return contextlib.nullcontext()

    stream = types.SimpleNamespace(cuda_stream=7, device_index=0, __cuda_stream__=lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    vars(sys.modules["cupy"].cuda).update(
        Device=contextlib.nullcontext,
        ExternalStream=external,
        PythonFunctionAllocator=lambda *functions: types.SimpleNamespace(malloc=None),
        Stream=types.SimpleNamespace(**{"from_external": from_external} if version > 13 else {}),
        using_allocator=contextlib.nullcontext,
    )
    with CupyArrays(CUDA).running():
        assert given == [7]


# -- CuPy, on a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.gpu
@pytest.mark.needs_kernels("CuPy")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64])
def test_on_a_gpu_pointers_are_equal_both_ways(cupy: Any, dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 6, device=CUDA, dtype=dtype)[1:, ::2]
    on_gpu = CupyArrays(CUDA)
    with on_gpu.running():
        array = on_gpu.array(tensor)
        assert array.data.ptr == tensor.data_ptr()
        for part, expected in ((array, tensor), (array[1:], tensor[1:]), (array.T, tensor.T)):
            back = on_gpu.tensor(part)
            assert (back.data_ptr(), back.stride(), back.dtype) == (expected.data_ptr(), expected.stride(), dtype)


def names(transforms: list[Any]) -> str:
    return "-".join(type(transform).__name__ for transform in transforms)


EVERY_KIND: list[list[Transform]] = [
    [data.Normalize((0.4, 0.5, 0.6), 0.25)],
    [data.RandomCrop(12, padding=2)],
    [data.RandomHorizontalFlip()],
    [data.RandomResizedCrop(10)],
    [data.ColorJitter(0.4, 0.4, 0.4, 0.2)],
    [data.RandomErasing()],
    [data.CutMix(1.0, 10)],
    [data.RandomCrop(12, padding=2), data.RandomHorizontalFlip(), data.Normalize(0.5, 0.25)],
    [data.Normalize(0.5, 0.25), data.MixUp(0.4, 10)],
    [data.Normalize(0.5, 0.25), data.GaussianNoise(0.1)],
    [data.Normalize(0.5, 0.25), data.GaussianNoise(cov=np.eye(3) + 0.5)],
    [data.Normalize(0.5, 0.25), data.Whiten(np.ones(3), np.eye(3) + 0.5)],
    [data.Normalize(0.5, 0.25), data.SlidingWindow(2)],
    [Map(lambda xp, batch: (xp.flip(batch[0], 1), batch[1]))],
]


@pytest.mark.gpu
@pytest.mark.needs_kernels("CuPy")
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("transforms", EVERY_KIND, ids=names)
def test_on_a_gpu_every_transform_gives_what_numpy_gives(cupy: Any, transforms: list[Transform], fuse: bool) -> None:
    batch = torch.randint(0, 256, (6, 3, 16, 14), dtype=torch.uint8), torch.arange(6)
    for position in (Position(batch_idx=3), Position(training=False)):
        expected = Preprocess(transforms, seed=1, fuse=fuse)(batch, position)
        actual = Preprocess(transforms, seed=1, fuse=fuse, device=CUDA)([part.to(CUDA) for part in batch], position)
        for one, other in zip(actual, expected, strict=True):
            assert (one.device, one.dtype, one.shape) == (CUDA, other.dtype, other.shape)
            within = 1 if one.dtype == torch.uint8 else 1e-4  # uint8 may be rounded to either side
            torch.testing.assert_close(one.cpu().double(), other.double(), atol=within, rtol=0)


@pytest.mark.gpu
@pytest.mark.needs_kernels("CuPy")
def test_on_a_gpu_cupy_s_memory_is_torch_s_and_its_stream_torch_s_current_one(cupy: Any) -> None:
    seen: dict[str, int] = {}

    def look(xp: Any, images: Any) -> Any:
        before = torch.cuda.memory_allocated(CUDA)
        room = xp.empty(1 << 22, np.uint8)
        seen.update(taken=torch.cuda.memory_allocated(CUDA) - before, stream=xp.cuda.get_current_stream().ptr)
        del room
        seen["kept"] = torch.cuda.memory_allocated(CUDA) - before
        return images

    images, stream = torch.rand(2, 3, 4, 4, device=CUDA), torch.cuda.Stream(CUDA)
    pool = cupy.get_default_memory_pool().total_bytes()
    with torch.cuda.stream(stream):
        Preprocess([Map(look)], device=CUDA)(images)
    assert seen["taken"] >= 1 << 22
    assert seen["kept"] == 0
    assert seen["stream"] == stream.cuda_stream
    assert cupy.get_default_memory_pool().total_bytes() == pool


@pytest.mark.gpu
@pytest.mark.needs_kernels("CuPy")
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_on_a_gpu_cupy_s_own_allocator_stream_and_device_are_restored(cupy: Any, error: Any) -> None:
    def fail(xp: Any, images: Any) -> Any:
        if error:
            raise error
        return images

    def settings() -> tuple[Any, ...]:
        return cupy.cuda.get_allocator(), cupy.cuda.get_current_stream().ptr, cupy.cuda.Device().id

    before = settings()
    with contextlib.suppress(ZeroDivisionError), torch.cuda.stream(torch.cuda.Stream(CUDA)):
        Preprocess([Map(fail)], device=CUDA)(torch.rand(2, 3, 4, 4, device=CUDA))
    assert settings() == before


@pytest.mark.gpu
@pytest.mark.needs_kernels("CuPy")
@pytest.mark.parametrize("transforms", EVERY_KIND, ids=names)
def test_on_a_gpu_nothing_waits_for_the_device(cupy: Any, transforms: list[Transform]) -> None:
    """Torch raises at its own waits; for CuPy's, the stream is kept busy, and has to be so afterwards."""
    chain = Preprocess(transforms, seed=0, device=CUDA)
    batch = torch.randint(0, 256, (6, 3, 16, 14), dtype=torch.uint8, device=CUDA), torch.arange(6, device=CUDA)
    for _ in range(2):
        chain(batch)  # compiles, and fills torch's caches
    torch.cuda.synchronize(CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second
        chain(batch)
        assert not torch.cuda.current_stream(CUDA).query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize(CUDA)


@pytest.mark.gpu
@pytest.mark.needs_kernels("CuPy")
@pytest.mark.parametrize("transforms", EVERY_KIND, ids=names)
def test_on_a_gpu_results_are_torch_s_own_tensors_and_outlive_the_chain(cupy: Any, transforms: list[Transform]) -> None:
    batch = torch.randint(0, 256, (6, 3, 16, 14), dtype=torch.uint8, device=CUDA), torch.arange(6, device=CUDA)
    chain = Preprocess(transforms, seed=0, device=CUDA)
    images = chain(batch)[0]
    copy, size = images.clone(), images.untyped_storage().nbytes()
    shares = images.untyped_storage().data_ptr() == batch[0].untyped_storage().data_ptr()
    del chain
    for _ in range(50):  # whatever was given back too early would be overwritten
        torch.full_like(copy, 3)
    assert torch.equal(images, copy)
    images.record_stream(torch.cuda.Stream(CUDA))
    torch.cuda.synchronize(CUDA)
    held = torch.cuda.memory_allocated(CUDA)
    del images
    torch.cuda.synchronize(CUDA)
    torch.empty(1, device=CUDA)  # makes the allocator look at recorded streams
    assert shares or held - torch.cuda.memory_allocated(CUDA) >= size
