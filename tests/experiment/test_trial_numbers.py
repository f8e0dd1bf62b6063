"""How a trial compares numbers: against an oracle where there can be one, in every dtype, for every kind of tensor."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.core.device import dtype_of_products
from lightning_accel.experiment.tolerance import FACTOR
from lightning_accel.experiment.trial import Trial
from lightning_accel.experiment.trial_runs import TrialSide
from support.errors import relative_error
from support.models import ResidualBlock, images
from support.trial_cases import X, allowing, block, compare

pytestmark = pytest.mark.numbers


def test_bfloat16_is_judged_by_what_bfloat16_costs() -> None:
    """The original in bfloat16 is itself off: a candidate as far off, in another direction, is as good."""
    module = nn.Linear(64, 64)
    x = torch.randn(8, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = compare(module, lambda x: (x.bfloat16() @ module.weight.bfloat16().t()) + module.bias.bfloat16(), x)
        worse = compare(module, lambda x: module(x) * 1.1, x)
    assert found.failure == ""
    assert found.error > 1e-4
    assert worse.failure


def test_the_same_numbers_to_the_bit_are_told_from_those_within_the_spread() -> None:
    module, x = nn.Linear(64, 64), torch.randn(8, 64)
    same = compare(module, module.forward, x)
    near = compare(module, lambda x: module(x) * (1 + 2**-22), x)
    assert same.is_same
    assert not near.failure
    assert not near.is_same
    assert same.measured().error_spreads == 0.0
    assert 0 < (near.measured().error_spreads or 0.0) <= FACTOR


def test_an_original_that_overflows_does_not_let_everything_pass() -> None:
    """In float16 the sum is infinite, in the oracle's float64 it is not: off by infinity, times anything."""

    class Overflowing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, (x.half() * 60_000).sum(1, keepdim=True).float()], 1)

    module, x = Overflowing(), torch.ones(4, 4)
    assert compare(module, module.forward, x).failure == ""
    assert compare(module, lambda x: module.forward(x) * torch.tensor([2.0, 1, 1, 1, 1]), x).failure


def test_outputs_whose_shape_hangs_on_rounding_are_compared_without_an_oracle() -> None:
    class Selecting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x.double() > 0.1 if x.dtype == torch.float64 else x > 2.0]

    module, x = Selecting(), torch.linspace(3, 0, 20)
    assert compare(module, module.forward, x).failure == ""
    assert compare(module, lambda x: 2 * module.forward(x), x).failure


def test_dropout_does_not_stand_in_the_way_of_a_comparison() -> None:
    module = block().train()
    assert compare(module, lambda x: module.forward(x.clone()), X).failure == ""
    assert all(m.training for m in module.modules())


def test_every_spelling_of_dropout_is_switched_off_in_a_comparison() -> None:
    class Dropping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.dropout(x, p=0.5, train=True)
            return super().forward(F.dropout(x, 0.5, training=self.training))

    module = Dropping(16, 4).train()
    assert compare(module, lambda x: module.forward(x.clone()), X).failure == ""


def test_random_numbers_that_fall_on_other_elements_are_an_objection() -> None:
    module = block().train()
    assert "on other elements" in compare(module, lambda x: module.forward(x.flip(0)).flip(0), X).failure


@pytest.mark.parametrize("in_other_orders", [True, False])
def test_another_amount_of_random_numbers_is_an_objection(in_other_orders: bool) -> None:
    module = nn.Linear(16, 4)
    for draw in (lambda: torch.rand(3), random.random, lambda: numpy.random.rand(3)):
        drawing = TrialSide(lambda x, draw=draw: (draw(), module.forward(x))[1])
        found = Trial(module, (X,)).numbers(TrialSide(module.forward), drawing, in_other_orders=in_other_orders)
        assert "another amount of random numbers" in found.failure


def test_both_sides_draw_the_same_numbers_from_every_stream() -> None:
    module = nn.Linear(16, 4)
    drawing = TrialSide(lambda x: module.forward(x) * torch.rand(()) * random.random() * numpy.random.rand())
    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].copy()
    found = Trial(module, (X,), wide=drawing.call).numbers(drawing, drawing)
    assert (found.failure, found.is_same) == ("", True)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert (numpy.random.get_state()[1] == states[2]).all()


@pytest.mark.parametrize("in_other_orders", [True, False])
def test_results_that_lie_otherwise_in_memory_are_an_objection(in_other_orders: bool) -> None:
    module = nn.Linear(16, 4)
    trial = Trial(module, (X,))
    turned = TrialSide(lambda x: module.forward(x).mT.contiguous().mT)
    found = trial.numbers(TrialSide(module.forward), turned, in_other_orders=in_other_orders)
    assert "lie otherwise" in found.failure


def test_strides_of_dimensions_of_one_are_no_objection() -> None:
    module = nn.Linear(16, 1)
    alike = compare(module, lambda x: module.forward(x).mT.contiguous().mT, X)
    assert alike.failure == ""


def test_without_an_oracle_the_two_see_the_same_random_numbers() -> None:
    module = block().train()
    found = Trial(module, (X,)).numbers(TrialSide(module.forward), TrialSide(module.forward), in_other_orders=False)
    assert (found.failure, found.error) == ("", 0.0)


def test_spread_is_measured_on_a_few_samples_and_the_whole_batch_is_computed_once() -> None:
    seen: list[int] = []
    module = nn.Linear(4, 4)

    def candidate(x: Tensor) -> Tensor:
        seen.append(x.shape[0])
        return module.forward(x)

    compare(module, candidate, torch.randn(64, 4))
    assert sorted(seen) == [4, 64]


def test_a_module_that_needs_its_whole_batch_gets_it() -> None:
    class Paired(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(8, 2, -1).sum(1)

    module = Paired()
    assert compare(module, module.forward, torch.randn(16, 3)).failure == ""


def test_a_module_that_cannot_be_copied_is_compared_without_an_oracle() -> None:
    module = nn.Linear(4, 4)
    module.cached = module(torch.zeros(1, 4))  # not a leaf: deepcopy refuses it
    assert compare(module, module.forward, torch.randn(4, 4)).failure == ""
    assert compare(module, lambda x: module.forward(x) + 0.1, torch.randn(4, 4)).failure


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_frozen_module_with_inputs_that_need_no_gradient_is_compared_by_its_outputs(with_gradients: bool) -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    assert compare(module, module.forward, torch.randn(4, 4), with_gradients=with_gradients).failure == ""
    assert compare(module, lambda x: -module.forward(x), torch.randn(4, 4), with_gradients=with_gradients).failure


class Spectrum(nn.Module):
    """Complex inside and out, as Fourier operators are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x) * self.weight


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Embedding(5, 4, sparse=True), torch.tensor([0, 3, 3])),
        (Spectrum(), torch.randn(2, 4)),
        (nn.Identity(), torch.eye(3).to_sparse()),
    ],
    ids=["sparse gradients", "complex numbers", "sparse inputs"],
)
def test_tensors_of_other_kinds_are_compared_too(module: nn.Module, x: Tensor) -> None:
    assert compare(module, module.forward, x).failure == ""
    assert compare(module, lambda x: 1.1 * module.forward(x), x).failure


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_trials_without_gradients_work_in_every_mode(mode: Callable[[], Any]) -> None:
    module = ResidualBlock(3)
    with mode():
        found = compare(module, module.forward, images(0)[0] * 1.0, with_gradients=False)
    assert found.failure == ""


# -- relative errors -----------------------------------------------------------------------------------------------


def test_zeros_with_rounding_noise_are_no_difference() -> None:
    assert relative_error([torch.tensor([1e-9]), torch.ones(3)], [torch.tensor([-1e-9]), torch.ones(3)]) < 1e-6


@pytest.mark.parametrize(
    ("actual", "expected", "is_same"),
    [
        ([float("nan")], [float("nan")], True),
        ([float("-inf")], [float("-inf")], True),
        ([float("nan")], [1.0], False),
        ([1.0], [float("inf")], False),
        ([float("inf")], [float("-inf")], False),
        ([1.0, float("inf")], [2.0, float("inf")], False),
        ([], [], True),
    ],
)
def test_non_finite_values_must_stand_in_the_same_places(
    actual: list[float], expected: list[float], is_same: bool
) -> None:
    assert (relative_error([torch.tensor(actual)], [torch.tensor(expected)]) == 0.0) is is_same


class OnMetal(Tensor):
    """A tensor that says it is on an Apple GPU, which has no float64 (simulated: it lies in the host's memory)."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:  # made anew at each access
            return torch.device("mps")
        if func is Tensor.double:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        if func is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_on_a_device_without_float64_the_host_compares() -> None:
    expected = torch.tensor([3.0, 4.0]).as_subclass(OnMetal)
    actual = torch.tensor([3.0, 4.5]).as_subclass(OnMetal)
    assert relative_error([actual], [expected]) == pytest.approx(0.1)


@pytest.mark.parametrize(("allowed", "is_kept"), [("ieee", False), ("tf32", False), ("bf16", True)])
def test_products_that_the_run_allows_to_be_rounded_are_no_objection(allowed: str, is_kept: bool) -> None:
    """Whether a processor rounds them or not: beside an original that it rounds, an exact candidate would be wrong."""
    module, x = nn.Linear(64, 64), torch.randn(8, 64)

    def rounded(x: Tensor) -> Tensor:
        return nn.functional.linear(x.bfloat16(), module.weight.bfloat16(), module.bias.bfloat16()).float()

    with allowing("matmul", allowed):
        found = Trial(module, (x,)).numbers(TrialSide(module.forward), TrialSide(rounded))
    assert (not found.failure) == is_kept, found.failure


@pytest.mark.parametrize(("allowed", "is_kept"), [("ieee", False), ("bf16", True)])
def test_nor_are_convolutions_that_the_run_allows_to_be_rounded(allowed: str, is_kept: bool) -> None:
    module, x = nn.Conv2d(3, 8, 3), images(0)[0]

    def rounded(x: Tensor) -> Tensor:
        return copy.deepcopy(module).bfloat16()(x.bfloat16()).float()

    with allowing("conv", allowed):
        found = Trial(module, (x,), with_gradients=False).numbers(TrialSide(module), TrialSide(rounded))
    assert (not found.failure) == is_kept, found.failure


def test_cudnn_may_round_convolutions_unless_it_was_told_otherwise() -> None:
    """Torch's own default, of which matrix products are no part."""
    gpu = torch.device("cuda")
    assert dtype_of_products(gpu, convolves=True) is torch.float16
    assert dtype_of_products(gpu) is None
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert dtype_of_products(gpu, convolves=True) is None
