"""Beside pytorch-autotune 2.0, on its own three workloads: what either finds on this device, and what it takes to find.

    pip install pytorch-autotune==2.0.0
    python benchmarks/gpu_autotune.py --out docs/results

ResNet-50 on 64 images of 224x224, ResNet-18 on 128 of 32x32, and a transformer of 6 layers on 32 x 128 tokens, in full
training steps with AdamW: plain (torch's own defaults, in float32), what ``pytorch_autotune.autotune()`` picks within
its budget, and what runs of ``accelerate()`` have come to in as many seconds. Those are told how many steps such a
training has, see ``Workload.steps``; what they have come to is then timed in a loop without trials. Each has a process
of its own, as the former leaves flags of the whole process behind. They search one after the other; then, all alive,
they take turns in bursts of steps. What is not installed is left out, and said. Takes about twelve minutes.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from _gpu import arguments, is_possible, table, write
from _tuning_loop import PlainLoop, Task, settled_loop
from gpu_ladder import WARM_UP, burst_ms
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import Plan
from lightning_accel.claims.measure import median_interval

BUDGET_S = 60.0  # for each to search
ROUNDS = 9
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
    """A model, and what it is fed.

    Attributes:
        steps: Of a training such as its papers report.
        training: What training that is.
        packages: Of which it needs one.
    """

    title: str
    steps: int
    training: str
    model: Callable[[bool], nn.Module]
    inputs: Callable[[bool], Tensor]
    packages: tuple[str, ...] = ()


IMAGE_PACKAGES = ("torchvision", "timm")
WORKLOADS = {
    "resnet50": Workload(
        *("ResNet-50, 64 x 224x224", 90 * 20_019, "90 epochs of ImageNet's 1,281,167 images"),
        *(resnet("resnet50"), images(64, 224), IMAGE_PACKAGES),
    ),
    "resnet18": Workload(
        *("ResNet-18, 128 x 32x32", 200 * 391, "200 epochs of CIFAR-10's 50,000 images"),
        *(resnet("resnet18"), images(128, 32), IMAGE_PACKAGES),
    ),
    "transformer": Workload(
        *("transformer, 6 layers of 512, 32 x 128 tokens", 3 * 43_750, "3 epochs of Yahoo! Answers' 1,400,000 texts"),
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


@dataclass(frozen=True)
class Found:
    """What a side trains with.

    Attributes:
        step: A training step.
        picked: What was found, in words.
        compiled: What our report says of compilation.
    """

    step: Callable[[], Any]
    picked: str = ""
    compiled: str = ""


def plain(workload: Workload, small: bool) -> Found:
    return Found(PlainLoop(task(workload, small)).step)


def theirs(workload: Workload, small: bool) -> Found:
    work = task(workload, small)
    batch = next(work.batches)
    found = importlib.import_module(RIVAL).autotune(
        work.module, batch, F.cross_entropy, budget=BUDGET_S, device=batch[0].device.type, cache=False, verbose=False
    )
    return Found(lambda: found.step(*batch), found.config.label)


def ours(plan: Plan) -> Callable[[Workload, bool], Found]:
    def find(workload: Workload, small: bool) -> Found:
        loop, found = settled_loop(lambda: task(workload, small), plan, workload.steps, 5.0 if small else BUDGET_S)
        return Found(loop.step, str(found), found.compiled)

    return find


PLAIN, THEIRS = "plain", "pytorch-autotune"
SIDES: Mapping[str, Callable[[Workload, bool], Found]] = {
    PLAIN: plain,
    THEIRS: theirs,
    "lightning-accel, compile='auto'": ours(Plan(compile="auto")),
    "lightning-accel, compile='on'": ours(Plan(compile="on")),
}


def child(side: str, name: str, small: bool) -> None:
    """Searches, and says what it found as JSON; then takes a burst of steps for each line of the standard input."""
    start = time.perf_counter()
    found = SIDES[side](WORKLOADS[name], small)
    record = {"search_s": time.perf_counter() - start, "picked": found.picked, "compiled": found.compiled}
    for _ in range(WARM_UP):
        found.step()
    print(json.dumps(record), flush=True)
    for _ in sys.stdin:
        found.step()  # the device has served others
        print(json.dumps({"step_ms": burst_ms(found.step)}), flush=True)


class FailedError(Exception):
    """A side's process ended, with the last line that it wrote."""


class Process:
    """A side, from here."""

    def __init__(self, side: str, name: str, small: bool) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 — open as long as the process
        self._popen = subprocess.Popen(
            [sys.executable, __file__, "--side", side, "--workload", name, *(["--dry-run"] if small else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def told(self) -> dict[str, Any]:
        """The next that it says.

        Raises:
            FailedError: It has ended.
        """
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line.startswith("{"):
                record: dict[str, Any] = json.loads(line)
                return record
        self._errors.seek(0)
        raise FailedError((self._errors.read().strip().splitlines() or [f"status {self._popen.wait()}"])[-1])

    def burst_ms(self) -> float:
        assert self._popen.stdin is not None
        self._popen.stdin.write("\n")
        self._popen.stdin.flush()
        return float(self.told()["step_ms"])

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()
        self._errors.close()


def measure(name: str, small: bool) -> dict[str, dict[str, Any]]:
    """What each side found, and the milliseconds of its steps, round by round; what is missing or failed, in words."""
    records: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        processes: dict[str, Process] = {}
        for side in SIDES:
            if (reason := why_not(side)) is not None:
                records[side] = {"left_out": reason}
                continue
            process = processes[side] = stack.enter_context(closing(Process(side, name, small)))
            try:
                records[side] = {**process.told(), "step_ms": []}
            except FailedError as error:
                records[side] = {"left_out": str(error)}
        for round_ in range(2 if small else ROUNDS):
            for side in processes if round_ % 2 == 0 else reversed(processes):
                if "left_out" in records[side]:
                    continue
                try:
                    records[side]["step_ms"].append(processes[side].burst_ms())
                except (FailedError, BrokenPipeError) as error:
                    records[side] = {"left_out": str(error)}
    return records


def why_not(side: str) -> str | None:
    if side == THEIRS and not importlib.util.find_spec(RIVAL):
        return f"{RIVAL} is not installed"
    if side == THEIRS and not torch.cuda.is_available():
        return "it searches on CUDA only"
    return None


def row(title: str, side: str, found: dict[str, Any], plain_ms: list[float]) -> list[str]:
    if "left_out" in found:
        return [title, side, "", "", "", f"left out: {found['left_out']}", ""]
    speed = ""
    if plain_ms and side != PLAIN:
        ratios = [a / b for a, b in zip(plain_ms, found["step_ms"], strict=True)]
        speed = "{:.2f}x [{:.2f}, {:.2f}]".format(*median_interval(ratios))
    ms = f"{statistics.median(found['step_ms']):.2f}"
    return [title, side, ms, speed, f"{found['search_s']:.0f}", found["picked"], found["compiled"]]


def main() -> None:
    parser = arguments("Measure beside pytorch-autotune.")
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--side", choices=SIDES, help="one side alone, for which this starts itself")
    parser.add_argument("--workload", choices=WORKLOADS)
    args = parser.parse_args()
    if not is_possible(args):
        return
    if args.side:
        child(args.side, args.workload, args.dry_run)
        return
    rows = [["workload", "", "ms a step", "over plain", "seconds to find it", "what", "compile"]]
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_ACCEL_CACHE"] = folder
        for name in args.workloads:
            workload = WORKLOADS[name]
            if workload.packages and not any(map(importlib.util.find_spec, workload.packages)):
                print(f"{workload.title}: left out, none of {', '.join(workload.packages)} is installed", flush=True)
                continue
            runs[name] = {"steps": workload.steps, "sides": measure(name, args.dry_run)}
            sides = runs[name]["sides"]
            plain_ms = sides[PLAIN].get("step_ms", [])
            title = f"{workload.title}; {workload.steps:,} steps, {workload.training}"
            rows += [row(title, side, found, plain_ms) for side, found in sides.items()]
            print("\n".join(" | ".join(line) for line in rows[-len(SIDES) :]), flush=True)
    text = table(rows)
    print(f"\n{text}")
    write("autotune", args.out, {"budget_s": BUDGET_S, "runs": runs}, "Beside pytorch-autotune 2.0, on", text)


if __name__ == "__main__":
    main()
