"""Products of many pairs: in order, small ones that are alike in one call, large ones as they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_accel.ops.sliding import batched_matmul
from support.array_cases import LIBRARIES, Calls, numbers

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.numbers


def many(count: int, *shapes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """So many pairs of each shape ``(M, K, N)``, in turns."""
    sizes = [shape for _ in range(count) for shape in shapes]
    return [
        (torch.randn(*lead, m, k, dtype=torch.float64), torch.randn(*lead, k, n, dtype=torch.float64))
        for *lead, m, k, n in sizes
    ]


def assert_products(found: list[Any], pairs: list[tuple[Any, Any]]) -> None:
    assert len(found) == len(pairs)
    for product, (a, b) in zip(found, pairs, strict=True):
        np.testing.assert_allclose(np.asarray(product), np.asarray(a) @ np.asarray(b), rtol=1e-12, atol=1e-12)


shapes = st.tuples(*[st.integers(0, 4)] * 3)


@settings(max_examples=25, deadline=None)
@given(kinds=st.lists(shapes, max_size=3, unique=True), count=st.integers(1, 20), seed=st.integers(0, 99))
def test_products_come_in_the_order_of_the_pairs(kinds: Any, count: int, seed: int) -> None:
    pairs = many(count, *kinds)
    np.random.default_rng(seed).shuffle(pairs)
    assert_products(batched_matmul(pairs), pairs)
    as_numpy = [(a.numpy(), b.numpy()) for a, b in pairs]
    found = batched_matmul(as_numpy)
    assert all(isinstance(product, np.ndarray) for product in found)
    assert_products(found, as_numpy)


def test_small_pairs_of_two_shapes_are_two_batched_products() -> None:
    pairs = many(20, (3, 4, 5), (2, 2, 2))
    with Calls() as calls:
        found = batched_matmul(pairs)
    assert calls.names.count("bmm") == 2
    assert "mm" not in calls.names
    assert_products(found, pairs)


@pytest.mark.parametrize(("count", "size"), [(3, 4), (20, 65)], ids=["few", "large"])
def test_few_or_large_pairs_are_not_copied(count: int, size: int) -> None:
    pairs = many(count, (size, size, size))
    with Calls() as calls:
        found = batched_matmul(pairs)
    assert set(calls.names) == {"mm"}
    assert calls.names.count("mm") == count
    assert len({product.untyped_storage().data_ptr() for product in found}) == count


def test_pairs_unlike_in_dtype_are_groups_of_their_own() -> None:
    pairs = many(20, (3, 4, 5))
    pairs = [(a.float(), b.float()) if index % 2 else (a, b) for index, (a, b) in enumerate(pairs)]
    assert [product.dtype for product in batched_matmul(pairs)] == [a.dtype for a, _ in pairs]


def test_pairs_unlike_in_device_are_groups_of_their_own() -> None:
    pairs = many(20, (3, 4, 5))
    pairs = [(a.to("meta"), b.to("meta")) if index % 2 else (a, b) for index, (a, b) in enumerate(pairs)]
    assert [product.device for product in batched_matmul(pairs)] == [a.device for a, _ in pairs]


def test_leading_dimensions_are_broadcast_within_each_pair() -> None:
    """In a stack, too, and where the two have unlike numbers of dimensions."""
    for shape_a, shape_b in [((5, 1, 2, 3), (4, 3, 2)), ((5, 1, 2, 3), (1, 4, 3, 2)), ((2, 3), (20, 3, 2))]:
        pairs = [(torch.randn(shape_a).double(), torch.randn(shape_b).double()) for _ in range(20)]
        assert_products(batched_matmul(pairs), pairs)


def test_gradients_reach_every_pair() -> None:
    pairs = many(16, (2, 3, 1))[:15] + many(1, (3, 2, 2)) + many(1, (2, 3, 1))
    leaves = [tensor.requires_grad_() for pair in pairs for tensor in pair]

    def products(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(batched_matmul(list(zip(leaves[::2], leaves[1::2], strict=True))))

    assert torch.autograd.gradcheck(products, leaves)


def test_without_pairs_there_are_no_products() -> None:
    assert batched_matmul([]) == []


def test_pairs_may_come_from_an_iterator() -> None:
    pairs = many(2, (3, 4, 5))
    assert_products(batched_matmul(iter(pairs)), pairs)


@pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)
def test_a_pair_without_a_product_is_refused_with_its_index(make: Any) -> None:
    good, bad = (make(numbers(3, 4)), make(numbers(4, 5))), (make(numbers(3, 4)), make(numbers(3, 4)))
    with pytest.raises(ValueError, match=r"pairs\[2\]: no product of a of shape \(3, 4\) and b of shape \(3, 4\)"):
        batched_matmul([good, good, bad])


@pytest.mark.parametrize("strange", [torch.ones(2, 3, 3), (torch.ones(3, 3),), (torch.ones(3, 3),) * 3])
def test_what_is_no_pair_is_refused_with_its_index(strange: Any) -> None:
    with pytest.raises(TypeError, match=r"pairs\[1\] is no pair"):
        batched_matmul([*many(1, (3, 4, 5)), strange])


def test_two_libraries_among_pairs_are_refused_with_the_indices() -> None:
    with pytest.raises(TypeError, match=r"batched_matmul: pairs\[0\]\[0\] of torch, pairs\[1\]\[1\] of NumPy"):
        batched_matmul([*many(1, (3, 4, 5)), (torch.ones(3, 4), numbers(4, 5))])


def test_what_is_no_array_among_pairs_is_refused_with_its_index() -> None:
    with pytest.raises(TypeError, match=r"batched_matmul\(pairs\[1\]\[0\]=...\) is of type list"):
        batched_matmul([*many(1, (3, 4, 5)), ([1.0], torch.ones(4, 5))])


def test_a_pair_on_two_devices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pairs\[0\]: a on cpu, b on meta. Move them to one device"):
        batched_matmul([(torch.ones(3, 4), torch.ones(4, 5, device="meta"))])


def test_constants_among_tensors_with_gradients_stay_constants() -> None:
    ones = torch.ones(2, 2)
    weights = torch.ones(2, 2, requires_grad=True)
    products = batched_matmul([(ones, ones)] * 20 + [(ones, weights)] * 20)
    assert [product.requires_grad for product in products] == [False] * 20 + [True] * 20


def test_sparse_tensors_are_multiplied_one_by_one() -> None:
    eye = torch.eye(2)
    products = batched_matmul([(eye.to_sparse(), eye)] * 20 + [(eye, eye)] * 20)
    assert all(torch.equal(product.to_dense(), eye) for product in products)


def test_autocast_excuses_only_the_dtypes_that_it_casts() -> None:
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert batched_matmul([(a, b.bfloat16())])[0].dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"a of torch.float32, b of torch.float64"):
            batched_matmul([(a, b.double())])
