"""Which errors mean that there was no memory left."""

from __future__ import annotations

import pytest
import torch

from lightning_accel.core.oom_errors import asked_bytes, is_out_of_memory, without_frames

LACKING = {
    "torch on a GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total …"),
    "torch on a CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "the driver": RuntimeError("CUDA error: out of memory"),
    "Python or NumPy": MemoryError("Unable to allocate 8.00 GiB for an array"),
}


@pytest.mark.parametrize("error", LACKING.values(), ids=LACKING)
def test_a_lack_of_memory_is_known_whoever_says_it(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [ValueError("can't allocate memory"), RuntimeError("shapes do not fit"), OSError(12, "out of memory")]
)
def test_other_errors_are_not_taken_for_one(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_what_torchs_own_allocator_raises_is_known_with_what_was_asked_for() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert asked_bytes(raised.value) == 1 << 60


def test_a_gpus_allocator_writes_units() -> None:
    assert asked_bytes(LACKING["torch on a GPU"]) == 5 << 29
    assert asked_bytes(LACKING["cuDNN"]) is None


def test_an_error_without_frames_holds_nothing_that_they_held() -> None:
    def fail() -> None:
        try:
            raise KeyError
        except KeyError:
            raise RuntimeError("no memory") from None

    with pytest.raises(RuntimeError) as raised:
        fail()
    error = without_frames(raised.value)
    assert (error.__traceback__, error.__context__, error.__cause__) == (None, None, None)
