"""One pass of a trial: forward, and backward if gradients are compared, on copies of the user's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.torch_private.tensors import version_of
from lightning_accel.core.tree import map_tensors, tensors_in

Call = Callable[..., Any]


@dataclass
class Passes:
    """Runs passes of computations that may replace each other."""

    module: nn.Module  # gradients of its parameters are compared
    with_gradients: bool = True  # whether there is a backward pass
    judged: Callable[[Any], Any] = lambda outputs: outputs  # selects the outputs to compare
    writes_to_input: bool = False  # whether a computation has written into its arguments (copies, here)
    num_outputs: int = 0  # the number of outputs, which precede the gradients in the latest results

    def results(self, call: Call, args: Any, kwargs: Any) -> list[Tensor]:
        """Returns outputs, then gradients of inputs and parameters: floating-point only, detached, dense and real."""
        leaves, inputs = self.copies(args, kwargs)
        results = self._forward_and_backward(call, leaves, inputs, _random_cotangent)
        self.writes_to_input |= any(version_of(t) for t in tensors_in(inputs) if not t.is_inference())
        return [_comparable(t) for t in results]

    def prepared(self, call: Call, args: Any, kwargs: Any) -> Callable[[], object]:
        """Returns a pass to be timed, on new copies of the arguments. It can run once."""
        leaves, inputs = self.copies(args, kwargs)
        return lambda: self._forward_and_backward(call, leaves, inputs, torch.ones_like)

    def saved_elements(self, call: Call, args: Any, kwargs: Any) -> int:
        """Counts what a forward pass saves for its backward pass: one sample of long attention can be gigabytes."""
        saved: dict[torch.UntypedStorage, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()  # the same object for all tensors on it
            saved[storage] = storage.nbytes() // tensor.element_size()
            return tensor.detach()  # otherwise a result held by its own node would keep itself alive

        _, inputs = self.copies(args, kwargs)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            call(*inputs[0], **inputs[1])
        return sum(saved.values())

    def copies(self, args: Any, kwargs: Any) -> tuple[list[Tensor], tuple[Any, Any]]:
        """Returns leaves for gradients, and copies to call with: a call may write to its input (``x -= mean``)."""
        with torch.set_grad_enabled(self.with_gradients):
            originals = map_tensors(_fresh_leaf if self.with_gradients else Tensor.detach, (args, kwargs))
            leaves = [t for t in tensors_in(originals) if t.requires_grad]
            return leaves, map_tensors(Tensor.clone, originals)

    def _forward_and_backward(
        self, call: Call, leaves: list[Tensor], inputs: tuple[Any, Any], cotangent: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        with torch.set_grad_enabled(self.with_gradients):
            outputs = [t for t in tensors_in(self.judged(call(*inputs[0], **inputs[1]))) if _has_numbers(t)]
            wanted = leaves + [p for p in self.module.parameters() if p.requires_grad]
            self.num_outputs = len(outputs)
            differentiable = [t for t in outputs if t.requires_grad]
            if not (self.with_gradients and differentiable and wanted):
                return outputs
            cotangents = [cotangent(t) for t in differentiable]
            gradients = torch.autograd.grad(differentiable, wanted, cotangents, allow_unused=True)
        # An unused input has no gradient. Zeros give the lists of both sides the same length.
        return outputs + [torch.zeros_like(w) if g is None else g for g, w in zip(gradients, wanted, strict=True)]


def _fresh_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


_DRAWN = 65_537  # a prime, so that the repeated draws differ between the rows and samples of a result


@functools.cache
def _draws(device: torch.device, dtype: torch.dtype) -> Tensor:
    # Drawn in float32 and rounded, so that every dtype has the gradient in the same direction.
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_DRAWN, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)


def _random_cotangent(output: Tensor) -> Tensor:
    draws = _draws(output.device, output.dtype)
    return draws.repeat(-(-output.numel() // _DRAWN))[: output.numel()].view(output.shape)


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _comparable(tensor: Tensor) -> Tensor:
    """Returns the tensor detached, dense and real, for norms and differences."""
    tensor = tensor.detach()
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
