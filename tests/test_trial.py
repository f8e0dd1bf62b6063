"""A trial tells good candidates from bad ones, and leaves the run as if there had been none."""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.isolation import isolated
from lightning_accel.trial import Comparison, Contender, Trial, relative_error
from models import ResidualBlock, TransformerBlock, images

Call = Callable[..., Any]


def compare(module: nn.Module, candidate: Call, *args: Any, **options: Any) -> Comparison:
    return Trial(module, args, **options).numbers(Contender(module.forward), Contender(candidate))


# -- the verdict ---------------------------------------------------------------------------------------------------

X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))


def block() -> TransformerBlock:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TransformerBlock()


def shifted(module: nn.Module) -> Call:
    return lambda x: module.forward(x) + 1e-2


def wrong_gradient(module: nn.Module) -> Call:
    return lambda x: module.forward(x) + (x - x.detach())


def cut_off(module: nn.Module) -> Call:
    return lambda x: module.forward(x).detach()


def raises(error: Exception) -> Callable[[nn.Module], Call]:
    def make(module: nn.Module) -> Call:
        def call(x: Tensor) -> Tensor:
            raise error

        return call

    return make


GOOD: dict[str, Callable[[nn.Module], Call]] = {
    "itself": lambda module: module.forward,
    "another order of operations": lambda module: lambda x: module.forward(x.flip(1)).flip(1),
    "rounding": lambda module: lambda x: module.forward(x) * (1 + 1e-7),
}
BAD: dict[str, tuple[Callable[[nn.Module], Call], str]] = {
    "shifted outputs": (shifted, "other numbers than the original: relative error"),
    "wrong gradients": (wrong_gradient, "other numbers"),
    "no gradients": (cut_off, "other (numbers|shapes)"),
    "another shape": (lambda module: lambda x: module.forward(x)[:, :1], "other shapes"),
    "another count": (lambda module: lambda x: (module.forward(x), x), "other shapes"),
    "nothing": (lambda module: lambda x: None, "other shapes"),
    "not a number": (lambda module: lambda x: module.forward(x) * float("nan"), "other numbers"),
    "an exception": (raises(ValueError("no such kernel\nstack")), r"failed in its trial: ValueError: no such kernel$"),
    "no memory": (raises(torch.OutOfMemoryError("tried to allocate")), "failed in its trial: OutOfMemoryError"),
    "a silent exception": (raises(AssertionError()), "failed in its trial: AssertionError$"),
}


def modifies_what_backward_needs(module: nn.Module) -> Call:
    """The exponential of zero rows is one: multiplying it by one changes no number, and yet backward() refuses."""

    def call(x: Tensor) -> Tensor:
        y = torch.exp(module.forward(x) * 0)
        result = module.forward(x) + (y - 1)
        y.mul_(1.0)
        return result

    return call


def test_a_candidate_whose_backward_pass_would_raise_in_the_run_fails_in_its_trial() -> None:
    module = block().eval()
    found = compare(module, modifies_what_backward_needs(module), X.clone().requires_grad_())
    assert found.failure == (
        "failed in its trial: RuntimeError: a tensor that its backward pass needs was modified in place"
    )


@pytest.mark.parametrize("make", GOOD.values(), ids=GOOD)
def test_a_candidate_with_the_same_numbers_agrees(make: Callable[[nn.Module], Call]) -> None:
    module = block().eval()
    found = compare(module, make(module), X.clone().requires_grad_())
    assert found.failure == ""
    assert found.error <= found.allowed_error
    assert found.compared == 1 + 1 + len(list(module.parameters()))


@pytest.mark.parametrize(("make", "reason"), BAD.values(), ids=BAD)
def test_a_bad_candidate_is_refused_with_the_reason(make: Callable[[nn.Module], Call], reason: str) -> None:
    module = block().eval()
    found = compare(module, make(module), X.clone().requires_grad_())
    assert re.search(reason, found.failure)


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
    assert compare(module, lambda x: module.forward(x.flip(0)).flip(0), X).failure == ""
    assert all(m.training for m in module.modules())


def test_without_an_oracle_the_two_see_the_same_random_numbers() -> None:
    module = block().train()
    found = Trial(module, (X,)).numbers(Contender(module.forward), Contender(module.forward), with_oracle=False)
    assert (found.failure, found.error) == ("", 0.0)


def test_the_oracle_sees_a_few_samples_only() -> None:
    seen: list[int] = []
    module = nn.Linear(4, 4)

    def candidate(x: Tensor) -> Tensor:
        seen.append(x.shape[0])
        return module.forward(x)

    compare(module, candidate, torch.randn(64, 4))
    assert set(seen) == {4}


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


# -- the clock -----------------------------------------------------------------------------------------------------


def test_a_candidate_that_sleeps_is_slower() -> None:
    module = nn.Linear(4, 4)

    def asleep(x: Tensor) -> Tensor:
        time.sleep(0.15)
        return module.forward(x)

    found = Trial(module, (torch.randn(4, 4),)).time(Contender(module.forward), Contender(asleep))
    assert found.candidate_ms > 10 * found.original_ms


def test_a_candidate_that_raises_only_when_timed_is_a_failure_not_an_exception() -> None:
    module = nn.Linear(4, 4)
    found = Trial(module, (torch.randn(4, 4),)).time(
        Contender(module.forward), Contender(raises(RuntimeError("later"))(module))
    )
    assert found.failure == "failed in its trial: RuntimeError: later"
    assert found.original_ms is None


# -- no trace ------------------------------------------------------------------------------------------------------


class Forgetful(nn.Module):
    """Changes, in forward, everything that a module can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("in_place", torch.zeros(4))
        self.register_buffer("assigned", torch.zeros(4))
        self.register_buffer("absent", None)
        self.plain = torch.zeros(4)
        self.calls = 0
        self.last: Tensor | None = None
        self.history: list[Any] = []
        self.ring = [0, 0]
        self.cache: dict[str, Any] = {"x": None}
        self.seen: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.in_place.add_(1)
        self.assigned = 0.9 * self.assigned + x.detach().mean(0)
        self.absent = torch.ones(1)
        self.plain.add_(1)
        self.calls += 1
        self.last = x
        self.history.append(x)
        self.ring[0] += 1
        self.cache["x"] = x
        self.seen.add(len(self.seen))
        self.fresh = True
        scale = random.random() + np.random.rand() + torch.rand(())
        x = self.norm(self.linear(x))
        if self.calls > 1_000:
            raise AssertionError("never restored")
        return scale * x


CHANGED = {
    *("in_place", "assigned", "absent", "plain", "calls", "last", "history", "ring", "cache", "seen", "fresh"),
    *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "random", "numpy.random"),
}


def everything(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """All of the state that a trial might touch, in comparable form."""
    plain = {
        f"{name}.{key}": copy.copy(value) if isinstance(value, list | dict | set) else value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in ("_parameters", "_buffers", "_modules")
    }
    buffers = {name: (id(buffer), buffer.tolist()) for name, buffer in module.named_buffers()}
    return {
        "plain": {k: v.tolist() if isinstance(v, Tensor) else v for k, v in plain.items()},
        "buffers": buffers,
        "slots": {name: list(part._buffers) for name, part in module.named_modules()},
        "gradients": [None if p.grad is None else p.grad.tolist() for p in module.parameters()],
        "versions": [p._version for p in module.parameters()],
        "input": (x.tolist(), x._version, None if x.grad is None else x.grad.tolist()),
        "torch random": torch.get_rng_state().tolist(),
        "python random": random.getstate(),
        "numpy random": np.random.get_state()[1].tolist(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "training": [m.training for m in module.modules()],
    }


def crashing(module: nn.Module) -> Call:
    def call(x: Tensor) -> Tensor:
        module.forward(x)
        raise RuntimeError("at the very end")

    return call


@pytest.mark.parametrize("method", ["numbers", "time"])
@pytest.mark.parametrize("candidate", [lambda m: m.forward, crashing], ids=["that works", "that raises"])
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_trial_leaves_no_trace(
    method: str, candidate: Callable[[nn.Module], Call], with_gradients: bool, has_gradient: bool
) -> None:
    module = Forgetful()
    x = torch.randn(8, 4, requires_grad=True)
    if has_gradient:
        F.linear(x, module.linear.weight).sum().backward()
    before = everything(module, x)
    trial = Trial(module, (x,), with_gradients=with_gradients)
    getattr(trial, method)(Contender(module.forward), Contender(candidate(module)))
    assert everything(module, x) == before


def test_a_trial_tells_what_the_forward_pass_changed() -> None:
    module = Forgetful()
    assert set(compare(module, module.forward, torch.randn(8, 4)).left_behind) == CHANGED


def test_an_input_that_is_written_in_place_is_not_the_users() -> None:
    class Normalizing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x -= 1.0
            return x * 2

    module, x = Normalizing(), torch.zeros(4, 4)
    for with_gradients in (True, False):
        found = compare(module, module.forward, x, with_gradients=with_gradients)
        assert (found.failure, found.left_behind) == ("", ("its input",))
    Trial(module, (x,)).time(Contender(module.forward), Contender(module.forward))
    assert torch.equal(x, torch.zeros(4, 4))


def test_an_in_place_activation_at_the_start_of_a_block_is_no_obstacle() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    hidden = torch.randn(4, 4, requires_grad=True) * 1.0
    assert compare(module, module.forward, hidden).failure == ""


def test_a_dict_that_the_forward_pass_fills_is_not_the_users() -> None:
    class Filling(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            batch["y"] = batch["x"] + 1
            return batch

    module, batch = Filling(), {"x": torch.zeros(4, 4)}
    assert compare(module, module.forward, batch).failure == ""
    assert list(batch) == ["x"]


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


def test_someone_who_counts_operations_does_not_see_a_trial() -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    module = nn.Linear(4, 4)
    with Counting() as counting, isolated(module):
        counting.count = 0
        module(torch.randn(4, 4))
    assert counting.count == 0


def test_someone_who_counts_saved_tensors_does_not_see_a_trial() -> None:
    saved: list[Tensor] = []
    module = nn.Linear(4, 4)
    x = torch.randn(4, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        compare(module, module.forward, x)
    assert saved == []


def test_isolation_nests() -> None:
    module = Forgetful()
    x = torch.randn(8, 4)
    before = everything(module, x)
    with isolated(module) as outer:
        module(x)
        with isolated(module) as inner:
            module(x)
        assert module.calls == 1
    assert set(inner) <= set(outer)
    assert everything(module, x) == before


def test_isolation_ends_with_an_exception_too() -> None:
    module = Forgetful()

    def interrupted() -> None:
        with isolated(module):
            module(torch.randn(8, 4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert module.calls == 0
    assert torch.equal(module.norm.running_mean, torch.zeros(4))


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
