"""The computation: a linear layer and its cross-entropy in pieces, against the two after each other."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accel.experiment.tolerance import deviation
from lightning_accel.techniques.loss.chunked_loss import (
    LossForm,
    LossProblem,
    linear_cross_entropy,
    plain_cross_entropy,
)
from support.loss_models import watched

pytestmark = pytest.mark.numbers

N, H, V = 50, 16, 300

EVERY_FORM = pytest.mark.parametrize(
    ("reduction", "smoothing", "weighted", "bias", "ignored"),
    list(itertools.product(("mean", "sum", "none"), (0.0, 0.1), (False, True), (False, True), ("none", "some", "all"))),
)


def problem(
    dtype: torch.dtype, *, reduction: str = "mean", smoothing: float = 0.0, weighted: bool = False, bias: bool = False,
    ignored: str = "none", at_once: int | None = 13,
) -> LossProblem:  # fmt: skip
    """Leaves of ``dtype``, 13 rows at a time."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    target = torch.randint(V, (N,), generator=generator)
    if ignored != "none":
        target[:: 3 if ignored == "some" else 1] = -100
    wide = torch.promote_types(dtype, torch.float32)
    return LossProblem(
        drawn(N, H),
        drawn(V, H, scale=0.3),
        drawn(V) if bias else None,
        target,
        drawn(V).detach().abs().to(wide) if weighted else None,
        LossForm(reduction=reduction, label_smoothing=smoothing, logits_dtype=dtype, loss_dtype=wide),
        at_once,
    )


def in_float64(given: LossProblem) -> LossProblem:
    tensors = [
        None if t is None else t.detach().double().requires_grad_(t.requires_grad)
        for t in (given.rows, given.weight, given.bias, given.class_weight)
    ]
    form = LossForm(
        reduction=given.form.reduction,
        label_smoothing=given.form.label_smoothing,
        logits_dtype=torch.float64,
        loss_dtype=torch.float64,
    )
    rows, weight, bias, class_weight = tensors
    assert rows is not None
    assert weight is not None
    return LossProblem(rows, weight, bias, given.target, class_weight, form)


def results(compute: Any, given: LossProblem) -> list[Tensor]:
    """The loss, and the gradients of rows, weight and bias."""
    leaves = [t for t in (given.rows, given.weight, given.bias) if t is not None]
    loss = compute(given)
    upstream = torch.linspace(0.5, 1.5, loss.numel(), dtype=torch.float64).reshape(loss.shape).to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


@EVERY_FORM
def test_in_float64_loss_and_gradients_are_equal_to_1e_12(
    reduction: str, smoothing: float, weighted: bool, bias: bool, ignored: str
) -> None:
    given = problem(
        torch.float64, reduction=reduction, smoothing=smoothing, weighted=weighted, bias=bias, ignored=ignored
    )
    for got, want in zip(results(linear_cross_entropy, given), results(plain_cross_entropy, given), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@EVERY_FORM
def test_in_other_dtypes_it_is_as_near_to_float64_as_the_plain_way(
    dtype: torch.dtype, reduction: str, smoothing: float, weighted: bool, bias: bool, ignored: str
) -> None:
    given = problem(dtype, reduction=reduction, smoothing=smoothing, weighted=weighted, bias=bias, ignored=ignored)
    truth = results(plain_cross_entropy, in_float64(given))
    plain, ours = (deviation(results(way, given), truth) for way in (plain_cross_entropy, linear_cross_entropy))
    assert ours.noise <= 4 * max(plain.noise, torch.finfo(dtype).eps)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("what", ["rows of NaN", "a class that is never predicted"])
def test_logits_of_ignored_tokens_need_not_be_finite(what: str, reduction: str) -> None:
    given = problem(torch.float64, reduction=reduction, bias=True, ignored="some")
    assert given.bias is not None
    if what == "rows of NaN":
        given.rows.data[given.target == -100] = math.nan
    else:
        given.bias.data[0] = -math.inf
        given.target[given.target == 0] = 1
    found, expected = results(linear_cross_entropy, given), results(plain_cross_entropy, given)
    assert found[0].isfinite().all()
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13, equal_nan=True)


def test_upstream_gradients_of_ignored_tokens_need_not_be_finite() -> None:
    given = problem(torch.float64, reduction="none", ignored="some")
    upstream = torch.ones(N, dtype=torch.float64).masked_fill(given.target == -100, math.nan)
    got, want = (
        torch.autograd.grad(way(given), [given.rows, given.weight], upstream)
        for way in (linear_cross_entropy, plain_cross_entropy)
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_gradients_have_the_dtypes_of_what_they_belong_to() -> None:
    given = problem(torch.bfloat16, bias=True)
    assert [t.dtype for t in results(linear_cross_entropy, given)] == [torch.float32, *[torch.bfloat16] * 3]


def test_it_never_makes_a_tensor_of_tokens_by_vocabulary() -> None:
    given = problem(torch.float32)
    with watched() as seen:
        results(linear_cross_entropy, given)
    assert seen.elements == V * H  # the weight's gradient
    assert 13 * V < V * H < N * V


def test_it_takes_three_products_for_every_piece_and_none_in_the_backward_pass() -> None:
    given = problem(torch.float32, at_once=25)
    with watched() as forward:
        loss = linear_cross_entropy(given)
    with watched() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    assert (forward.num_products, backward.num_products) == (2 * 3, 0)


def test_without_gradients_it_takes_one_product_for_every_piece() -> None:
    given = problem(torch.float32, at_once=25)
    with torch.no_grad(), watched() as seen:
        linear_cross_entropy(given)
    assert seen.num_products == 2


@pytest.mark.parametrize("frozen", ["rows", "weight"])
def test_what_is_frozen_costs_no_product(frozen: str) -> None:
    given = problem(torch.float32, at_once=25)
    getattr(given, frozen).requires_grad_(False)
    with watched() as seen:
        loss = linear_cross_entropy(given)
        loss.backward()  # type: ignore[no-untyped-call]
    assert seen.num_products == 2 * 2
    assert getattr(given, frozen).grad is None


def test_a_retained_graph_gives_the_same_gradient_again() -> None:
    given = problem(torch.float64)
    loss = linear_cross_entropy(given)
    first = torch.autograd.grad(loss, [given.rows, given.weight], retain_graph=True)
    second = torch.autograd.grad(loss, [given.rows, given.weight])
    torch.testing.assert_close(second, first, rtol=1e-13, atol=0)


def test_a_second_backward_pass_without_a_retained_graph_raises_what_torch_raises() -> None:
    given = problem(torch.float64)
    loss = linear_cross_entropy(given)
    loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_second_derivatives_are_right() -> None:
    given = problem(torch.float64)
    target = given.target[:5] % 9

    def loss(rows: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(LossProblem(rows, weight, None, target, None, given.form, 2))

    few = given.rows[:5, :4].detach().requires_grad_(), given.weight[:9, :4].detach().requires_grad_()
    assert torch.autograd.gradcheck(loss, few)
    assert torch.autograd.gradgradcheck(loss, few)


def test_float16_loses_no_probability_that_is_small_because_classes_are_many() -> None:
    """Of 65,536 classes at even odds each has 1.5e-5, of which float16 has lost all but a few digits."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.full((2, 4), 0.0).half().requires_grad_()
    weight = torch.randn(1 << 16, 4, generator=generator).half().requires_grad_()
    form = LossForm(logits_dtype=torch.float16)
    given = LossProblem(rows, weight, None, torch.tensor([0, 1]), None, form)
    got = results(linear_cross_entropy, given)[1]
    want = results(plain_cross_entropy, in_float64(given))[1]
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=1e-5)


def test_an_upstream_gradient_beyond_float16_does_not_overflow_before_the_result_does() -> None:
    """Summed over tokens under a gradient scaler, it is 65,536, which float16 has not."""
    given = problem(torch.float16, reduction="sum")
    loss = linear_cross_entropy(given)
    (by_rows,) = torch.autograd.grad(loss, [given.rows], torch.tensor(65536.0))
    (expected,) = torch.autograd.grad(linear_cross_entropy(given), [given.rows], torch.tensor(64.0))
    torch.testing.assert_close(by_rows.double() / 1024, expected.double(), rtol=2e-3, atol=1e-3)


def test_the_boosted_gradients_of_many_rows_of_one_class_do_not_overflow_float16() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(16384, 16, generator=generator) + 1).half()
    weight = (0.02 * torch.randn(500, 16, generator=generator)).half().requires_grad_()
    target = torch.randint(500, (16384,), generator=generator)
    target[: 16384 // 6] = 3
    given = LossProblem(rows, weight, None, target, None, LossForm(logits_dtype=torch.float16))
    (got,) = torch.autograd.grad(linear_cross_entropy(given), [weight])
    exact = in_float64(given)
    (want,) = torch.autograd.grad(plain_cross_entropy(exact), [exact.weight])
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=1e-4)
