"""ResNet-50 and ViT-B/16 in the forms in which they are served on a GPU: half precision, AOTInductor, ONNX, TensorRT.

    make gpu PYTHON=python3                                  # among the rest
    python benchmarks/gpu_deploying.py --out docs/results    # the package installed

By `lightning_accel.deploy.compare`, as `benchmarks/deploying.py` does it on a CPU: latency at batch 1 in turns with the
original in float32, throughput at 32, size, numerical error. The weights are random, as speed is what is asked. What is
not installed, and what cannot be had, is a row with the reason; without torchvision nothing is measured. It compiles
four programs a model: some minutes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from _gpu import arguments, is_possible, table, write
from _served_rows import COLUMNS, rows_of
from torch import nn

from lightning_accel.deploy import compare_forms

MODELS = {"resnet50": "ResNet-50", "vit_b_16": "ViT-B/16"}
FORMS = ("fp16", "bf16", "aoti", "aoti+fp16", "onnx", "tensorrt", "tensorrt+fp16")
DRY_FORMS = ("bf16", "torchscript")


def models() -> Iterator[tuple[str, nn.Module]]:
    """Torchvision's, without weights; none where it is absent."""
    if importlib.util.find_spec("torchvision") is None:
        print("torchvision is not installed: nothing measured")
        return
    library: Any = importlib.import_module("torchvision.models")
    for name, title in MODELS.items():
        yield title, getattr(library, name)(weights=None)


def main() -> None:
    args = arguments("Measure the forms in which models are served on a GPU.").parse_args()
    if not is_possible(args):
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    chosen = [("a tiny network", tiny)] if args.dry_run else models()
    forms, size, seconds = (DRY_FORMS, 16, 0.01) if args.dry_run else (FORMS, 224, 2.0)
    rows, runs = [], {}
    for title, model in chosen:
        torch.manual_seed(0)
        batch = torch.randn(4, 3, size, size), torch.zeros(4, dtype=torch.long)
        found = compare_forms(model.to(device).eval(), forms, [batch], batch_sizes=(1, 32), seconds=seconds)
        rows += rows_of(title, found)
        runs[title] = found.to_dict()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not runs:
        return
    text = table([list(COLUMNS), *rows])
    print(text)
    write("deploying", args.out, {"models": runs}, "Models in the forms in which they are served, on", text)


if __name__ == "__main__":
    main()
