"""Products of windows are one product and a view of it, with the numbers of a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_accel.ops.sliding import batched_matmul, sliding_matmul
from support.array_cases import LAYOUTS, LIBRARIES, Calls, numbers

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.numbers


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_products_are_those_of_a_loop(data: st.DataObject) -> None:
    m, k, t = (data.draw(st.integers(low, 6)) for low in (0, 0, 1))
    window = data.draw(st.integers(1, t))
    lead_a, lead_b = data.draw(st.sampled_from([((), ()), ((2,), (2,)), ((3, 1), (2,)), ((), (2,)), ((2,), ())]))
    a = LAYOUTS[data.draw(st.sampled_from(list(LAYOUTS)))](numbers(*lead_a, m, k))
    b = LAYOUTS[data.draw(st.sampled_from(list(LAYOUTS)))](numbers(*lead_b, k, t))
    materialize = data.draw(st.booleans())
    found = sliding_matmul(a, b, window, materialize=materialize)
    expected = np.stack([a @ b[..., i : i + window] for i in range(t - window + 1)], axis=-3)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("f2", 4e-3), ("f4", 1e-6), ("f8", 1e-14), ("c8", 1e-6), ("c16", 1e-14), ("i4", 0), ("i8", 0), ("u1", 0)],
)
@pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)
def test_dtypes_stay_and_are_as_exact_as_they_can_be(make: Any, dtype: str, tolerance: float) -> None:
    a, b = (numbers(3, 8), numbers(8, 9)) if dtype[0] in "fc" else (np.random.randint(0, 5, (3, 8)), np.ones((8, 9)))
    if dtype[0] == "c":
        a = a + 1j * a[::-1]
    a, b = a.astype(dtype), b.astype(dtype)
    found = sliding_matmul(make(a), make(b), 4)
    assert found.dtype == make(a).dtype
    wide = np.complex128 if dtype[0] == "c" else np.float64
    expected = np.stack([a.astype(wide) @ b.astype(wide)[:, i : i + 4] for i in range(6)])
    np.testing.assert_allclose(np.asarray(found), expected, atol=tolerance * np.abs(expected).max())


def test_bfloat16_stays() -> None:
    a, b = torch.randn(3, 8).bfloat16(), torch.randn(8, 9).bfloat16()
    found = sliding_matmul(a, b, 4)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found[5].double(), a.double() @ b[:, 5:].double(), rtol=1e-2, atol=1e-2)


def test_it_is_one_product_and_takes_no_more_memory_than_that() -> None:
    a, b = torch.randn(10, 20), torch.randn(20, 1000)
    with Calls() as calls:
        found = sliding_matmul(a, b, 20)
    assert found.shape == (981, 10, 20)
    assert found.untyped_storage().nbytes() == 10 * 1000 * 4
    assert calls.names.count("mm") == 1
    assert set(calls.names) <= {"mm", "unfold", "transpose"}


def test_the_view_of_numpy_lies_in_a_product_and_is_read_only() -> None:
    found = sliding_matmul(numbers(10, 20), numbers(20, 1000), 20)
    low, high = np.lib.array_utils.byte_bounds(found) if hasattr(np.lib, "array_utils") else np.byte_bounds(found)
    assert high - low == 10 * 1000 * 8
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0, 0] = 1


@pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("window", [1, 4, 9])
def test_materialized_it_may_be_written_to(make: Any, window: int) -> None:
    a, b = make(numbers(3, 8)), make(numbers(8, 9))
    found, untouched = (sliding_matmul(a, b, window, materialize=True) for _ in range(2))
    found[0] = 7
    assert (found[0] == 7).all()
    assert (found[1:] == untouched[1:]).all()


def test_what_goes_in_is_not_changed_by_writing_to_what_comes_out() -> None:
    a, b = np.eye(3), numbers(3, 5)
    before = b.copy()
    sliding_matmul(a, b, 5, materialize=True)[...] = 7
    assert np.array_equal(b, before)


@pytest.mark.parametrize("materialize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_its_gradients_are_right(dtype: torch.dtype, materialize: bool) -> None:
    a = torch.randn(2, 3, 2, dtype=dtype, requires_grad=True)
    b = torch.randn(2, 5, dtype=dtype, requires_grad=True)

    def products(a: Tensor, b: Tensor) -> Tensor:
        return sliding_matmul(a, b, 3, materialize=materialize)

    assert torch.autograd.gradcheck(products, (a, b))
    assert torch.autograd.gradgradcheck(products, (a, b))


def test_it_compiles_without_a_break() -> None:
    compiled: Any = torch.compile(lambda a, b: sliding_matmul(a, b, 4), fullgraph=True, backend="eager")
    a, b = torch.randn(3, 8), torch.randn(8, 9)
    assert torch.equal(compiled(a, b), sliding_matmul(a, b, 4))
    torch.compiler.reset()


def test_autocast_computes_tensors_in_half_precision_and_numpys_arrays_in_their_own() -> None:
    a, b = numbers(3, 8, dtype=np.float32), numbers(8, 9, dtype=np.float32)
    outside = sliding_matmul(a, b, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = sliding_matmul(torch.from_numpy(a), torch.from_numpy(b).bfloat16(), 4)
        assert found.dtype == torch.bfloat16
        assert np.array_equal(sliding_matmul(a, b, 4), outside)


@pytest.mark.parametrize(
    ("shape_a", "shape_b"), [((3, 4), (5, 6)), ((4,), (4, 6)), ((3, 4), (4,)), ((2, 3, 4), (3, 4, 6)), ((3, 0), (1, 6))]
)
@pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)
def test_shapes_without_a_product_are_refused_with_both(
    make: Any, shape_a: tuple[int, ...], shape_b: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="sliding_matmul: no product of a of shape") as caught:
        sliding_matmul(make(numbers(*shape_a)), make(numbers(*shape_b)), 2)
    assert f"{shape_a} and b of shape {shape_b}" in str(caught.value)


@pytest.mark.parametrize("window", [0, -3, 10])
def test_a_window_that_does_not_fit_the_product_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=rf"sliding_matmul\(window={window}\): axis -1 of shape \(8, 9\) has length 9"):
        sliding_matmul(numbers(3, 8), numbers(8, 9), window)


def test_without_columns_there_is_no_window() -> None:
    with pytest.raises(ValueError, match=r"axis -1 of shape \(8, 0\) has length 0"):
        sliding_matmul(numbers(3, 8), numbers(8, 0), 1)


def test_two_libraries_are_refused() -> None:
    with pytest.raises(TypeError, match="sliding_matmul: a of NumPy, b of torch"):
        sliding_matmul(numbers(3, 8), torch.ones(8, 9), 2)


@pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("multiply", [lambda a, b: sliding_matmul(a, b, 2), lambda a, b: batched_matmul([(a, b)])])
@pytest.mark.parametrize(
    ("dtypes", "message"),
    [(("f4", "f8"), "float32, b of .*float64. Convert one"), (("?", "?"), "hold booleans. Convert them")],
)
def test_dtypes_without_a_product_are_refused(multiply: Any, make: Any, dtypes: Any, message: str) -> None:
    a, b = (make(np.ones(shape, dtype)) for shape, dtype in zip(((3, 8), (8, 9)), dtypes, strict=True))
    with pytest.raises(TypeError, match=message):
        multiply(a, b)


@pytest.mark.parametrize("multiply", [lambda a, b: sliding_matmul(a, b, 2), lambda a, b: batched_matmul([(a, b)])])
def test_a_dtype_that_torch_does_not_multiply_is_refused_with_those_that_it_does(multiply: Any) -> None:
    a, b = torch.ones(3, 8, dtype=torch.uint16), torch.ones(8, 9, dtype=torch.uint16)
    with pytest.raises(TypeError, match=r"no product of torch.uint16 on cpu .* Allowed: floating point and complex"):
        multiply(a, b)
