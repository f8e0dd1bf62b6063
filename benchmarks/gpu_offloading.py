"""Activation offloading on a GPU: step time and peak memory, beside what PyTorch and torchtune have for it.

    python benchmarks/gpu_offloading.py [--json docs/results]

To answer: at most the step time, and at most the peak, of ``save_on_cpu(pin_memory=True)`` and of torchtune's
``OffloadActivations`` (a row of its own where torchtune is installed: ``pip install torchtune torchao``). All of them
take tensors of a mebibyte and more, except ``save_on_cpu``, which takes all.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from _measure import interleaved_ms, median_ratio, peak_step_bytes, publish
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.plan import OffloadingPlan
from lightning_accel.techniques.activation_offloading import ActivationOffloading

WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 2048, 16, 24, 8, 2048
MIN_BYTES = 1 << 20
MEASURED_STEPS = 30  # until the prefetch depth is settled

Around = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    """A pre-norm transformer block with fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 3 * HEADS, -1).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


def sides(model: nn.Module, device: torch.device) -> tuple[dict[str, Around], ActivationOffloading]:
    """What to enter around the forward pass, by name."""
    technique = ActivationOffloading(OffloadingPlan(min_bytes=MIN_BYTES), model, device)
    found: dict[str, Around] = {
        "everything stays": nullcontext,
        "save_on_cpu(pin_memory=True)": lambda: torch.autograd.graph.save_on_cpu(pin_memory=True),
        "activation_offloading='host'": lambda: technique.step("train"),
    }
    try:
        from torchtune.training import OffloadActivations
    except ImportError:
        print("torchtune is not installed: its row is left out")
    else:
        theirs = OffloadActivations(min_offload_size=MIN_BYTES)
        found["torchtune's OffloadActivations"] = lambda: theirs
    return found, technique


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device, torch.bfloat16)
    inputs = torch.randn(BATCH, LENGTH, WIDTH, device=device, dtype=torch.bfloat16)
    around, technique = sides(model, device)

    def step(name: str) -> None:
        with around[name]():
            loss = model(inputs).float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    steps = {name: lambda name=name: step(name) for name in around}  # type: ignore[misc]
    for _ in range(MEASURED_STEPS):
        step("activation_offloading='host'")
    for name in around:
        step(name)
    peaks = {name: peak_step_bytes(run) for name, run in steps.items()}
    spent = interleaved_ms(steps, rounds=7, warm_up=2)
    bare = "everything stays"
    extra = {name: median_ratio(times, spent[bare]) - 1 for name, times in spent.items()}
    rows = [
        [
            name,
            f"{peaks[name] / 2**20:.0f}",
            f"{100 * (1 - peaks[name] / peaks[bare]):.0f}%",
            f"{statistics.median(spent[name]):.1f}",
            f"{100 * extra[name]:+.0f}%",
        ]
        for name in around
    ]
    print(f"\n{technique.status}")
    publish(
        "gpu_offloading",
        "python benchmarks/gpu_offloading.py",
        ["saved tensors", "peak of the step, MiB", "lower by", "step, ms", "extra time"],
        rows,
        {"peak_bytes": peaks, "step_ms": spent, "extra_time": extra, "status": technique.status},
    )
    technique.close()


if __name__ == "__main__":
    main()
