"""Crop, flip, normalise, channels_last on a CPU: one pass over memory beside the same as separate torch operations.

    python benchmarks/preprocessing.py [--json docs/results]

A batch of uint8 images 256x3x224x224, random crops of 224 with 4 pixels of padding, random flips, ImageNet's mean and
std. *Separate* is what is written by hand with torch, a whole batch at a time: pad, a gather of the crops, flip and
where, float and divide, subtract and divide, cast, channels_last; `sub_` and `div_` work in place, as torchvision's
normalize does. *Chain* is `Preprocess(..., fuse=False)`: the same transforms one by one in NumPy. All draw the same
random numbers, and their results are compared. One thread; with `pip install numba`, the pass compiled by it as well.

Peaks are what a call has allocated at one time, its result included: by torch's events, and by tracemalloc for NumPy.

To answer: at least 2x, and at most a third of the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _measure import publish
from torch import Tensor
from torch.nn import functional as F

from lightning_accel.claims.measure import interleaved_ms, median_ratio, peak_bytes
from lightning_accel.data import Normalize, Position, Preprocess, RandomCrop, RandomHorizontalFlip
from lightning_accel.data.single_pass import SinglePass
from lightning_accel.data.transform import Shape

N, C, SIZE, PADDING = 256, 3, 224, 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHAIN = [RandomCrop(SIZE, padding=PADDING), RandomHorizontalFlip(), Normalize(MEAN, STD)]
ROUNDS = 9


def separate(images: Tensor, drawn: SinglePass, flips: Tensor, dtype: torch.dtype) -> Tensor:
    """Each step an operation of torch on the whole batch."""
    mean, std = (torch.tensor(values).view(1, C, 1, 1) for values in (MEAN, STD))
    padded = F.pad(images, (PADDING,) * 4)
    samples = torch.arange(N).view(N, 1, 1, 1)
    rows = (torch.from_numpy(drawn.top) + PADDING).view(N, 1, 1, 1) + torch.arange(SIZE).view(1, 1, SIZE, 1)
    columns = (torch.from_numpy(drawn.left) + PADDING).view(N, 1, 1, 1) + torch.arange(SIZE).view(1, 1, 1, SIZE)
    crops = padded[samples, torch.arange(C).view(1, C, 1, 1), rows, columns]
    crops = torch.where(flips.view(N, 1, 1, 1), crops.flip(-1), crops)
    result = crops.float().div_(255).sub_(mean).div_(std)
    return result.to(dtype, memory_format=torch.channels_last)


def draw(images: Tensor) -> tuple[SinglePass, Tensor]:
    """The crops and flips that `Preprocess` draws for the first batch of training."""
    crop, flip, _ = CHAIN
    rng, onto = Position().generator(0), SinglePass.copying(*images.shape, is_uint8=True)
    crop.compose(onto, crop.draw(Shape(*images.shape), rng))
    return onto, torch.from_numpy(flip.draw(Shape(N, C, SIZE, SIZE), rng))


def numba_pass(images: Tensor, drawn: SinglePass) -> Callable[[], Any] | None:
    """The pass as loops that Numba compiles, in float32; None without Numba."""
    try:
        import numba
    except ImportError:
        return None

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def loops(x: Any, top: Any, left: Any, step: Any, table: Any, out: Any) -> None:
        for n in range(out.shape[0]):
            for i in range(out.shape[1]):
                y = top[n] + i
                for j in range(out.shape[2]):
                    at = left[n] + step[n] * j
                    inside = 0 <= y < x.shape[2] and 0 <= at < x.shape[3]
                    for c in range(out.shape[3]):
                        out[n, i, j, c] = table[c, x[n, c, y, at]] if inside else table[c, 0]

    scale, bias = (np.array(values, np.float32)[:, None] for values in zip(*_affine(), strict=True))
    table = np.arange(256, dtype=np.float32) * scale + bias
    x = images.numpy()
    return lambda: loops(x, drawn.top, drawn.left, drawn.step, table, np.empty((N, SIZE, SIZE, C), np.float32))


def _affine() -> list[tuple[float, float]]:
    return [(1 / (255 * std), -mean / std) for mean, std in zip(MEAN, STD, strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    images = torch.randint(0, 256, (N, C, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    drawn, flips = draw(images)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        fused, chain = (Preprocess(CHAIN, dtype=dtype, channels_last=True, seed=0, fuse=fuse) for fuse in (True, False))
        sides: dict[str, Callable[[], Any]] = {
            "separate": lambda dtype=dtype: separate(images, drawn, flips, dtype),
            "chain": lambda chain=chain: chain(images),
            "one pass": lambda fused=fused: fused(images),
        }
        expected = sides["separate"]().float()
        for name in ("chain", "one pass"):
            torch.testing.assert_close(
                sides[name]().float(), expected, rtol=1e-2, atol=1e-5 + 1e-2 * (dtype != torch.float32)
            )
        if dtype == torch.float32 and (compiled := numba_pass(images, drawn)) is not None:
            sides["one pass, Numba"] = compiled
        peaks = {name: peak_bytes(side) for name, side in sides.items()}
        spent = interleaved_ms(sides, rounds=ROUNDS)
        for name, times in spent.items():
            speed = "" if name == "separate" else f"{median_ratio(spent['separate'], times):.2f}x"
            share = "" if name == "separate" else f"{peaks[name] / peaks['separate']:.0%}"
            ms = f"{sorted(times)[len(times) // 2]:.0f}"
            rows.append([str(dtype).removeprefix("torch."), name, ms, speed, f"{peaks[name] / 2**20:.0f}", share])
    columns = ["result", "how", "ms", "faster", "peak, MiB", "of separate"]
    publish("preprocessing", "python benchmarks/preprocessing.py", columns, rows)


if __name__ == "__main__":
    main()
