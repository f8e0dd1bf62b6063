"""Activation offloading on a GPU: step time and peak memory, beside what PyTorch and torchtune have for it.

    make gpu PYTHON=python3                                         # among the rest
    python benchmarks/gpu_offloading.py --out docs/results          # the package installed

To answer: at most the step time, and at most the peak, of ``save_on_cpu(pin_memory=True)`` and of torchtune's
``OffloadActivations`` (a row of its own where torchtune is installed: ``pip install torchtune torchao``). All of them
take tensors of a mebibyte and more, except ``save_on_cpu``, which takes all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from _gpu import arguments, is_possible, table, write
from _networks import TransformerBlock
from torch import nn

from lightning_accel.claims.measure import interleaved_ms, median_ratio, peak_step_bytes
from lightning_accel.techniques.activation_offloading import ActivationOffloading, OffloadingOptions

WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 2048, 16, 24, 8, 2048
MIN_BYTES = 1 << 20
MEASURED_STEPS = 30  # until the prefetch depth is settled

Around = Callable[[], AbstractContextManager[Any]]


def sides(model: nn.Module, device: torch.device) -> tuple[dict[str, Around], ActivationOffloading]:
    """What to enter around the forward pass, by name."""
    technique = ActivationOffloading(OffloadingOptions(to="host", min_bytes=MIN_BYTES), model, device)
    found: dict[str, Around] = {
        "everything stays": nullcontext,
        "save_on_cpu(pin_memory=True)": lambda: torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"),
        "memory.offload='host'": lambda: technique.step("train"),
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
    args = arguments("Measure activation offloading on a GPU.").parse_args()
    if not is_possible(args):
        return
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    width, blocks, batch, length = (64, 2, 2, 32) if args.dry_run else (WIDTH, BLOCKS, BATCH, LENGTH)
    torch.manual_seed(0)
    model = nn.Sequential(*(TransformerBlock(width, HEADS) for _ in range(blocks))).to(device, torch.bfloat16)
    inputs = torch.randn(batch, length, width, device=device, dtype=torch.bfloat16)
    around, technique = sides(model, device)

    def step(name: str) -> None:
        with around[name]():
            loss = model(inputs).float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    steps = {name: lambda name=name: step(name) for name in around}  # type: ignore[misc]
    for _ in range(MEASURED_STEPS):
        step("memory.offload='host'")
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
    columns = ["saved tensors", "peak of the step, MiB", "lower by", "step, ms", "extra time"]
    text = table([columns, *rows])
    print(f"\n{technique.run.status}\n\n{text}")
    record = {"peak_bytes": peaks, "step_ms": spent, "extra_time": extra, "status": technique.run.status}
    write("offloading", args.out, record, "Activation offloading, on", text)
    technique.run.at_end.close()


if __name__ == "__main__":
    main()
