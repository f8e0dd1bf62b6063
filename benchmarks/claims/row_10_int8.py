"""Claim 10: INT8 and FP16 shrink a network of 100 MB and speed its inference up. Measured on the CPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import Plan, accelerate
from lightning_accel.claims._digits import digits
from lightning_accel.claims.claim import Claim, Figure, Missing, Target, counted
from lightning_accel.claims.measure import speedup, timed_ms

CLAIM = Claim(
    row=10,
    text="INT8 (dynamic, static) and FP16 against a network of 100 MB in float32, on the CPU",
    claimed="dynamic 2.5x and 40 MB; static 3.3x and 35 MB; FP16 2x and 50 MB",
    why={
        "holds": "the weights shrink as their numbers do, and the CPU's units for them compute more at a time",
        "holds when": "what is stored shrinks as its numbers do; whether the CPU has fast units for just these"
        " numbers, at just this size of batch, is another matter",
        "no longer holds": "neither is less stored than in float32 by as much as was said, nor do the CPU's units for"
        " these numbers gain as much",
    },
)

WIDTH = 3520  # two layers of its square: 25 million weights, 100 MB in float32
BATCHES = (1, 64)
SPEED = {"dynamic INT8": 2.5, "static INT8": 3.3, "FP16": 2.0}
SIZE = {
    "dynamic INT8": Target("at most", 0.40),
    "static INT8": Target("at most", 0.35),
    "FP16": Target("about", 0.50),
}

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
    formats: dict[str, tuple[nn.Module, torch.dtype]] = {"float32": (model, torch.float32)}
    try:
        formats["dynamic INT8"] = dynamic_int8(model), torch.float32
        formats["static INT8"] = static_int8(model, tensors_of(training)[0]), torch.float32
    except (ImportError, RuntimeError) as error:
        yield Missing("INT8", f"this build of PyTorch does not quantise for this CPU: {error}")
    formats["FP16"] = deepcopy(model).half(), torch.float16
    formats["bfloat16"] = deepcopy(model).bfloat16(), torch.bfloat16
    images, labels = tensors_of(testing)
    for batch in BATCHES:
        sides = {name: inference(form, images[:batch].to(dtype)) for name, (form, dtype) in formats.items()}
        times = timed_ms(sides, seconds=3)
        for name in list(formats)[1:]:
            target = Target("at least", SPEED[name]) if name in SPEED else None
            yield speedup(f"{name}, time at a batch of {batch}", times["float32"], times[name], target)
    for where, size in (("on disk", size_on_disk), ("in memory", size_in_memory)):
        sizes = {name: size(form) for name, (form, _) in formats.items() if name != "bfloat16"}  # as FP16
        for name in list(sizes)[1:]:
            note = f"{sizes['float32'] / 1e6:.0f} to {sizes[name] / 1e6:.0f} MB"
            share = sizes[name] / sizes["float32"]
            yield counted(f"{name}, size {where}", share, "%", SIZE[name], note)
    exact = accuracy(model, images, labels)
    for name, (form, dtype) in list(formats.items())[1:]:
        drop = exact - accuracy(form, images.to(dtype), labels)
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
    handle = accelerate(model, Plan(inplace_activations=False))
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(128):
            with handle.step():
                loss = F.cross_entropy(model(handle.batch(images[chosen])), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    handle.undo()
    return model.eval()


def dynamic_int8(model: nn.Module) -> nn.Module:
    """INT8 weights; activations are quantised at every call, by the range they have then."""
    import torch.ao.quantization as quantization

    found: nn.Module = quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return found


def static_int8(model: nn.Module, images: Tensor) -> nn.Module:
    """INT8 weights and activations, by the ranges that ``images``, (N, 64), show; each ReLU fused to its layer."""
    import torch.ao.quantization as quantization

    pairs = [[str(index), str(index + 1)] for index in (0, 2, 4)]
    fused: Any = quantization.QuantWrapper(quantization.fuse_modules(model, pairs))
    fused.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    fused = quantization.prepare(fused)
    with torch.no_grad():
        fused(images)
    found: nn.Module = quantization.convert(fused)
    return found


def inference(model: nn.Module, images: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            model(images)

    return run


def size_on_disk(model: nn.Module) -> int:
    """Bytes of the saved ``state_dict``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights.pt")
        torch.save(model.state_dict(), path)
        return path.stat().st_size


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
