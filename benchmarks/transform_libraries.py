"""What other libraries' transforms take beside ours: torchvision.transforms.v2 and Kornia, on one core.

    pip install torchvision kornia
    python benchmarks/transform_libraries.py [--json docs/results]

A batch of 64 images 3x64x64, as uint8 and, since Kornia takes no other, as float32. Torchvision draws once for all that
it is given, so that it is given one image after another; Kornia draws for each by itself. Both draw from torch's global
stream. Without either nothing is measured. Takes half a minute.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import torch
from _measure import publish
from torch import Tensor

from lightning_accel.claims.measure import interleaved_ms, median_ratio
from lightning_accel.data import (
    ColorJitter,
    Normalize,
    Preprocess,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Transform,
)

N, SIZE, ROUNDS = 64, 64, 21
CHAINS: dict[str, list[Transform]] = {
    "RandomCrop": [RandomCrop(SIZE, padding=4)],
    "RandomHorizontalFlip": [RandomHorizontalFlip()],
    "RandomResizedCrop": [RandomResizedCrop(SIZE)],
    "ColorJitter": [ColorJitter(0.4, 0.4, 0.4, 0.1)],
    "RandomErasing": [RandomErasing(1.0)],
    "crop, flip, normalise to bfloat16": [
        RandomCrop(SIZE, padding=4),
        RandomHorizontalFlip(),
        Normalize((0.5,) * 3, (0.25,) * 3),
    ],
}


def by_torchvision() -> list[Callable[[Tensor], Tensor]]:
    """Theirs of each chain, for one image."""
    v2: Any = importlib.import_module("torchvision.transforms.v2")
    crop, flip = v2.RandomCrop(SIZE, padding=4), v2.RandomHorizontalFlip()
    floats, bfloat16 = v2.ToDtype(torch.float32, scale=True), v2.ToDtype(torch.bfloat16)
    single = [v2.RandomResizedCrop(SIZE), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.RandomErasing(1.0)]
    return [crop, flip, *single, v2.Compose([crop, flip, floats, v2.Normalize([0.5] * 3, [0.25] * 3), bfloat16])]


def by_kornia() -> list[Callable[[Tensor], Tensor]]:
    """Theirs of each chain, for a batch."""
    kornia: Any = importlib.import_module("kornia.augmentation")
    crop, flip = kornia.RandomCrop((SIZE, SIZE), padding=4), kornia.RandomHorizontalFlip()
    normalize = kornia.Normalize(torch.full((3,), 0.5), torch.full((3,), 0.25))
    jitter, erasing = kornia.ColorJitter(0.4, 0.4, 0.4, 0.1, p=1.0), kornia.RandomErasing(p=1.0)
    resized = kornia.RandomResizedCrop((SIZE, SIZE))
    return [crop, flip, resized, jitter, erasing, lambda batch: normalize(flip(crop(batch))).bfloat16()]


def row(name: str, one: Callable[[Tensor], Tensor] | None, many: Callable[[Tensor], Tensor] | None) -> list[str]:
    images = torch.randint(0, 256, (N, 3, SIZE, SIZE), dtype=torch.uint8)
    floats = images / 255
    ours = Preprocess(CHAINS[name], dtype=torch.bfloat16, seed=0)
    sides: dict[str, Callable[[], Any]] = {"uint8": lambda: ours(images), "float32": lambda: ours(floats)}
    if one is not None:
        sides["torchvision"] = lambda: torch.stack([one(image) for image in images])
    if many is not None:
        sides["kornia"] = lambda: many(floats)
    spent = interleaved_ms(sides, rounds=ROUNDS)
    ratios = [
        f"{median_ratio(spent[theirs], spent[kind]):.1f}x" if theirs in spent else ""
        for theirs, kind in (("torchvision", "uint8"), ("kornia", "float32"))
    ]
    ms = [f"{statistics.median(spent[kind]):.1f}" for kind in ("uint8", "float32")]
    return [name, ms[0], ratios[0], ms[1], ratios[1]]


def main() -> None:
    torch.set_num_threads(1)
    found = [importlib.util.find_spec(name) is not None for name in ("torchvision", "kornia")]
    if not any(found):
        print("neither torchvision nor kornia is installed: nothing measured")
        return
    torchvision = by_torchvision() if found[0] else [None] * len(CHAINS)
    kornia = by_kornia() if found[1] else [None] * len(CHAINS)
    publish(
        "transform_libraries",
        "python benchmarks/transform_libraries.py",
        ["", "uint8, ms", "torchvision, to that", "float32, ms", "Kornia, to that"],
        [row(name, one, many) for name, one, many in zip(CHAINS, torchvision, kornia, strict=True)],
    )


if __name__ == "__main__":
    main()
