"""A trial leaves the run as if there had been none."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.core.isolation import isolated
from lightning_accel.experiment.trial import Trial
from lightning_accel.experiment.trial_runs import TrialSide
from support.trial_cases import Call, compare

pytestmark = pytest.mark.numbers


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
    getattr(trial, method)(TrialSide(module.forward), TrialSide(candidate(module)))
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
    Trial(module, (x,)).time(TrialSide(module.forward), TrialSide(module.forward))
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


def test_nothing_that_a_trial_made_stays_alive() -> None:
    """A result that its own backward pass needs, as softmax's is, keeps itself alive if it is packed as it stands."""
    module = nn.Softmax(dim=-1)
    x = torch.randn(4, 6, 7, 5, requires_grad=True)
    assert not compare(module, module.forward, x).failure
    gc.collect()
    assert [t for t in gc.get_objects() if type(t) is Tensor and t.shape[1:] == (6, 7, 5)] == [x]


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
