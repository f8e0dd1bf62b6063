"""Preprocessing on a GPU: the fused kernel against a copy, a chain against its rivals, CuPy against NumPy.

    make gpu PYTHON=python3                                         # among the rest
    python benchmarks/gpu_preprocessing.py --out docs/results       # the package installed

1. uint8 256x3x224x224, cropped with a padding of 4, flipped, normalised, to bfloat16 with the channels last: GB/s read
   and written by the kernel alone, beside a device-to-device copy. Buffers are rotated, so that the cache has none of
   them. To reach: 70% of the large copy.
2. The same as a chain, with all that the host does for it: fused, unfused, torchvision's v2 on the GPU, and on the CPU
   (at least 20 times as slow as fused).
3. Claim 6 of the articles: a product of 10,000 x 10,000 with CuPy, against NumPy.

What is not installed (CuPy, torchvision) is said, and left out. Takes under two minutes.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from _gpu import arguments, is_possible, table, write
from torch import Tensor

from lightning_accel.claims.measure import interleaved_ms
from lightning_accel.data import Normalize, Position, Preprocess, RandomCrop, RandomHorizontalFlip
from lightning_accel.data.single_pass import SinglePass
from lightning_accel.data.tensor_arrays import why_no_cupy

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PADDING = 4
ROTATED = 4  # sets of buffers: 460 MB, several times any cache
AHEAD_CYCLES = 10_000_000  # about 5 ms in which the host gets ahead of the device

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast bytes were read and written."""

    what: str
    us: float
    gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class Time:
    """How long one thing took, and how many times as long as what it is compared with."""

    what: str
    ms: float
    ratio: float
    note: str = ""


def queued_ms(call: Callable[[], Any], calls: int) -> float:
    """Of a call on the device alone: the host is ahead when the clock starts."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e3 * (time.perf_counter() - begin) / calls
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(AHEAD_CYCLES)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def medians(sides: Mapping[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, float]:
    """Milliseconds a call on the device; the sides take turns."""
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 2):
        for name in sides if round_ % 2 == 0 else reversed(list(sides)):
            ms = queued_ms(sides[name], calls)
            if round_ >= 2:
                spent[name].append(ms)
    return {name: statistics.median(values) for name, values in spent.items()}


def make_batch(samples: int, side: int, device: torch.device | str = "cpu") -> Batch:
    images = torch.randint(0, 256, (samples, 3, side, side), dtype=torch.uint8, device=device)
    return images, torch.randint(0, 10, (samples,), device=device)


# -- 1: the kernel -----------------------------------------------------------------------------------------------------


def random_pass(samples: int, side: int) -> SinglePass:
    """What the chain amounts to."""
    rng = np.random.default_rng(0)
    top, left = rng.integers(-PADDING, PADDING + 1, (2, samples), dtype=np.int32)
    step = rng.choice(np.array([1, -1], np.int32), samples)
    scale = (1 / (255 * np.array(STD))).astype(np.float32)
    bias = (-np.array(MEAN) / np.array(STD)).astype(np.float32)
    left = np.where(step < 0, left + side - 1, left).astype(np.int32)
    return SinglePass(height=side, width=side, top=top, left=left, step=step, scale=scale, bias=bias, fill=bias)


def kernel_speeds(samples: int, side: int, large_bytes: int, device: torch.device, rounds: int) -> list[Speed]:
    elements = samples * 3 * side * side
    moved = elements * (1 + 2)
    sizes = {"copy of as many bytes": moved, "large copy": large_bytes}
    sides: dict[str, Callable[[], Any]] = {}
    for name, count in {"copy of as many bytes": ROTATED, "large copy": 1}.items():
        pairs = [torch.ones(2, sizes[name] // 2, dtype=torch.uint8, device=device) for _ in range(count)]
        turns = itertools.cycle(pairs)
        sides[name] = lambda turns=turns: (pair := next(turns))[0].copy_(pair[1])
    lacks = why_no_cupy(device)
    if lacks is not None:
        print(f"the fused kernel is left out: {lacks}")
    else:
        sides["fused kernel"] = kernel_calls(samples, side, device)
        sizes["fused kernel"] = moved
    ms = medians(sides, rounds, calls=20)
    return [Speed(what=name, us=1e3 * ms[name], gb_per_s=sizes[name] / ms[name] / 1e6) for name in sides]


def kernel_calls(samples: int, side: int, device: torch.device) -> Callable[[], None]:
    """The kernel and nothing else: its parameters are on the device already."""
    import cupy

    from lightning_accel.data.single_pass import prepare

    starts = []
    for _ in range(ROTATED):
        images, _ = make_batch(samples, side, device)
        out = torch.empty(images.shape, dtype=torch.bfloat16, device=device, memory_format=torch.channels_last)
        target = cupy.from_dlpack(out.view(torch.int16)).view("uint16")
        given = random_pass(samples, side)
        starts.append(prepare(cupy.from_dlpack(images), given, target, kind="bfloat16", channels_last=True))
    turns = itertools.cycle(starts)
    return lambda: next(turns)()


# -- 2: the chain ------------------------------------------------------------------------------------------------------


def make_preprocess(side: int, device: torch.device | str, fuse: bool = True) -> Preprocess:
    transforms = [RandomCrop(side, padding=PADDING), RandomHorizontalFlip(), Normalize(MEAN, STD)]
    return Preprocess(transforms, device=device, dtype=torch.bfloat16, channels_last=True, seed=0, fuse=fuse)


def torchvision_chain(side: int) -> Callable[[Tensor], Tensor] | None:
    try:
        from torchvision.transforms import v2
    except ImportError:
        print("torchvision is not installed: its row is left out")
        return None
    chain = v2.Compose(
        [
            v2.RandomCrop(side, padding=PADDING),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(MEAN), list(STD)),
        ]
    )
    return lambda images: chain(images).to(torch.bfloat16, memory_format=torch.channels_last)


def chain_times(samples: int, side: int, device: torch.device, rounds: int) -> list[Time]:
    batch = make_batch(samples, side, device)
    fused, unfused = make_preprocess(side, device), make_preprocess(side, device, fuse=False)
    print(f"fused: {fused.describe()}\nunfused: {unfused.describe()}")
    if fused.on_host and device.type == "cuda":
        print("the chain is left out: it would run on the host")
        return []
    apart = (fused(batch, Position())[0].float() - unfused(batch, Position())[0].float()).abs().max()
    print(f"fused and unfused are at most {float(apart):.2g} apart")
    sides: dict[str, Callable[[], Any]] = {
        "fused": lambda: fused(batch, Position()),
        "unfused": lambda: unfused(batch, Position()),
    }
    theirs = torchvision_chain(side)
    if theirs is not None:
        sides["torchvision v2, one crop and flip for the whole batch"] = lambda: theirs(batch[0])
    ms = {name: statistics.median(spent) for name, spent in interleaved_ms(sides, rounds=3 * rounds).items()}
    on_cpu, on_host = make_preprocess(side, "cpu"), (batch[0].cpu(), batch[1].cpu())
    label = f"fused, {on_cpu.describe().partition(' with ')[2]} ({os.cpu_count()} cores)"
    spent = []
    for _ in range(4):
        begin = time.perf_counter()
        on_cpu(on_host, Position())
        spent.append(1e3 * (time.perf_counter() - begin))
    ms[label] = statistics.median(spent[1:])
    return [
        Time(what=name, ms=value, ratio=value / ms["fused"], note=f"{1e3 * samples / value:,.0f} images/s")
        for name, value in ms.items()
    ]


# -- 3: claim 6 --------------------------------------------------------------------------------------------------------


def product_times(size: int, device: torch.device, rounds: int) -> list[Time]:
    """Of float32 matrices. NumPy's is timed once."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    a[:512] @ b[:, :512]  # threads are there
    begin = time.perf_counter()
    expected = a @ b
    numpy_ms = 1e3 * (time.perf_counter() - begin)
    found = [Time(what=f"NumPy ({os.cpu_count()} cores)", ms=numpy_ms, ratio=1.0)]
    lacks = why_no_cupy(device)
    if lacks is not None:
        print(f"CuPy's product is left out: {lacks}")
        return found
    import cupy

    tensors = [torch.from_numpy(matrix).to(device) for matrix in (a, b)]
    left, right = (cupy.from_dlpack(tensor) for tensor in tensors)
    back = torch.from_dlpack(left)
    assert left.data.ptr == tensors[0].data_ptr() == back.data_ptr(), "copied on the way"
    error = float(abs(cupy.asnumpy(left @ right) - expected).max() / abs(expected).max())

    def there_and_back() -> None:
        cupy.asnumpy(cupy.asarray(a) @ cupy.asarray(b))

    ms = medians({"CuPy, torch's tensors without a copy": lambda: left @ right}, rounds, calls=5)
    spent = interleaved_ms({"CuPy, from NumPy's memory and back": there_and_back}, rounds=rounds, warm_up=1)
    ms |= {name: statistics.median(values) for name, values in spent.items()}
    cupy.get_default_memory_pool().free_all_blocks()
    for name, value in ms.items():
        note = f"{numpy_ms / value:,.0f} times as fast, relative difference {error:.1g}"
        found.append(Time(what=name, ms=value, ratio=value / numpy_ms, note=note))
    return found


# -- all ---------------------------------------------------------------------------------------------------------------


def time_table(heading: str, times: Sequence[Time]) -> str:
    rows = [[run.what, f"{run.ms:,.3f}", f"{run.ratio:.3g}x", run.note] for run in times]
    return table([[heading, "ms", "time", ""], *rows])


def speed_table(speeds: Sequence[Speed]) -> str:
    large = next(speed.gb_per_s for speed in speeds if speed.what == "large copy")
    rows = [
        [run.what, f"{run.us:,.1f}", f"{run.gb_per_s:,.0f}", f"{100 * run.gb_per_s / large:.0f}%"] for run in speeds
    ]
    return table([["read and written", "us", "GB/s", "of the large copy"], *rows])


def main() -> None:
    parser = arguments("Measure preprocessing on a GPU.")
    parser.add_argument("--rounds", type=int, default=7, help="how often every side is measured")
    args = parser.parse_args()
    if not is_possible(args):
        return
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    samples, side, large, size = (4, 32, 1 << 20, 256) if args.dry_run else (256, 224, 4 << 30, 10_000)
    speeds = kernel_speeds(samples, side, large, device, args.rounds)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    chains = chain_times(samples, side, device, args.rounds)
    products = product_times(size, device, args.rounds)
    text = "\n\n".join(
        (
            speed_table(speeds),
            time_table("one batch, with all that the host does", chains),
            time_table(f"claim 6: a product of {size:,} x {size:,}", products),
        )
    )
    print(f"\n{text}")
    record = {
        "kernel": [asdict(run) for run in speeds],
        "chain": [asdict(run) for run in chains],
        "product": [asdict(run) for run in products],
    }
    write("preprocessing", args.out, record, "Preprocessing, on", text)


if __name__ == "__main__":
    main()
