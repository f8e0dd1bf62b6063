"""Packing of saved tensors on a GPU: bytes and speed of the codecs, and what a training step gains and pays.

    make gpu PYTHON=python3                                     # among the rest
    python benchmarks/gpu_packing.py --out docs/results         # the package installed

The codecs and cases are those of `benchmarks/packing.py`, on 128 Mi elements: bursts of calls between two CUDA
events, medians; GB/s of unpacked bytes. Packing a sparse tensor waits for the device once, to count what is not zero,
which is part of its time. Then one wide network with ReLU and dropout, plain and packed, in float32 and bfloat16.
Takes under two minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from _gpu import arguments, is_possible, table, write
from gpu_attention import median_ms
from packing import Codec, cases
from torch import Tensor, nn

from lightning_accel.claims.measure import interleaved_ms, median_ratio, peak_step_bytes
from lightning_accel.memory.packer import Packer
from lightning_accel.memory.packing_budget import TRIALS
from lightning_accel.techniques.sparse_activations import SparseActivations


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One codec on one kind of tensor; speeds are of unpacked bytes."""

    case: str
    ratio: float
    pack_gb_per_s: float
    unpack_gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One way to train one network."""

    dtype: str
    side: str
    step_ms: float
    time_ratio: float
    peak_mib: float
    status: str


def measure_codec(name: str, tensor: Tensor, pack: Codec, rounds: int) -> Measured:
    packed = pack(tensor)
    assert packed is not None
    ms = median_ms({"pack": lambda: pack(tensor), "unpack": packed.unpack}, rounds)
    return Measured(
        case=name,
        ratio=tensor.nbytes / packed.nbytes,
        pack_gb_per_s=tensor.nbytes / ms["pack"] / 1e6,
        unpack_gb_per_s=tensor.nbytes / ms["unpack"] / 1e6,
    )


def measure_steps(dtype: torch.dtype, device: torch.device, width: int, batch: int) -> list[MeasuredStep]:
    """Plain, packed as "auto" decides, and packed regardless of the time."""
    packers = {"plain": None, "auto": Packer(), "all": Packer(max_time_share=float("inf"))}
    steps: dict[str, Callable[[], None]] = {}
    statuses: dict[str, str] = {}
    inputs = torch.randn(batch, width, device=device, dtype=dtype)
    for side, packer in packers.items():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)]
        model = nn.Sequential(*layers).to(device, dtype)
        technique = None if packer is None else SparseActivations(model, packer=packer)

        def step(model: nn.Module = model, technique: SparseActivations | None = technique) -> None:
            with technique.step("train") if technique is not None else nullcontext():
                loss = model(inputs).float().square().mean()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = None

        for _ in range(TRIALS + 2):
            step()  # past the trials
        statuses[side] = "" if technique is None else technique.run.status
        steps[side] = step
    peaks = {side: peak_step_bytes(step) for side, step in steps.items()}
    spent = interleaved_ms(steps, rounds=15)
    return [
        MeasuredStep(
            dtype=str(dtype).removeprefix("torch."),
            side=side,
            step_ms=statistics.median(spent[side]),
            time_ratio=median_ratio(spent[side], spent["plain"]),
            peak_mib=peaks[side] / 2**20,
            status=statuses[side],
        )
        for side in steps
    ]


def tables(codecs: Sequence[Measured], steps: Sequence[MeasuredStep]) -> str:
    by_codec = [
        [run.case, f"{run.ratio:.1f}x", f"{run.pack_gb_per_s:,.0f}", f"{run.unpack_gb_per_s:,.0f}"] for run in codecs
    ]
    by_step = [
        [run.dtype, run.side, f"{run.peak_mib:,.0f}", f"{run.step_ms:.2f}", f"{run.time_ratio:.2f}x", run.status]
        for run in steps
    ]
    return "\n\n".join(
        (
            table([["tensor", "fewer bytes", "pack, GB/s", "unpack, GB/s"], *by_codec]),
            table([["network", "packing", "peak of the step, MiB", "step, ms", "time", "report"], *by_step]),
        )
    )


def main() -> None:
    parser = arguments("Measure the packing of saved tensors on a GPU.")
    parser.add_argument("--rounds", type=int, default=7, help="how many bursts of every codec")
    args = parser.parse_args()
    if not is_possible(args):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    elements, width, batch = (1 << 16, 64, 512) if args.dry_run else (1 << 27, 4096, 32768)
    codecs = []
    for name, (make, pack) in cases().items():
        codecs.append(measure_codec(name, make(elements, device), pack, args.rounds))
        print(f"{name}: packed at {codecs[-1].pack_gb_per_s:,.0f} GB/s", flush=True)
    steps = [run for dtype in (torch.float32, torch.bfloat16) for run in measure_steps(dtype, device, width, batch)]
    text = tables(codecs, steps)
    print(f"\n{text}")
    record = {"codecs": [asdict(run) for run in codecs], "steps": [asdict(run) for run in steps]}
    write("packing", args.out, record, "Packing of saved tensors, on", text)


if __name__ == "__main__":
    main()
