"""Packing of saved tensors on one CPU core: bytes and speed of the codecs, and what training steps gain and pay.

    python benchmarks/packing.py [--json docs/results]

To answer: at least 3x fewer bytes for tensors of one value in ten, at 1 GB/s of unpacked bytes or more. Tensors have
4 Mi elements; medians. Steps are timed side by side, as `sparse_activations="auto"` decides and with all packed that
can be, whatever the time. Weights are new, so that half of what leaves a ReLU is zero.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from _measure import publish
from torch import Tensor, nn

from lightning_accel.claims.measure import interleaved_ms, median_ratio, peak_step_bytes
from lightning_accel.core.tree import unique_bytes
from lightning_accel.memory.packer import Packer
from lightning_accel.memory.packing import (
    PackedBits,
    pack_above_zero,
    pack_bits,
    pack_nonzeros,
    pack_two_valued,
    sample,
)
from lightning_accel.memory.packing_budget import TRIALS
from lightning_accel.techniques.sparse_activations import SparseActivations

ELEMENTS = 1 << 22
ROUNDS = 15


Make = Callable[[int, torch.device], Tensor]
Codec = Callable[[Tensor], PackedBits | None]


def cases() -> dict[str, tuple[Make, Codec]]:
    """How to make the tensors, of a size on a device, and the codec for each."""
    found: dict[str, tuple[Make, Codec]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for density in (0.5, 0.25, 0.1, 0.01):
            found[f"{name}, {density:.0%} not zero"] = (_sparse(dtype, density), lambda t: pack_nonzeros(t, t.nbytes))
        found[f"{name}, a ReLU's own result"] = (
            lambda size, device, dtype=dtype: torch.randn(size, dtype=dtype, device=device).relu(),
            pack_above_zero,
        )
        word = sample(torch.ones(1, dtype=dtype).div(0.9)).word
        assert word is not None
        found[f"{name}, dropout noise"] = (
            lambda size, device, dtype=dtype: (torch.rand(size, device=device) < 0.9).to(dtype).div(0.9),
            lambda t, word=word: pack_two_valued(t, word),
        )
    found["bool mask"] = (lambda size, device: torch.rand(size, device=device) < 0.9, pack_bits)
    return found


def _sparse(dtype: torch.dtype, density: float) -> Make:
    def make(size: int, device: torch.device) -> Tensor:
        mask = torch.rand(size, device=device) < density
        return torch.randn(size, dtype=dtype, device=device).where(mask, 0.0)

    return make


def codec_rows() -> tuple[list[list[str]], dict[str, Any]]:
    """One row a case; GB/s of unpacked bytes."""
    rows, details = [], {}
    for name, (make, pack) in cases().items():
        tensor = make(ELEMENTS, torch.device("cpu"))
        packed = pack(tensor)
        assert packed is not None
        packing, unpacking = _seconds(lambda pack=pack, tensor=tensor: pack(tensor)), _seconds(packed.unpack)
        ratio = tensor.nbytes / packed.nbytes
        speeds = [tensor.nbytes / seconds / 1e9 for seconds in (packing, unpacking)]
        rows.append([name, f"{ratio:.1f}x", *(f"{speed:.1f}" for speed in speeds)])
        details[name] = {"ratio": ratio, "pack_gb_per_s": speeds[0], "unpack_gb_per_s": speeds[1]}
    return rows, details


def _seconds(call: Callable[[], Any]) -> float:
    spent = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[2:])


def cnn() -> tuple[nn.Module, Tensor]:
    """Two stages of four convolutions with ReLU, dropout between them: (B, 3, 32, 32) → (B, 10)."""
    layers: list[nn.Module] = []
    width = 3
    for wider in (32, 64):
        for _ in range(4):
            layers += [nn.Conv2d(width, wider, 3, padding=1), nn.ReLU()]
            width = wider
        layers += [nn.MaxPool2d(2), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 64, 10)), torch.randn(64, 3, 32, 32)


def mlp() -> tuple[nn.Module, Tensor]:
    """Wide layers with ReLU and dropout: (B, 512) → (B, 10)."""
    layers: list[nn.Module] = [nn.Linear(512, 1024)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 1024)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(1024, 10)), torch.randn(2048, 512)


def step_rows(name: str, make: Callable[[], tuple[nn.Module, Tensor]]) -> tuple[list[list[str]], dict[str, Any]]:
    """Plain, packed as "auto" decides, and packed regardless of the time."""
    packers = {"plain": None, "auto": Packer(), "all": Packer(max_time_share=float("inf"))}
    steps, saved, statuses = {}, {}, {}
    for side, packer in packers.items():
        torch.manual_seed(0)
        model, inputs = make()
        technique = None if packer is None else SparseActivations(model, packer=packer)

        def step(
            model: nn.Module = model, inputs: Tensor = inputs, technique: SparseActivations | None = technique
        ) -> None:
            with technique.step("train") if technique is not None else nullcontext():
                loss = model(inputs).square().mean()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = None

        saved[side] = _saved_bytes(model, inputs)
        for _ in range(TRIALS + 2):
            step()  # past the trials
        if technique is not None and packer is not None:
            report = packer.report()
            saved[side] -= report.before_bytes - report.after_bytes
            statuses[side] = technique.run.status
        steps[side] = step
    peaks = {side: peak_step_bytes(step) for side, step in steps.items()}
    spent = interleaved_ms(steps, rounds=9, warm_up=1)
    rows = [
        [
            f"{name}, {side}",
            f"{saved[side] / 2**20:.1f}",
            f"{peaks[side] / 2**20:.1f}",
            f"{statistics.median(spent[side]):.0f}",
            f"{median_ratio(spent[side], spent['plain']):.2f}x",
        ]
        for side in steps
    ]
    return rows, {"saved_bytes": saved, "peak_bytes": peaks, "step_ms": spent, "status": statuses}


def _saved_bytes(model: nn.Module, inputs: Tensor) -> int:
    """What autograd keeps of a step, the model's own tensors and the batch not counted."""
    kept: list[Tensor] = []
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), inputs)}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs).square().mean()
    return unique_bytes(kept)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, details = codec_rows()
    columns = ["one core, 4 Mi elements", "fewer bytes", "pack, GB/s", "unpack, GB/s"]
    publish("packing", "python benchmarks/packing.py", columns, rows, details)
    measured = [step_rows("cnn", cnn), step_rows("mlp", mlp)]
    publish(
        "packing_steps",
        "python benchmarks/packing.py",
        ["one core", "saved, MiB", "peak of the step, MiB", "step, ms", "time"],
        [row for rows, _ in measured for row in rows],
        dict(zip(("cnn", "mlp"), (details for _, details in measured), strict=True)),
    )


if __name__ == "__main__":
    main()
