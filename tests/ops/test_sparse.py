"""Sparse arrays of dense ones: the same as the libraries' own, found piece by piece."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_accel.memory.meter import meter_for
from lightning_accel.ops import nonzeros
from lightning_accel.ops.sparse import density, sparse_relu, to_coo, to_csr
from support.array_cases import LAYOUTS

pytest.importorskip("hypothesis")
pytest.importorskip("scipy")

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

pytestmark = pytest.mark.numbers

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128)
AWKWARD = np.array([0.0, 0.0, -0.0, 1.5, -2.0, np.nan, np.inf, -np.inf, 6e-8])


def torch_csr(x: Tensor) -> Tensor:
    return x.to_sparse_csr()


def torch_coo(x: Tensor) -> Tensor:
    return x.to_sparse()


def parts(x: Tensor) -> list[Tensor]:
    """Indices and values."""
    if x.layout == torch.sparse_csr:
        return [x.crow_indices(), x.col_indices(), x.values()]
    return [x.indices(), x.values()]


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, but for what a NaN carries."""
    assert (found.layout, found.shape) == (expected.layout, expected.shape)
    for part, other in zip(parts(found), parts(expected), strict=True):
        torch.testing.assert_close(part, other, rtol=0, atol=0, equal_nan=True)


@contextmanager
def pieces_of(size: int) -> Iterator[None]:
    """So that a few elements are several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonzeros, "_HOST_PIECE", size)
        patch.setattr(nonzeros, "_DEVICE_PIECE", size)
        yield


@st.composite
def matrices(draw: st.DrawFn) -> Any:
    """(M, N) of NumPy, float64, with every special value, in any layout."""
    shape = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    values = np.random.default_rng(draw(st.integers(0, 99))).choice(AWKWARD, shape)
    return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](values)


PIECES = st.sampled_from([1, 3, 8, 1 << 18])  # of less than a row, of several rows with a rest, of everything


# -- the same as the libraries' own ------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(x=matrices(), size=PIECES)
def test_numpy_arrays_become_what_scipy_makes_of_them(x: Any, size: int) -> None:
    with pieces_of(size):
        csr, coo = to_csr(x), to_coo(x)
    expected = sparse.csr_array(x)
    csr.check_format(full_check=True)
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(csr, name), getattr(expected, name))
    np.testing.assert_array_equal(coo.toarray(), np.where(x == 0, 0.0, x))
    assert (type(csr), type(coo)) == (sparse.csr_array, sparse.coo_array)
    assert csr.has_canonical_format
    assert coo.has_canonical_format
    assert csr.indices.dtype == csr.indptr.dtype == coo.row.dtype == coo.col.dtype == np.int32


@settings(max_examples=40, deadline=None)
@given(x=matrices(), dtype=st.sampled_from(FLOATS + OTHERS), size=PIECES)
def test_tensors_become_what_torch_makes_of_them(x: Any, dtype: torch.dtype, size: int) -> None:
    tensor = as_tensor(x, dtype)
    with pieces_of(size):
        csr, coo = to_csr(tensor), to_coo(tensor)
    assert coo.is_coalesced()
    assert_same(csr, torch_csr(tensor))
    assert_same(coo, torch_coo(tensor))


@settings(max_examples=40, deadline=None)
@given(x=matrices(), dtype=st.sampled_from((*FLOATS, torch.uint8, torch.int64)), size=PIECES)
def test_a_sparse_relu_is_a_relu_made_sparse(x: Any, dtype: torch.dtype, size: int) -> None:
    tensor = as_tensor(x, dtype)
    with pieces_of(size):
        csr, coo = sparse_relu(tensor), sparse_relu(tensor, layout="coo")
    assert_same(csr, torch_csr(torch.relu(tensor)))
    assert_same(coo, torch_coo(torch.relu(tensor)))


@settings(max_examples=25, deadline=None)
@given(x=matrices(), dtype=st.sampled_from((*FLOATS, torch.int32)), size=PIECES)
def test_the_kernels_of_a_gpu_find_the_same(x: Any, dtype: torch.dtype, size: int) -> None:
    """On a CPU, which is told that it is none."""
    tensor = as_tensor(x, dtype)
    with pieces_of(size), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "is_cpu", False)
        csr, coo, share = sparse_relu(tensor), to_coo(tensor), density(tensor)
    assert_same(csr, torch_csr(torch.relu(tensor)))
    assert_same(coo, torch_coo(tensor))
    assert share == density(tensor)


def as_tensor(x: Any, dtype: torch.dtype) -> Tensor:
    """In the same layout, where torch has it; whole numbers where the dtype has no others."""
    if not dtype.is_floating_point:
        x = np.nan_to_num(x, posinf=3, neginf=-3)
    return torch.from_numpy(x if min(x.strides) > 0 else x.copy()).to(dtype)


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3, 4), (2, 0, 3), (1, 2, 1, 5)])
def test_coordinates_have_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    for x in (torch.randn(shape), torch.zeros(shape), torch.randn(shape).movedim(0, -1) if shape else torch.ones(())):
        with pieces_of(4):
            assert_same(to_coo(x), torch_coo(x))
        if x.dim() > 0:
            found = to_coo(x.numpy())
            assert found.shape == x.shape
            np.testing.assert_array_equal(found.toarray(), x.numpy())


def test_images_in_channels_last_keep_their_order() -> None:
    x = torch.relu(torch.randn(2, 3, 4, 5)).to(memory_format=torch.channels_last)
    with pieces_of(7):
        assert_same(to_coo(x), torch_coo(x))


def test_a_conjugated_view_is_converted_as_it_reads() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    assert_same(to_csr(x.conj()), torch_csr(x.conj().resolve_conj()))
    assert_same(sparse_relu(x.conj().imag), torch_csr(torch.relu(-x.imag)))


def test_indices_of_scipy_are_wide_where_narrow_ones_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonzeros, "_MOST_NARROW", 3)
    entries = {
        size: nonzeros.collect(torch.ones(size, size), "nonzero", compress_rows=True, narrow=True) for size in (1, 2)
    }
    assert entries[1].indices.dtype == torch.int32
    assert entries[2].indices.dtype == torch.int64  # four values


# -- gradients ---------------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Tensor], Tensor]] = {
    "to_dense": lambda y: y.to_dense().square().sum(),
    "to_dense, unmasked": lambda y: y.to_dense(masked_grad=False).exp().sum(),
    "sparse.mm": lambda y: torch.sparse.mm(y, WEIGHT).square().sum(),
    "matmul": lambda y: (y @ WEIGHT).square().sum(),
    "sum": lambda y: y.sum(),
    "values": lambda y: y.values().square().sum(),
    "product": lambda y: (y * y).to_dense().sum(),
    "sum of two": lambda y: (y + y).to_dense().square().sum(),
    "transposed": lambda y: y.t().to_dense().square().sum(),
}
WEIGHT = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
CONVERSIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "to_csr": (to_csr, torch_csr),
    "to_coo": (to_coo, torch_coo),
    "ReLU, csr": (sparse_relu, lambda x: torch_csr(torch.relu(x))),
    "ReLU, coo": (lambda x: sparse_relu(x, "coo"), lambda x: torch_coo(torch.relu(x))),
}


def half_zeros() -> Tensor:
    x = torch.randn(4, 5, dtype=torch.float64)
    return x.masked_fill_(torch.rand(4, 5) < 0.5, 0.0).requires_grad_()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(("ours", "torchs"), CONVERSIONS.values(), ids=CONVERSIONS)
def test_gradients_are_torchs_whatever_becomes_of_the_result(
    ours: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor], use: Callable[[Tensor], Tensor]
) -> None:
    x = half_zeros()
    (found,) = torch.autograd.grad(use(ours(x)), x)
    (expected,) = torch.autograd.grad(use(torchs(x)), x)
    assert found.layout == torch.strided
    torch.testing.assert_close(found, expected.to_dense())


@pytest.mark.parametrize("convert", [ours for ours, _ in CONVERSIONS.values()], ids=CONVERSIONS)
def test_gradients_are_those_of_finite_differences_also_a_second_time(convert: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: convert(x).to_dense(), x)
    assert torch.autograd.gradgradcheck(lambda x: convert(x).to_dense().square(), x)


def test_a_relu_passes_gradients_at_nan_and_stops_even_infinite_ones_below_zero() -> None:
    x = torch.tensor([[float("nan"), -1.0, 2.0, 0.0]], requires_grad=True)
    grad = torch.tensor([[1.0, float("inf"), 1.0, float("nan")]])
    sparse_relu(x).to_dense(masked_grad=False).backward(grad)
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 0.0, 1.0, 0.0]]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "Fortran's order"])
@pytest.mark.parametrize("share", [0.5, 0.01])
@pytest.mark.parametrize("convert", [ours for ours, _ in CONVERSIONS.values()], ids=CONVERSIONS)
def test_nothing_is_allocated_but_the_result_and_a_piece(
    convert: Callable[[Tensor], Tensor], share: float, layout: str
) -> None:
    size, piece = 512, 1 << 13
    numbers = np.random.rand(size, size).astype("f4") * (np.random.rand(size, size) < share)
    x = torch.from_numpy(LAYOUTS[layout](numbers))
    convert(x)
    meter = meter_for(x.device)
    with pieces_of(piece):
        tracemalloc.start()
        meter.start()
        y = convert(x)
        (interval,) = meter.stop()
        _, numpy_peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert interval.peak_bytes == sum(part.nbytes for part in parts(y))  # the allocator of tensors
    assert numpy_peak < 48 * piece < x.nbytes / 2  # that of NumPy: elements, their positions, rows, columns


# -- density -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["NumPy", "torch"])
def test_density_is_the_share_of_what_is_not_zero(make: Callable[[Any], Any]) -> None:
    x = np.array([[0.0, -0.0, 1.0, np.nan], [np.inf, 0.0, 0.0, 1e-30]])
    with pieces_of(3):
        assert density(make(x)) == density(make(x).T) == density(make(x[:, :, None])) == 0.5
    assert density(make(x.astype("f2"))) == 3 / 8  # which has nothing as small


def test_density_of_nothing_is_zero() -> None:
    assert density(torch.zeros(0, 3)) == 0.0


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no array": (lambda: to_csr([[1.0]]), TypeError, r"to_csr\(x=\.\.\.\) is of type list"),
    "no array, density": (lambda: density(1.0), TypeError, r"density\(x=\.\.\.\) is of type float"),
    "sparse": (lambda: to_coo(torch.eye(2).to_sparse()), TypeError, r"has layout torch.sparse_coo. Give a dense"),
    "sparse, density": (lambda: density(torch.eye(2).to_sparse()), TypeError, r"density\(x=\.\.\.\) has layout"),
    "three dimensions": (lambda: to_csr(torch.ones(2, 3, 4)), ValueError, r"shape \(2, 3, 4\).*two dimensions"),
    "no dimension": (lambda: to_coo(np.float64(1)), ValueError, r"shape \(\).*at least one dimension"),
    "float16 in SciPy": (
        lambda: to_csr(np.ones((2, 2), "f2")),
        TypeError,
        r"holds float16\. Allowed for arrays of NumPy: bool, complex128.*float32",
    ),
    "float8": (lambda: to_csr(torch.ones(2, 2).to(torch.float8_e5m2)), TypeError, r"holds float8_e5m2"),
    "a complex ReLU": (lambda: sparse_relu(torch.ones(2, 2) * 1j), TypeError, r"sparse_relu.*holds complex64"),
    "a boolean ReLU": (lambda: sparse_relu(np.ones((2, 2), bool)), TypeError, r"sparse_relu.*holds bool"),
    "layout": (lambda: sparse_relu(torch.ones(2, 2), "csc"), ValueError, r"layout='csc'\)\. Allowed: 'csr', 'coo'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_meaning_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_without_scipy_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match="pip install scipy"):
        to_csr(np.eye(2))


@pytest.mark.parametrize("convert", [to_csr, to_coo, sparse_relu])
def test_results_stay_where_the_input_is_whatever_the_default_device(convert: Any) -> None:
    x = torch.ones(2, 2)
    with torch.device("meta"):
        assert convert(x).device == x.device
