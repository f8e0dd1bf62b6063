"""Beside pytorch-autotune 2.0, on its own three workloads: what either finds on this device, and what it takes to find.

    pip install pytorch-autotune==2.0.0
    python benchmarks/gpu_autotune.py --out docs/results

ResNet-50 on 64 images of 224x224, ResNet-18 on 128 of 32x32, and a transformer of 6 layers on 32 x 128 tokens, in full
training steps with AdamW: plain (torch's own defaults, in float32), what ``pytorch_autotune.autotune()`` picks within
its budget, and what a run of ``accelerate()`` has settled on while it trained. Each has a process of its own, as the
former leaves flags of the whole process behind. What is not installed is left out, and said.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _gpu import arguments, is_possible, table, write
from _tuning_loop import AcceleratedLoop, PlainLoop, Task, in_words, run_until_settled
from gpu_ladder import step_ms
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import Plan

STEPS = 1000
BUDGET_S = 60.0  # for either to search
RIVAL = "pytorch_autotune"


class Transformer(nn.Module):
    """(B, T) tokens → (B, 10) classes."""

    def __init__(self, dim: int, depth: int, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def resnet(name: str) -> Callable[[bool], nn.Module]:
    def make(small: bool) -> nn.Module:
        if importlib.util.find_spec("torchvision"):
            models: Any = importlib.import_module("torchvision.models")
            return getattr(models, name)(num_classes=10)  # type: ignore[no-any-return]
        return importlib.import_module("timm").create_model(name, num_classes=10)  # type: ignore[no-any-return]

    return make


def images(batch: int, side: int) -> Callable[[bool], Tensor]:
    return lambda small: torch.randn(2, 3, 32, 32) if small else torch.randn(batch, 3, side, side)


@dataclass(frozen=True)
class Workload:
    """A model, what it is fed, and the packages of which it needs one."""

    title: str
    model: Callable[[bool], nn.Module]
    inputs: Callable[[bool], Tensor]
    packages: tuple[str, ...] = ()


WORKLOADS = {
    "resnet50": Workload("ResNet-50, 64 x 224x224", resnet("resnet50"), images(64, 224), ("torchvision", "timm")),
    "resnet18": Workload("ResNet-18, 128 x 32x32", resnet("resnet18"), images(128, 32), ("torchvision", "timm")),
    "transformer": Workload(
        "transformer, 6 layers of 512, 32 x 128 tokens",
        lambda small: Transformer(64, 2) if small else Transformer(512, 6),
        lambda small: torch.randint(10_000, (2, 16) if small else (32, 128)),
    ),
}


def task(workload: Workload, small: bool) -> Task:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    module = workload.model(small).to(device).train()
    inputs = workload.inputs(small).to(device)
    labels = torch.randint(10, (len(inputs),), device=device)
    return Task(module, lambda batch: F.cross_entropy(module(batch[0]), batch[1]), itertools.repeat((inputs, labels)))


def plain(work: Task, small: bool) -> tuple[Callable[[], Any], str]:
    return PlainLoop(work).step, ""


def theirs(work: Task, small: bool) -> tuple[Callable[[], Any], str]:
    batch = next(work.batches)
    found = importlib.import_module(RIVAL).autotune(
        work.module, batch, F.cross_entropy, budget=BUDGET_S, device=batch[0].device.type, cache=False, verbose=False
    )
    return lambda: found.step(*batch), found.config.label


def ours(work: Task, small: bool) -> tuple[Callable[[], Any], str]:
    loop = AcceleratedLoop(work, Plan(compile="auto"), STEPS)
    found = run_until_settled(loop, STEPS, 5.0 if small else BUDGET_S)
    return loop.step, f"{in_words(found.choices)}, {'settled' if found.is_settled else 'not settled'}"


SIDES = {"plain": plain, "pytorch-autotune": theirs, "lightning-accel": ours}


def measure(side: str, name: str, small: bool) -> dict[str, Any]:
    """Seconds to find what is settled, what that is, and the milliseconds of a step so."""
    work = task(WORKLOADS[name], small)
    start = time.perf_counter()
    step, picked = SIDES[side](work, small)
    return {"search_s": time.perf_counter() - start, "picked": picked, "step_ms": step_ms(step)}


def in_a_process(side: str, name: str, small: bool) -> dict[str, Any]:
    """The same, in a process of its own; what is missing or failed, in words."""
    if side == "pytorch-autotune" and not importlib.util.find_spec(RIVAL):
        return {"left_out": f"{RIVAL} is not installed"}
    if side == "pytorch-autotune" and not torch.cuda.is_available():
        return {"left_out": "it searches on CUDA only"}
    command = [sys.executable, __file__, "--side", side, "--workload", name, *(["--dry-run"] if small else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"left_out": done.stderr.strip().splitlines()[-1]}
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def row(title: str, side: str, found: dict[str, Any], plain_ms: float | None) -> list[str]:
    if "left_out" in found:
        return [title, side, "", "", "", f"left out: {found['left_out']}"]
    speed = f"{plain_ms / found['step_ms']:.2f}x" if plain_ms else ""
    return [title, side, f"{found['step_ms']:.2f}", speed, f"{found['search_s']:.0f}", found["picked"]]


def main() -> None:
    parser = arguments("Measure beside pytorch-autotune.")
    parser.add_argument("--side", choices=SIDES, help="measure one side alone, and print it as JSON")
    parser.add_argument("--workload", choices=WORKLOADS)
    args = parser.parse_args()
    if not is_possible(args):
        return
    if args.side:
        print(json.dumps(measure(args.side, args.workload, args.dry_run)))
        return
    rows = [["workload", "", "ms a step", "over plain", "seconds to find it", "what"]]
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_ACCEL_CACHE"] = folder
        for name, workload in WORKLOADS.items():
            if workload.packages and not any(map(importlib.util.find_spec, workload.packages)):
                print(f"{workload.title}: left out, none of {', '.join(workload.packages)} is installed", flush=True)
                continue
            runs[name] = {side: in_a_process(side, name, args.dry_run) for side in SIDES}
            plain_ms = runs[name]["plain"].get("step_ms")
            rows += [row(workload.title, side, found, plain_ms) for side, found in runs[name].items()]
            print("\n".join(" | ".join(line) for line in rows[-len(SIDES) :]), flush=True)
    text = table(rows)
    print(f"\n{text}")
    write("autotune", args.out, {"budget_s": BUDGET_S, "runs": runs}, "Beside pytorch-autotune 2.0, on", text)


if __name__ == "__main__":
    main()
