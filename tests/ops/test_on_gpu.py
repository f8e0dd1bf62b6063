"""Arrays of CuPy and tensors on a GPU: shared memory, streams that wait for each other, and the numbers of NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_accel.ops.arrays import as_tensors
from lightning_accel.ops.sliding import _side_streams, batched_matmul, sliding_matmul, windows
from support.array_cases import numbers

pytestmark = pytest.mark.gpu

LONG = 500_000_000  # cycles: a quarter of a second or so


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(params=["CuPy", "torch"])
def make(request: pytest.FixtureRequest) -> Any:
    """What puts an array of NumPy onto the GPU."""
    if request.param == "CuPy":
        return pytest.importorskip("cupy").asarray
    return lambda array: torch.from_numpy(array).cuda()


def on_host(array: Any) -> Any:
    return array.detach().cpu().numpy() if isinstance(array, Tensor) else array.get()


def pointer(array: Any) -> int:
    return array.data_ptr() if isinstance(array, Tensor) else array.data.ptr


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "i4", "i8", "f2", "f4", "f8", "c8"])
def test_pointers_are_equal_both_ways(cupy: Any, dtype: str) -> None:
    array = cupy.ones((4, 6), dtype)
    for view in (array, array.T, array[1::2, ::3]):
        (tensor,), back = as_tensors("asker", x=view)
        assert tensor.data_ptr() == view.data.ptr
        assert [stride * view.itemsize for stride in tensor.stride()] == list(view.strides)
        assert back(tensor).data.ptr == view.data.ptr
        assert back(tensor).dtype == view.dtype


def test_an_array_that_runs_backwards_is_copied_and_does_not_end_the_process(cupy: Any) -> None:
    array = cupy.arange(6.0)[::-1]
    (tensor,), _ = as_tensors("asker", x=array)
    assert tensor.tolist() == [5, 4, 3, 2, 1, 0]


def test_a_tensor_sees_what_cupys_stream_has_yet_to_write(cupy: Any) -> None:
    """CuPy's stream sleeps before it writes; read without waiting, the numbers would be zeros."""
    stream = cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros(1000)
    cupy.cuda.Device().synchronize()
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(LONG)
        array += 3
        (tensor,), _ = as_tensors("asker", x=array)
    assert (tensor + 0).unique().tolist() == [3]


def test_cupy_sees_what_torchs_stream_has_yet_to_write(cupy: Any) -> None:
    tensor = torch.zeros(1000, device="cuda")
    _, back = as_tensors("asker", x=cupy.zeros(1))
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        tensor += 3
        assert float(back(tensor).min()) == 3


def test_results_go_back_from_whichever_device_they_are_on(cupy: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with cupy.cuda.Device(1):
        array = cupy.ones(3)
        (tensor,), back = as_tensors("asker", x=array)
        assert tensor.device.index == 1
        assert back(tensor).device.id == 1


def test_arrays_of_cupy_and_tensors_are_not_mixed(cupy: Any) -> None:
    with pytest.raises(TypeError, match="x of CuPy, y of torch"):
        as_tensors("asker", x=cupy.ones(3), y=torch.ones(3, device="cuda"))


# -- windows -----------------------------------------------------------------------------------------------------------


def test_windows_are_views_with_the_numbers_of_numpys(make: Any) -> None:
    array = numbers(3, 50, 2)
    for axis, size, step in [(0, 2, 1), (1, 20, 1), (-2, 50, 3), (-1, 1, 1), (1, 7, 5)]:
        given = make(array)
        found = windows(given, size, step, axis)
        assert pointer(found) == pointer(given)
        np.testing.assert_array_equal(on_host(found), windows(array, size, step, axis))


def test_windows_of_an_array_that_runs_backwards_are_a_view(cupy: Any) -> None:
    array = cupy.arange(6.0)[::-1]
    assert windows(array, 3).data.ptr == array.data.ptr
    assert windows(array, 3).get().tolist() == [[5, 4, 3], [4, 3, 2], [3, 2, 1], [2, 1, 0]]


def test_the_products_of_windows_are_those_of_numpy(make: Any) -> None:
    a, b = numbers(2, 3, 8), numbers(8, 50)
    for materialize in (False, True):
        found = sliding_matmul(make(a), make(b), 20, materialize=materialize)
        np.testing.assert_allclose(on_host(found), sliding_matmul(a, b, 20), rtol=1e-10, atol=1e-10)


def test_products_of_windows_take_the_memory_of_one_product_and_nothing_waits(make: Any) -> None:
    a, b = make(numbers(10, 20)), make(numbers(20, 1000))
    sliding_matmul(a, b, 20)  # cuBLAS has its workspace
    before = used_bytes(a)
    with nothing_waits():
        found = sliding_matmul(a, b, 20)
    assert found.shape == (981, 10, 20)
    assert used_bytes(a) - before < 1.05 * 10 * 1000 * 8  # in blocks of 512 bytes


def used_bytes(array: Any) -> int:
    if isinstance(array, Tensor):
        return torch.cuda.memory_allocated()
    import cupy

    return cupy.get_default_memory_pool().used_bytes()


def test_autocast_is_not_for_arrays_of_cupy(cupy: Any) -> None:
    a, b = cupy.ones((3, 8), "f4"), cupy.ones((8, 9), "f4")
    with torch.autocast("cuda", torch.float16):
        assert sliding_matmul(a, b, 4).dtype == np.float32
        assert batched_matmul([(a, b)])[0].dtype == np.float32


def test_integers_have_no_product_of_torchs_on_a_gpu(make: Any) -> None:
    a, b = make(np.ones((3, 8), "i8")), make(np.ones((8, 9), "i8"))
    with pytest.raises(TypeError, match=r"batched_matmul: torch has no product of torch.int64 on cuda"):
        batched_matmul([(a, b)])


# -- products of many pairs --------------------------------------------------------------------------------------------


class Streams(TorchDispatchMode):
    """The streams that products are asked for on."""

    def __init__(self) -> None:
        super().__init__()
        self.of_products: list[int] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm"):
            self.of_products.append(torch.cuda.current_stream().cuda_stream)
        return func(*args, **(kwargs or {}))


def many() -> list[tuple[Any, Any]]:
    """Of three shapes: twice small enough and often enough to be stacked, once neither."""
    shapes = [(3, 4, 5), (2, 2, 2)] * 10 + [(600, 600, 600)] * 2
    return [(numbers(m, k), numbers(k, n)) for m, k, n in shapes]


def test_the_products_of_pairs_are_those_of_numpy_and_nothing_waits(make: Any) -> None:
    pairs = many()
    given = [(make(a), make(b)) for a, b in pairs]
    batched_matmul(given)  # CUDA has its libraries
    with nothing_waits():
        found = batched_matmul(given)
    assert all(type(product) is type(a) for product, (a, _) in zip(found, given, strict=True))
    for product, (a, b) in zip(found, pairs, strict=True):
        np.testing.assert_allclose(on_host(product), a @ b, rtol=1e-9, atol=1e-9)


def test_groups_run_on_streams_of_their_own_and_one_group_where_it_is() -> None:
    given = [(torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda()) for a, b in many()]
    current = torch.cuda.current_stream().cuda_stream
    with Streams() as streams:
        batched_matmul(given)
    assert len(streams.of_products) == 4  # two stacks, two large ones
    assert len(set(streams.of_products)) == 3
    assert current not in streams.of_products
    with Streams() as streams:
        batched_matmul(given[-2:])
    assert streams.of_products == [current] * 2


def test_side_streams_wait_for_what_the_current_one_has_yet_to_write() -> None:
    """The current stream sleeps before it writes the inputs; read without waiting, they would be zeros."""
    pairs = [(torch.zeros(n, n, device="cuda"), torch.zeros(n, n, device="cuda")) for n in (3, 5, 7)]
    batched_matmul(pairs)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    for a, b in pairs:
        a.fill_(1)
        b.fill_(1)
    assert [product.unique().tolist() for product in batched_matmul(pairs)] == [[3], [5], [7]]


def test_the_current_stream_waits_for_the_side_streams() -> None:
    """The side streams sleep before they multiply, and the products' memory was full of other numbers before."""
    pairs = [(torch.ones(n, n, device="cuda"), torch.ones(n, n, device="cuda")) for n in (3, 5, 7)]
    for product in batched_matmul(pairs):
        product.fill_(-1)
    del product
    torch.cuda.synchronize()
    for side in _side_streams(torch.device("cuda", torch.cuda.current_device())):
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
    copies = [product.clone() for product in batched_matmul(pairs)]
    assert [copy.unique().tolist() for copy in copies] == [[3], [5], [7]]


def test_the_current_stream_may_be_one_of_the_users() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LONG)
        pairs = [(torch.ones(n, n, device="cuda"), torch.ones(n, n, device="cuda")) for n in (3, 5)]
        assert [product.unique().tolist() for product in batched_matmul(pairs)] == [[3], [5]]


def test_gradients_are_those_of_products_one_by_one() -> None:
    leaves = [torch.from_numpy(matrix).cuda().requires_grad_() for pair in many() for matrix in pair]
    pairs = list(zip(leaves[::2], leaves[1::2], strict=True))
    expected = torch.autograd.grad(sum((a @ b).square().sum() for a, b in pairs), leaves)
    for _ in range(3):  # memory is used again
        found = torch.autograd.grad(sum(product.square().sum() for product in batched_matmul(pairs)), leaves)
        torch.testing.assert_close(found, expected)


def test_calls_one_after_another_take_no_more_memory() -> None:
    given = [(torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda()) for a, b in many()]
    batched_matmul(given)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for _ in range(40):  # more than there are streams to be had
        batched_matmul(given)
        torch.cuda.synchronize()  # until then, memory that was used on two streams is not given to others
    assert torch.cuda.memory_reserved() == reserved
