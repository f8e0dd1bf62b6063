"""The one rule for numbers: what is allowed is measured on the original, faults are caught, other orders are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.experiment.tolerance import FACTOR, Deviation, Measuring, Spread, deviation, other_orders
from lightning_accel.experiment.trial import NumbersComparison, Trial
from lightning_accel.experiment.trial_runs import TrialSide

pytestmark = pytest.mark.numbers

B, H, T, D = 8, 4, 24, 16


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, dropout: float = 0.0) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return F.dropout(scores.masked_fill(future, -math.inf).softmax(-1), dropout) @ v


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, T, D, generator=generator, dtype=dtype).requires_grad_() for _ in range(3))
    return q, k, v, torch.randn(H, T, T, generator=generator, dtype=dtype).requires_grad_()


def compare(
    candidate: Callable[..., Tensor], original: Callable[..., Tensor] = attention, dtype: torch.dtype = torch.float32
) -> NumbersComparison:
    trial = Trial(nn.Module(), inputs(dtype), wide=original)
    return trial.numbers(TrialSide(original), TrialSide(candidate))


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def off_by_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    future = torch.ones(T, T, dtype=torch.bool).triu(2)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def one_sample_wrong(sample: int) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out = attention(q, k, v, bias)
        return torch.cat([out[:sample], 1.01 * out[sample : sample + 1], out[sample + 1 :]])

    return call


FAULTS: dict[str, Callable[..., Tensor]] = {
    "a scale off by 1%": lambda q, k, v, bias: attention(1.01 * q, k, v, bias),
    "a result off by 1%": lambda q, k, v, bias: 1.01 * attention(q, k, v, bias),
    "a bias dropped": lambda q, k, v, bias: attention(q, k, v, 0 * bias),
    "a mask off by one": off_by_one,
    "heads swapped": lambda q, k, v, bias: attention(q, k, v.roll(1, 1), bias),
    "a weight transposed": lambda q, k, v, bias: attention(q, k, v, bias.mT),
    "gradients doubled": lambda q, k, v, bias: attention(q, k, _Doubling.apply(v), bias),
    "the first sample wrong": one_sample_wrong(0),
    "the last sample wrong": one_sample_wrong(B - 1),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(fault: Callable[..., Tensor]) -> None:
    assert "other numbers than the original" in compare(fault).failure


@pytest.mark.parametrize("name", ["a result off by 1%", "a mask off by one", "gradients doubled", "heads swapped"])
def test_a_planted_fault_is_caught_in_bfloat16_too(name: str) -> None:
    """Where rounding itself is nearly 1%: a fault that all numbers share is told from noise by its mean."""
    assert compare(FAULTS[name], dtype=torch.bfloat16).failure
    assert compare(attention, dtype=torch.bfloat16).failure == ""


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.4])
def test_dropout_of_another_rate_is_caught(rate: float) -> None:
    def dropping(rate: float) -> Callable[..., Tensor]:
        return lambda *args: attention(*args, dropout=rate)

    assert "random numbers" in compare(dropping(rate), dropping(0.2)).failure
    assert compare(lambda *args: dropping(0.2)(*(x.clone() for x in args)), dropping(0.2)).failure == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_candidate_ten_times_worse_than_the_spread_is_caught(dtype: torch.dtype) -> None:
    sound = compare(attention, dtype=dtype)
    assert sound.spread is not None
    off = 10 * sound.spread.allowed.noise / FACTOR

    def noisy(*args: Tensor) -> Tensor:
        out = attention(*args)
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        return out + off * noise * (out.detach().norm() / noise.norm())

    assert compare(noisy, dtype=dtype).failure


OTHER_ORDERS: dict[str, Callable[..., Tensor]] = {
    "torch's fused kernel": lambda q, k, v, bias: F.scaled_dot_product_attention(
        q, k, v, bias + torch.full((T, T), -math.inf).triu(1)
    ),
    "head by head": lambda q, k, v, bias: torch.cat(
        [attention(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1], bias[h : h + 1]) for h in range(H)], 1
    ),
    "features the other way round": lambda q, k, v, bias: attention(q.flip(-1), k.flip(-1), v, bias),
    "by einsum": lambda q, k, v, bias: torch.einsum(
        "bhts,bhsd->bhtd",
        (torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(D) + bias)
        .masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        .softmax(-1),
        v,
    ),
}


@pytest.mark.parametrize("order", OTHER_ORDERS.values(), ids=OTHER_ORDERS)
def test_another_order_of_the_same_sums_is_not_a_fault(order: Callable[..., Tensor]) -> None:
    assert compare(order).failure == ""


CONVOLUTIONS = {
    "few channels": (1, 32, 3, 32, 1),
    "many channels": (256, 256, 3, 7, 1),
    "a stride": (32, 64, 3, 20, 2),
    "1x1": (64, 128, 1, 14, 1),
    "a stem": (3, 32, 7, 48, 2),
}


@pytest.mark.parametrize("sizes", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_convolution_in_channels_last_is_within_the_spread_of_the_contiguous_one(sizes: tuple[int, ...]) -> None:
    channels_in, channels_out, kernel, side, stride = sizes
    torch.manual_seed(0)
    x = torch.randn(8, channels_in, side, side).relu().requires_grad_()
    weight = (torch.randn(channels_out, channels_in, kernel, kernel) / kernel).requires_grad_()

    def original(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=stride, padding=kernel // 2)

    def in_channels_last(*args: Tensor) -> Tensor:
        return original(*(tensor.contiguous(memory_format=torch.channels_last) for tensor in args))

    trial = Trial(nn.Module(), (x, weight), samples=2, wide=original, keeps_strides=False)
    assert trial.numbers(TrialSide(original), TrialSide(in_channels_last)).failure == ""


# -- as few orders as a verdict takes ------------------------------------------------------------------------------

MOST_CALLS = 20


def counted(candidate: Callable[..., Tensor], dtype: torch.dtype) -> tuple[NumbersComparison, int]:
    """The verdict on a candidate, and how many passes of it and of the original that has taken."""
    calls = 0

    def counting(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(*args: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return call(*args)

        return counted

    original = counting(attention)
    trial = Trial(nn.Module(), inputs(dtype), wide=original, samples=B // 2)
    sides = TrialSide(original), TrialSide(counting(candidate))
    found = trial.numbers(*sides)
    if not found.failure:
        trial.time(*sides)
    return found, calls


IN_DOUBT = {**OTHER_ORDERS, "a fault": FAULTS["a mask off by one"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("candidate", IN_DOUBT.values(), ids=IN_DOUBT)
def test_a_trial_takes_at_most_twenty_calls(candidate: Callable[..., Tensor], dtype: torch.dtype) -> None:
    _, calls = counted(candidate, dtype)
    assert calls <= MOST_CALLS


def judged_by_all_orders(self: Measuring, actual: list[Tensor]) -> tuple[Deviation, str]:
    found = deviation(actual, self._ask_oracle())
    return found, of_all_orders(self).objection(found)


def of_all_orders(measuring: Measuring) -> Spread:
    """What is infinitely far off is objected to when no order is left."""
    assert measuring.objection(Deviation(math.inf, math.inf))
    return measuring.spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_candidate_that_is_not_in_doubt_takes_no_other_order_and_no_oracle(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "time", lambda *args: NumbersComparison())
    found, calls = counted(lambda *args: attention(*args), dtype)
    assert (found.failure, found.is_same) == ("", True)
    assert calls == 5  # each on a few samples and on all, and the original whether it takes a few


@pytest.mark.medium
@given(
    noise=st.floats(0, 1e-5),
    bias=st.floats(-3e-3, 3e-3),
    seed=st.integers(0, 99),
    num_orders=st.integers(0, 3),
    rounding=st.sampled_from([1e-8, 1e-7, 1e-6, 1e-4]),
    scale=st.sampled_from([1.0, 0.02, 0.01, 1e-5]),
)
@settings(max_examples=200, deadline=None)
def test_a_verdict_by_few_orders_is_that_by_all(
    noise: float, bias: float, seed: int, num_orders: int, rounding: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def near(off: float, along: float = 0.0) -> list[Tensor]:
        return [t * (1 + along) + off * t.norm() / 10 * torch.randn(t.shape, generator=generator) for t in oracle]

    oracle = [torch.randn(100, generator=generator), scale * torch.randn(100, generator=generator)]
    expected, *orders = (near(rounding) for _ in range(1 + num_orders))
    for dtype, larger in ((torch.float32, 1.0), (torch.bfloat16, 1e3)):
        candidate = near(larger * noise, bias)
        by_few = Measuring(expected, dtype, lambda: oracle, orders)
        by_all = Measuring(expected, dtype, lambda: oracle, orders)
        _, words = judged_by_all_orders(by_all, candidate)
        assert bool(by_few.judged(candidate)[1]) is bool(words)


def test_what_is_alike_is_judged_by_a_spread_that_was_measured_once() -> None:
    """As the rest of a batch is, whose first samples were measured: by the distance from the original's own result."""
    measured = Spread(Deviation(noise=1e-5, bias=1e-3), num_orders=1)
    expected = [torch.ones(100)]
    asked: list[str] = []

    def judged(off: float) -> str:
        candidate = [expected[0] + off * torch.tensor([1.0, -1.0] * 50)]
        oracle, others = (lambda: asked.append("oracle")), (asked.append("an order") for _ in range(3))
        return Measuring(expected, torch.float32, oracle, others, measured).judged(candidate)[1]

    assert judged(1.2e-5) == ""
    assert asked == []
    assert judged(1e-4)
    assert "oracle" in asked


def test_a_spread_that_was_measured_in_all_orders_is_whole_for_what_is_alike() -> None:
    expected = [torch.ones(100)]
    whole = of_all_orders(Measuring(expected, torch.float32))
    orders = iter([[torch.ones(100)]])
    assert whole.is_whole
    assert Measuring(expected, torch.float32, lambda: expected, orders, whole).judged([1.1 * expected[0]])[1]
    assert next(orders, None) is not None


# -- the spread itself ---------------------------------------------------------------------------------------------


def test_what_is_no_other_order_of_the_same_sums_widens_no_spread() -> None:
    """Statistics of half a batch are other statistics: that much no candidate may be off."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    wide = F.batch_norm(x.double(), None, None, training=True)
    halves = torch.cat([F.batch_norm(half, None, None, training=True) for half in x.chunk(2)])
    whole = F.batch_norm(x, None, None, training=True)
    spread = of_all_orders(Measuring([whole], torch.float32, lambda: [wide], [[halves]]))
    assert spread.num_orders == 1
    assert spread.allowed.noise < FACTOR * 1e-5


def test_an_exact_original_allows_rounding_and_no_more() -> None:
    exact = [torch.arange(10.0)]
    spread = of_all_orders(Measuring(exact, torch.float32))
    assert spread.allowed.noise == FACTOR * 2 * torch.finfo(torch.float32).eps
    assert spread.objection(deviation([exact[0] * (1 + 1e-7)], exact)) == ""
    assert spread.objection(deviation([exact[0] * (1 + 1e-5)], exact))


def test_a_nan_is_infinitely_far() -> None:
    expected = [torch.ones(3)]
    spread = of_all_orders(Measuring(expected, torch.float32))
    assert spread.objection(deviation([torch.tensor([1.0, float("nan"), 1.0])], expected))


def test_the_other_orders_are_the_same_computation_and_leave_the_settings_as_they_were() -> None:
    before = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    args = inputs()
    expected = attention(*args).detach()
    for call, setting in other_orders(attention, B, torch.device("cpu")):
        with setting:
            assert deviation([call(*args).detach()], [expected]).noise < 1e-5
    assert (torch.get_num_threads(), torch._C._get_mkldnn_enabled()) == before


def test_a_setting_is_put_back_when_the_computation_raises_in_it() -> None:
    before = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    for _, setting in other_orders(attention, B, torch.device("cpu")):
        with pytest.raises(RuntimeError), setting:
            raise RuntimeError
    assert (torch.get_num_threads(), torch._C._get_mkldnn_enabled()) == before
