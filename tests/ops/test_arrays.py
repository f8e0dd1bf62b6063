"""Arrays become tensors over the same memory, and back; what cannot is refused by name."""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_accel.ops.arrays import as_tensors, numpy_as_tensor

pytestmark = pytest.mark.numbers

NATIVE = np.arange(24, dtype=np.float32).reshape(4, 6)


def locked(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        NATIVE,
        NATIVE.T,
        NATIVE[1::2, ::3],
        np.asfortranarray(NATIVE),
        locked(NATIVE),
        np.broadcast_to(NATIVE, (2, 4, 6)),
    ],
    ids=["contiguous", "transposed", "strided", "Fortran's order", "read-only", "broadcast"],
)
def test_a_numpy_array_and_its_tensor_share_memory_both_ways(array: Any) -> None:
    (tensor,), back = as_tensors("asker", x=array)
    assert tensor.data_ptr() == array.ctypes.data
    assert [stride * array.itemsize for stride in tensor.stride()] == list(array.strides)
    assert back(tensor).ctypes.data == array.ctypes.data
    assert np.array_equal(back(tensor), array)


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"])
def test_dtypes_stay(dtype: str) -> None:
    array = np.ones(3, dtype)
    (tensor,), back = as_tensors("asker", x=array)
    assert back(tensor).dtype == array.dtype
    assert tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize(
    "array",
    [
        NATIVE[::-1],
        NATIVE[:1][::-1],
        locked(NATIVE)[:, ::-1],
        NATIVE.astype(">f4"),
        np.zeros(3, [("a", "u1"), ("b", "f4")])["b"],
    ],
    ids=["backwards", "one row backwards", "backwards and read-only", "other byte order", "a field between others"],
)
def test_a_layout_that_torch_does_not_have_is_copied(array: Any) -> None:
    (tensor,), back = as_tensors("asker", x=array)
    assert tensor.data_ptr() != array.ctypes.data
    assert np.array_equal(back(tensor), array)


@pytest.mark.parametrize("scalar", [np.float64(2.5), np.array(2.5), np.int32(2)])
def test_a_scalar_of_numpy_is_a_tensor_without_dimensions(scalar: Any) -> None:
    (tensor,), _ = as_tensors("asker", x=scalar)
    assert tensor.shape == ()
    assert tensor.item() == scalar


def test_the_memory_of_a_read_only_array_outlives_it() -> None:
    tensor = numpy_as_tensor(locked(np.full(1000, 7.0)))
    gc.collect()
    _ = [np.zeros(1000) for _ in range(100)]  # would take the memory, were it free
    assert tensor.unique().tolist() == [7.0]


def test_torchs_warning_of_read_only_arrays_is_left_to_the_users_own_code() -> None:
    """Torch gives it once a process, so that one that nobody saw would be the last: not given, nor used up, here."""
    numpy_as_tensor(locked(NATIVE))
    torch.set_warn_always(True)
    try:
        numpy_as_tensor(locked(NATIVE))
    finally:
        torch.set_warn_always(False)


def test_tensors_pass_as_they_are_and_keep_their_gradients() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(2))
    tensors, back = as_tensors("asker", x=x, y=y)
    assert tensors[0] is x
    assert tensors[1] is y
    assert back(x) is x


@pytest.mark.parametrize(
    "result", [torch.ones(2, requires_grad=True) * 3, torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag]
)
def test_gradients_and_what_torch_has_put_off_do_not_keep_a_result_from_numpy(result: Tensor) -> None:
    _, back = as_tensors("asker", x=NATIVE)
    assert back(result).tolist() == result.tolist()


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strange", [[1.0, 2.0], 1.5, None, "text", np.ma.masked_array([1.0, 2.0], [True, False])])
def test_what_is_no_array_is_refused_by_its_name_and_type(strange: Any) -> None:
    with pytest.raises(TypeError, match=rf"asker\(y=...\) is of type {type(strange).__name__}. Allowed: arrays of"):
        as_tensors("asker", x=NATIVE, y=strange)


def test_arrays_of_two_libraries_are_refused_with_one_of_each() -> None:
    with pytest.raises(TypeError, match=r"asker: x of NumPy, z of torch. Give arrays of one library"):
        as_tensors("asker", x=NATIVE, y=NATIVE, z=torch.ones(2))


@pytest.mark.parametrize("dtype", ["U1", "O", "M8[s]", np.longdouble])
def test_a_dtype_that_torch_does_not_have_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"asker\(x=...\) holds .*, which torch does not have. Allowed: floating point"):
        as_tensors("asker", x=np.empty(2, dtype))


def test_tensors_of_two_devices_are_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"asker: x on cpu, y on meta. Move them to one device"):
        as_tensors("asker", x=torch.ones(2), y=torch.ones(2, device="meta"))


class SimulatedCupy:
    """An array of a module of that name, with memory of NumPy's."""

    __module__ = "cupy"

    def __init__(self, array: Any) -> None:
        self._array = array
        self.dtype, self.itemsize, self.strides = array.dtype, array.itemsize, array.strides

    def copy(self) -> SimulatedCupy:
        return SimulatedCupy(self._array.copy())

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        assert min(self.strides) >= 0, "torch would end the process"
        return self._array.__dlpack__(**options)


def test_simulated_an_array_of_cupy_becomes_a_tensor_of_the_same_memory() -> None:
    (tensor,), _ = as_tensors("asker", x=SimulatedCupy(NATIVE.T))
    assert (tensor.data_ptr(), tensor.stride()) == (NATIVE.ctypes.data, (1, 6))


def test_simulated_an_array_of_cupy_that_runs_backwards_is_copied() -> None:
    (tensor,), _ = as_tensors("asker", x=SimulatedCupy(NATIVE[:, ::-1]))
    assert tensor.tolist() == NATIVE[:, ::-1].tolist()


def test_simulated_an_array_of_cupy_that_torch_cannot_share_is_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match=r"asker\(x=...\) is a CuPy array of object that torch .* cannot share \(.+\)"):
        as_tensors("asker", x=SimulatedCupy(np.array([None])))


def test_cupy_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # an import of it fails
    tensors, back = as_tensors("asker", x=NATIVE)
    assert np.array_equal(back(tensors[0]), NATIVE)
    with pytest.raises(TypeError, match="of type SimpleNamespace"):
        as_tensors("asker", x=types.SimpleNamespace())
