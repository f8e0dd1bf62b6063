"""INT8 (dynamic, static) and FP16 against a network of 100 MB in float32, on the CPU.

Claimed: dynamic 2.5x and 40 MB; static 3.3x and 35 MB; FP16 2x and 50 MB
Holds: the weights shrink as their numbers do, and the CPU's units for them compute more at a time
Holds when: what is stored shrinks as its numbers do; whether the CPU has fast units for just these numbers, at just
    this size of batch, is another matter
No longer holds: neither is less stored than in float32 by as much as was said, nor do the CPU's units for these numbers
    gain as much
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.claims._digits import digits
from lightning_accel.claims.claim import Figure, Missing, Target, claim_in, counted
from lightning_accel.claims.measure import speedup, timed_ms, train_step, without_gradients
from lightning_accel.deploy import MissingPackageError, Quantized, export, quantize
from lightning_accel.deploy.combinations import Mode
from lightning_accel.deploy.quantizing import saved_bytes

CLAIM = claim_in(__doc__, row=10)

WIDTH = 3520  # two layers of its square: 25 million weights, 100 MB in float32
BATCHES = (1, 64)
SPEED = {"dynamic INT8": 2.5, "static INT8": 3.3, "FP16": 2.0}
SIZE = {"dynamic INT8": Target("at most", 0.40), "static INT8": Target("at most", 0.35), "FP16": Target("about", 0.50)}

ONNX = " in ONNX Runtime"
MODES: dict[str, Mode] = {"dynamic INT8": "int8-dynamic", "static INT8": "int8-static"}
HALF: tuple[Mode, Mode] = ("fp16", "bf16")

# A process of its own: in one that has freed memory before, loading takes what lies there, and nothing is seen to grow.
# What loading imports, and the scratch memory that the allocator holds on to, are not the model's: it is loaded once
# before, and what is free is given back before each look.
_GROWTH = """
import ctypes, gc, sys, psutil, torch
def held():
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    return psutil.Process().memory_info().rss
load = lambda: torch.load(sys.argv[1], weights_only=False)
load()
before = held()
model = load()
print(held() - before)
"""


def measure() -> Iterator[Figure | Missing]:
    training, testing = digits(seed=0)
    model = trained(*tensors_of(training))
    quantized: dict[str, Quantized] = {}
    for name, mode in MODES.items():
        found = quantize(model, mode, calibration=tensors_of(training)[0].split(64))
        if found.converted:
            quantized[name] = found
        else:
            why = "; ".join(sorted(set(found.kept.values())))
            yield Missing(name, f"this build of PyTorch does not quantise for this CPU: {why}")
    formats: dict[str, nn.Module] = {"float32": model, **{name: one.model for name, one in quantized.items()}}
    formats["FP16"], formats["bfloat16"] = (quantize(model, mode).model for mode in HALF)
    images, labels = tensors_of(testing)
    with tempfile.TemporaryDirectory() as folder:
        served: dict[str, Callable[..., Any]] = {}
        for name, one in quantized.items():
            try:
                served[name + ONNX] = export(one, (images[:2],), "onnx", path=Path(folder, f"{name}.onnx")).load()
            except MissingPackageError as missing:
                yield Missing(name + ONNX, str(missing))
        for batch in BATCHES:
            calls: dict[str, Callable[..., Any]] = {**formats, **served}
            sides = {name: without_gradients(call, images[:batch]) for name, call in calls.items()}
            times = timed_ms(sides, seconds=3)
            for name in list(sides)[1:]:
                target = Target("at least", number) if (number := SPEED.get(name.removesuffix(ONNX))) else None
                yield speedup(f"{name}, time at a batch of {batch}", times["float32"], times[name], target)
    for where, size in (("on disk", saved_bytes), ("in memory", size_in_memory)):
        sizes = {name: size(form) for name, form in formats.items() if name != "bfloat16"}  # as FP16
        for name in list(sizes)[1:]:
            note = f"{sizes['float32'] / 1e6:.0f} to {sizes[name] / 1e6:.0f} MB"
            share = sizes[name] / sizes["float32"]
            yield counted(f"{name}, size {where}", share, "%", SIZE[name], note)
    exact = accuracy(model, images, labels)
    for name, form in list(formats.items())[1:]:
        drop = exact - accuracy(form, images, labels)
        yield counted(f"accuracy lost by {name}", drop, "%", note=f"of {100 * exact:.1f}%")


def tensors_of(dataset: Any) -> tuple[Tensor, Tensor]:
    """A set of digits as two tensors: images (N, 64), labels (N,)."""
    images, labels = zip(*dataset, strict=True)
    return torch.stack(images).flatten(1), torch.stack(labels)


def trained(images: Tensor, labels: Tensor, *, width: int = WIDTH, epochs: int = 4) -> nn.Module:
    """A wide perceptron, trained on the digits until it knows them."""
    torch.manual_seed(0)
    wide = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*wide, nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    handle = accelerate(model, Plan(techniques={"inplace_activations": False}))
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(128):
            train_step(model, images[chosen], labels[chosen], handle, optimizer)
    handle.undo()
    return model.eval()


def size_in_memory(model: nn.Module) -> int:
    """Bytes that a fresh process grows by when it loads the model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        torch.save(model, path)
        command = [sys.executable, "-W", "ignore", "-c", _GROWTH, str(path)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images, (N, 64), that ``model`` gives their label, 0 to 1."""
    return float((model(images).argmax(1) == labels).float().mean())
