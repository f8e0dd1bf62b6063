"""Plain loops whose optimizer steps in another way than the user's, and what that launches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from support.technique_table import off

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


class Operations(TorchDispatchMode):
    """The names of the operations under it, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations(step: Optimizer | Callable[[], Any]) -> list[str]:
    """What one step of an optimizer launches."""
    with Operations() as seen:
        (step.step if isinstance(step, Optimizer) else step)()
    return [name for name in seen.names if not name.startswith("_record_function")]


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Parameters that are longer than a vector register, and others that are shorter."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 37), nn.Tanh(), nn.Linear(37, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)


def alone(setting: str, model: nn.Module, optimizers: Any = ()) -> AcceleratedModel:
    """A plan of this technique only, without live trials: the test does the switching."""
    return accelerate(
        model, Plan().replace(**off() | {"optimizer": setting, "trust": "checked"}), optimizers=optimizers
    )


class Loop:
    """A model and its optimizer, with a handle or without."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, setting: str = "off") -> None:
        self.model = model
        self.optimizer = make(model.parameters())
        self.handle = alone(setting, model, self.optimizer)

    def gradients(self, index: int) -> None:
        """Forward and backward on the batch of this number."""
        weight = next(self.model.parameters())
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(index)).to(weight)
        self.optimizer.zero_grad()
        with self.handle.step():
            loss = self.model(inputs).square().mean()
        loss.backward()

    def run(self, steps: range) -> None:
        for index in steps:
            self.gradients(index)
            self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def patch(self) -> Any:
        """The edit of its optimizer."""
        (patch,) = next(run for run in self.handle.engine._runs if run.name == "optimizer").optimizer_patches
        return patch

    def refused(self) -> dict[str, str]:
        return self.handle.report.refused("optimizer")


def plain_and(setting: str, make: MakeOptimizer, dtype: torch.dtype = torch.float64) -> tuple[Loop, Loop]:
    """Twice the same loop: as the user has it, and with the technique."""
    model = network(dtype)
    return Loop(copy.deepcopy(model), make), Loop(model, make, setting)


def assert_same_training(loop: Loop, plain: Loop, tolerance: float = 1e-13) -> None:
    """Weights and states are equal to rounding; flags, names and types in the checkpoint exactly."""
    torch.testing.assert_close(loop.weights(), plain.weights(), rtol=tolerance, atol=tolerance)
    saved, expected = loop.optimizer.state_dict(), plain.optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert {index: list(state) for index, state in saved["state"].items()} == {
        index: list(state) for index, state in expected["state"].items()
    }
    torch.testing.assert_close(saved["state"], expected["state"], rtol=tolerance, atol=tolerance)
