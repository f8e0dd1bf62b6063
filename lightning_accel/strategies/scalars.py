"""Scalar parameters of a sharded module: whole on every rank, as FSDP shards along a dimension and these have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


class ReplicatedScalars:
    """The scalar parameters of a module, which its code sees as they are and its optimizers as DTensors.

    An optimizer, a gradient scaler and the clipping of gradients take parameters of one kind, DTensors where all others
    are. The two share their memory, so that a step of the optimizer is seen by the code. As under DDP, a backward pass
    that only some of the ranks take leaves these waiting. The mesh is one-dimensional.
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
        """Inside, the module has the DTensors as its parameters."""
        for part, name, parameter in self._slots:
            setattr(part, name, self._replicated[parameter])
        try:
            yield
        finally:
            for part, name, parameter in self._slots:
                setattr(part, name, parameter)

    def before_backward(self) -> None:
        """To be called before each backward pass: forgets gradients that the optimizer has forgotten."""
        for plain, replicated in self._replicated.items():
            if replicated.grad is None:
                plain.grad = None

    def after_backward(self) -> None:
        """To be called after each backward pass: averages the gradients over the ranks. A collective call.

        What was averaged after an earlier pass of an accumulation stays what it is, being the same on every rank.
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
                    plain.grad = None  # as it is without a group of ranks
                    continue
                plain.grad = (total / self._mesh.size()).to(plain.dtype)
                replicated.grad = self._spread(plain.grad)

    def _spread(self, tensor: torch.Tensor) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
