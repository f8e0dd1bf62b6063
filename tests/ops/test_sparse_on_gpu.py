"""Sparse arrays of what lies on a GPU: the numbers, the waiting, the memory, and CuPy's own kinds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accel.ops import nonzeros
from lightning_accel.ops.sparse import density, sparse_relu, to_coo, to_csr

pytestmark = [pytest.mark.gpu, pytest.mark.needs_kernels("sparse tensors, which cannot be wrapped")]

CONVERSIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "to_csr": (to_csr, lambda x: x.to_sparse_csr()),
    "to_coo": (to_coo, lambda x: x.to_sparse()),
    "ReLU, csr": (sparse_relu, lambda x: torch.relu(x).to_sparse_csr()),
    "ReLU, coo": (lambda x: sparse_relu(x, "coo"), lambda x: torch.relu(x).to_sparse()),
}


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def a_tenth(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(``size``, ``size``) on the GPU, nine tenths of it zero."""
    return (torch.randn(size, size, device="cuda") * (torch.rand(size, size, device="cuda") < 0.1)).to(dtype)


def parts(x: Tensor) -> list[Tensor]:
    if x.layout == torch.sparse_csr:
        return [x.crow_indices(), x.col_indices(), x.values()]
    return [x.indices(), x.values()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("ours", "torchs"), CONVERSIONS.values(), ids=CONVERSIONS)
def test_the_result_is_torchs(
    ours: Callable[[Any], Any],
    torchs: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nonzeros, "_DEVICE_PIECE", 1000)  # several, which end within rows
    x = a_tenth(120, dtype)
    for view in (x, x.t(), x[::2, 1::3]):
        found = ours(view)
        for part, other in zip(parts(found), parts(torchs(view)), strict=True):
            torch.testing.assert_close(part, other, rtol=0, atol=0)


@pytest.mark.parametrize(("ours", "torchs"), CONVERSIONS.values(), ids=CONVERSIONS)
def test_gradients_are_torchs(ours: Callable[[Any], Any], torchs: Callable[[Tensor], Tensor]) -> None:
    x = a_tenth(50, torch.float64).requires_grad_()
    found, expected = (torch.autograd.grad(f(x).to_dense().square().sum(), x)[0] for f in (ours, torchs))
    torch.testing.assert_close(found, expected.to_dense())


@pytest.mark.parametrize("ours", [ours for ours, _ in CONVERSIONS.values()], ids=CONVERSIONS)
def test_the_host_waits_once(ours: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonzeros, "_DEVICE_PIECE", 1000)
    x = a_tenth(120)
    ours(x)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            ours(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing CUDA operation" in str(warning.message) for warning in heard) == 1


@pytest.mark.parametrize("ours", [ours for ours, _ in CONVERSIONS.values()], ids=CONVERSIONS)
def test_nothing_is_allocated_but_the_result_and_a_piece(
    ours: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = 1 << 18
    monkeypatch.setattr(nonzeros, "_DEVICE_PIECE", piece)
    x = a_tenth(4096)
    ours(x)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = ours(x)
    beyond = torch.cuda.max_memory_allocated() - before - sum(part.nbytes for part in parts(y))
    assert beyond < 48 * piece < x.nbytes / 4


def test_density_is_counted_on_the_device() -> None:
    x = a_tenth(500)
    assert density(x) == density(x.t()) == int((x != 0).sum()) / x.numel()


@pytest.mark.parametrize("convert", [to_csr, to_coo])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_cupys_arrays_become_cupys_matrices(cupy: Any, convert: Callable[[Any], Any], dtype: str) -> None:
    sparse = pytest.importorskip("cupyx.scipy.sparse")
    x = cupy.from_dlpack(a_tenth(60)).astype(dtype)
    found = convert(x)
    assert type(found) is (sparse.csr_matrix if convert is to_csr else sparse.coo_matrix)
    assert found.dtype == dtype
    cupy.testing.assert_array_equal(found.toarray(), x)
    cupy.testing.assert_allclose(found @ cupy.ones((60, 2), dtype), x @ cupy.ones((60, 2), dtype), rtol=1e-4, atol=1e-4)


def test_a_sparse_relu_of_cupys(cupy: Any) -> None:
    x = cupy.from_dlpack(a_tenth(60))
    for layout in ("csr", "coo"):
        cupy.testing.assert_array_equal(sparse_relu(x, layout).toarray(), cupy.maximum(x, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_dtypes_that_cupy_has_no_sparse_matrices_of_are_refused(cupy: Any, dtype: str) -> None:
    with pytest.raises(TypeError, match=rf"holds {dtype}\. Allowed for arrays of CuPy: bool, complex128"):
        to_csr(cupy.ones((2, 2), dtype))


def test_cupy_has_no_coordinates_of_three_dimensions(cupy: Any) -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2\). Layout COO of CuPy takes two dimensions"):
        to_coo(cupy.ones((2, 2, 2), "f4"))
