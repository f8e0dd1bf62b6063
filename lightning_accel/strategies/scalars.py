"""Scalar parameters of a sharded module: replicated, as FSDP shards along a dimension and scalars have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


class ReplicatedScalars:
    """The scalar parameters of a module: plain for the module's code, DTensors for its optimizers.

    An optimizer, a gradient scaler and the clipping of gradients need parameters of one kind, DTensors if all others
    are. Both forms share their memory, so that the code sees each optimizer step. As under DDP, a backward pass on only
    some of the ranks makes these wait. The mesh is one-dimensional.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._slots = [
            (part, name, parameter)
            for part in module.modules()
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
            if parameter.dim() == 0 and not isinstance(parameter, DTensor)
        ]
        self._replicated = {p: nn.Parameter(self._spread(p.detach()), p.requires_grad) for *_, p in self._slots}

    @contextmanager
    def for_optimizers(self) -> Iterator[None]:
        """Replaces the module's scalar parameters by the DTensors within the context."""
        for part, name, parameter in self._slots:
            setattr(part, name, self._replicated[parameter])
        try:
            yield
        finally:
            for part, name, parameter in self._slots:
                setattr(part, name, parameter)

    def before_backward(self) -> None:
        """Clears gradients that the optimizer has cleared. Call it before each backward pass."""
        for plain, replicated in self._replicated.items():
            if replicated.grad is None:
                plain.grad = None

    def after_backward(self) -> None:
        """Averages the gradients over the ranks. A collective call, to be made after each backward pass.

        The average of an earlier pass of an accumulation does not change, since it is the same on every rank.
        """
        if not self._replicated:
            return
        with torch.no_grad():
            zero = torch.zeros((), dtype=torch.float64, device=next(iter(self._replicated)).device)
            gradients = [p.grad if r.requires_grad else None for p, r in self._replicated.items()]
            values = [zero if gradient is None else gradient.double() for gradient in gradients]
            used = [zero if gradient is None else zero + 1 for gradient in gradients]
            sums = torch.stack([torch.stack(values), torch.stack(used)])
            torch.distributed.all_reduce(sums, group=self._mesh.get_group())
            parameters = self._replicated.items()
            for (plain, replicated), gradient, total, users in zip(parameters, gradients, *sums, strict=True):
                if gradient is None and not users:
                    plain.grad = None  # as in a single process
                    continue
                plain.grad = (total / self._mesh.size()).to(plain.dtype)
                replicated.grad = self._spread(plain.grad)

    def _spread(self, tensor: torch.Tensor) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
