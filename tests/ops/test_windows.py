"""Windows are views of what slices would copy; what does not fit is refused by its numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_accel.ops.sliding import windows
from support.array_cases import LAYOUTS, LIBRARIES, numbers

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.numbers


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_windows_are_what_slices_give(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[axis] = max(shape[axis], 1)
    size, step = data.draw(st.integers(1, shape[axis])), data.draw(st.integers(1, 4))
    array = LAYOUTS[data.draw(st.sampled_from(list(LAYOUTS)))](numbers(*shape))
    starts = range(0, shape[axis] - size + 1, step)
    rows = [np.moveaxis(array, axis, 0)[start : start + size] for start in starts]
    expected = np.moveaxis(np.moveaxis(np.stack(rows), 1, -1), 0, axis % len(shape))
    found = windows(array, size, step, axis)
    assert np.array_equal(found, expected)
    assert found.shape == windows(torch.from_numpy(array.copy()), size, step, axis).shape


@pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)
def test_nothing_is_copied(make: Any) -> None:
    array = numbers(3, 1000)
    found = windows(make(array), 20)
    pointer = found.data_ptr() if isinstance(found, Tensor) else found.ctypes.data
    assert pointer == array.ctypes.data
    assert found.shape == (3, 981, 20)
    array[1, 21] = 7
    assert found[1, 2, 19] == found[1, 21, 0] == 7


def test_the_view_of_a_numpy_array_is_read_only_and_the_array_is_not() -> None:
    array = numbers(6)
    found = windows(array, 3)
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0] = 1
    assert array.flags.writeable


@pytest.mark.parametrize("dtype", ["S3", "M8[s]", ">f8", [("a", "u1"), ("b", "f4")]])
def test_windows_of_dtypes_that_torch_does_not_have(dtype: Any) -> None:
    array = np.zeros(5, dtype)
    assert windows(array, 2).dtype == array.dtype
    assert np.shares_memory(windows(array, 2), array)


def test_gradients_add_up_over_windows() -> None:
    x = torch.ones(2, 5, requires_grad=True)
    windows(x, 3, axis=1).sum().backward()
    assert x.grad is not None
    assert x.grad[0].tolist() == [1, 2, 3, 2, 1]


@pytest.mark.parametrize("size", [0, -1, 21])
def test_a_window_that_does_not_fit_is_refused_with_its_size_and_the_axis_length(size: int) -> None:
    x, message = numbers(4, 20), rf"size={size}\): axis 1 of shape \(4, 20\) has length 20. Allowed: 1 up to that"
    for array in (x, torch.from_numpy(x)):
        with pytest.raises(ValueError, match=message):
            windows(array, size, axis=1)


@pytest.mark.parametrize("step", [0, -2])
def test_a_step_that_does_not_advance_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=rf"windows\(step={step}\) of an axis of length 20. Allowed: 1 or more"):
        windows(numbers(20), 3, step)


@pytest.mark.parametrize(
    ("shape", "axis", "allowed"), [((4, 20), 2, "from -2 up to 1"), ((4, 20), -3, "from -2 up to 1")]
)
def test_an_axis_that_there_is_not_is_refused(shape: tuple[int, ...], axis: int, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"windows\(axis={axis}\).*{allowed}"):
        windows(numbers(*shape), 1, axis=axis)


@pytest.mark.parametrize("value", [2.0, "2", True, None])
def test_numbers_that_are_no_integers_are_refused(value: Any) -> None:
    for name in ("size", "step", "axis"):
        with pytest.raises(TypeError, match=rf"windows\({name}=.*of type {type(value).__name__}. Allowed: an integer"):
            windows(numbers(4, 20), **{"size": 2, name: value})


def test_integers_of_numpy_will_do() -> None:
    assert windows(numbers(4, 20), np.int64(3), np.int32(2), np.int8(0)).shape == (1, 20, 3)


def test_what_is_no_array_has_no_windows() -> None:
    with pytest.raises(TypeError, match=r"windows\(x=...\) is of type list"):
        windows([1, 2, 3], 2)


@pytest.mark.parametrize("x", [np.arange(4.0), torch.arange(4.0)])
def test_steps_beyond_every_stride_leave_one_window(x: Any) -> None:
    assert windows(x, 3, step=2**70).tolist() == [[0, 1, 2]]


def test_what_has_no_axes_and_what_has_no_views_is_refused() -> None:
    with pytest.raises(ValueError, match="has no axes"):
        windows(torch.tensor(3.0), 1)
    with pytest.raises(TypeError, match=r"layout torch.sparse_coo, which has no views"):
        windows(torch.ones(3).to_sparse(), 1)
