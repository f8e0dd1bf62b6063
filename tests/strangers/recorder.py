"""A callback that notes what a run's own code can feel of it, and the signatures by which two runs are compared."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_DEPTH = 6
_LIGHTNINGS = {"_trainer", "_fabric", "trainer", "_fabric_optimizers", "_jit_is_scripting"}
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, ModuleType)


class Recorder(Callback):
    """Notes each step of a run, and changes nothing of it.

    Args:
        elsewhere: What keeps tensors, and is not the module's.

    Attributes:
        losses: Whatever each step returned, as numbers.
        batches: A digest of each batch as ``training_step`` got it.
        layouts: Type, dtype and shape of the tensors of each batch; its strides are a step's own affair.
        streams: A digest of the generators of python, numpy and torch, after each step.
        outliving: The signature of each tensor that the module can reach after a step, by its path; parameters apart.
        grads: What ``on_after_backward`` sees of the gradients: the dtype and shape of each.
        returned: The signature of each tensor that a step returned.
        turns: In how many batches an optimizer has stepped.
    """

    def __init__(self, elsewhere: Any = None) -> None:
        self.elsewhere = elsewhere
        self.losses: list[list[float]] = []
        self.batches: list[str] = []
        self.layouts: list[Any] = []
        self.streams: list[dict[str, str]] = []
        self.outliving: list[dict[str, Any]] = []
        self.grads: list[Any] = []
        self.returned: list[Any] = []
        self.turns = 0
        self._steps = 0

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.grads.append([(g.dtype, tuple(g.shape)) for g in grads])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        tensors = list(tensors_of(batch))
        self.batches.append(digest(tensors, *others_of(batch)))
        self.layouts.append([signature(tensor)[:3] for tensor in tensors])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.turns += trainer.global_step != self._steps
        self._steps = trainer.global_step
        returned = [outputs] if isinstance(outputs, Tensor) else list(tensors_of(outputs))
        self.returned.append([signature(tensor) for tensor in returned])
        logged = [v for k, v in sorted(trainer.callback_metrics.items()) if not k.startswith("accel/")]
        numbers = [t.detach() for t in [*returned, *logged] if isinstance(t, Tensor) and t.numel()]
        self.losses.append([float(abs(t.double() if not t.is_complex() else t).mean()) for t in numbers])
        self.streams.append(streams())
        self.outliving.append({path: signature(tensor) for path, tensor in outliving(pl_module, self.elsewhere)})


def streams() -> dict[str, str]:
    """A digest of each of the process's random streams."""
    return {
        "python": hashlib.sha1(pickle.dumps(random.getstate())).hexdigest(),
        "numpy": hashlib.sha1(pickle.dumps(np.random.get_state())).hexdigest(),
        "torch": digest([torch.get_rng_state()]),
    }


def signature(tensor: Tensor) -> tuple[Any, ...]:
    """What code can trip over: the type, the dtype, the shape, the device, and the strides where they mean anything."""
    if is_lazy(tensor):
        return (type(tensor).__name__,)
    strides = None if tensor.layout is not torch.strided else _strides(tensor)
    return type(tensor).__name__, tensor.dtype, tuple(tensor.shape), tensor.device.type, strides, tensor.requires_grad


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def digest(tensors: list[Tensor], *others: Any) -> str:
    found = hashlib.sha1(repr(others).encode())
    for tensor in tensors:
        dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
        found.update(pickle.dumps(dense.contiguous().reshape(-1).tolist()))
    return found.hexdigest()


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Those in a batch, or in what a step returned."""
    yield from (tensor for _, tensor in _walk("", value, set(), _DEPTH))


def others_of(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from others_of(one)
    elif isinstance(value, str | int | float):
        yield value


def outliving(module: nn.Module, elsewhere: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors but parameters that a module's attributes, or what is elsewhere, lead to, by their path."""
    seen: set[int] = {id(parameter) for parameter in module.parameters()}
    yield from _walk("", module, seen, 12)
    yield from _walk("elsewhere", elsewhere, seen, _DEPTH)


def _walk(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, _LEAVES) or (callable(value) and not isinstance(value, nn.Module)):
        return
    if isinstance(value, Tensor):
        if id(value) not in seen:
            yield path, value
        return
    if id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        children = [(f"{path}[{key!r}]" if not isinstance(key, Tensor) else path, one) for key, one in value.items()]
    elif isinstance(value, list | tuple | deque | set | frozenset):
        children = [(f"{path}[{index}]", one) for index, one in enumerate(value)]
    elif isinstance(value, nn.Module):
        own = {name: one for name, one in vars(value).items() if name not in _LIGHTNINGS and not _is_hooks(name)}
        parts = {**own.pop("_buffers"), **own.pop("_modules"), **own}
        parts.pop("_parameters", None)
        children = [(f"{path}.{name}".lstrip("."), one) for name, one in parts.items()]
    elif hasattr(value, "__dict__") and not type(value).__module__.startswith(("lightning", "torch.utils.data")):
        children = [(f"{path}.{name}", one) for name, one in vars(value).items()]
    else:
        return
    for name, one in children:
        yield from _walk(name, one, seen, depth - 1)


def _is_hooks(name: str) -> bool:
    return name.endswith("_hooks") or name.endswith("_hooks_with_kwargs") or name.endswith("_always_called")
