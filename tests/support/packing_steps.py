"""What the tests of packing share: sparse tensors of a size worth packing, a step, and memory that is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.memory.packer import Packer
from lightning_accel.memory.saved_tensors import saving

SIZE = (64, 1024)  # 256 KiB of float32
BYTES = 4 * 64 * 1024
BITS = BYTES // 32


def patient() -> Packer:
    """A packer that does not look at the clock."""
    return Packer(max_time_share=float("inf"))


@contextmanager
def step(packer: Packer, model: nn.Module | None = None) -> Iterator[None]:
    packer.begin_step()
    with saving(packer, model or nn.Module()):
        yield
    packer.end_step()


def sparse(*size: int, density: float = 0.1) -> Tensor:
    size = size or SIZE
    return torch.randn(size).where(torch.rand(size) < density, 0.0)  # a product with zero may be a negative one


def held_bytes(forward: Callable[[], Any]) -> int:
    """What is allocated when ``forward`` has returned, and was not before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = forward()
    assert profiler.profiler is not None
    del result
    return sum(e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")


class Allocations(TorchDispatchMode):
    """Counts the tensors that codecs make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.empty_strided.default
        return func(*args, **(kwargs or {}))
