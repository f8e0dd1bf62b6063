"""CUDA graphs where there is no GPU: like torch's, they work in memory of their own, overwritten at every replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """One that can be captured, (…, 4) → (…, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class SimulatedGraphs:
    """Captures functions of tensors, where ``capture_on_cuda`` would be given.

    Attributes:
        captures: How many functions were captured.
        replays: How many forward passes were replayed.
    """

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Callable[..., Any]:
        self.captures += 1
        held: dict[str, Any] = {}

        def run() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                result = function(*tensors)
            held["structure"] = result
            return result if isinstance(result, tuple) else (result,)

        held["outputs"] = run()
        static_outputs = tuple(out.detach().clone() for out in held["outputs"])
        static_gradients = [torch.zeros_like(t) if t.requires_grad else None for t in tensors]

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
                self.replays += 1
                for static, now in zip(tensors, inputs, strict=True):
                    if static.data_ptr() != now.data_ptr():
                        static.detach().copy_(now)
                held["outputs"] = run()
                for static, now in zip(static_outputs, held["outputs"], strict=True):
                    static.copy_(now.detach())
                return tuple(out.detach() for out in static_outputs)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Any:
                wanted = [t for t in tensors if t.requires_grad]
                made = iter(
                    torch.autograd.grad(held["outputs"], wanted, gradients, allow_unused=True, retain_graph=True)
                )
                for static in static_gradients:
                    if static is not None:
                        now = next(made)
                        static.zero_() if now is None else static.copy_(now)
                return tuple(None if static is None else static.detach() for static in static_gradients)

        def graphed(*inputs: Tensor) -> Any:
            outputs = Graphed.apply(*inputs)
            return outputs if isinstance(held["structure"], tuple) else outputs[0]

        return graphed
