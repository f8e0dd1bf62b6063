"""Steps of a ResNet on batches that come from the host, on a GPU: with the device pipeline and without (claim 13).

    make gpu PYTHON=python3                                     # among the rest
    python benchmarks/gpu_pipeline.py --out docs/results        # the package installed

uint8 images of 256x3x224x224 in pageable memory, cropped, flipped and normalised on the device, bfloat16 autocast. To
reach: 3% over a step on data that is on the device already. The narrow network is there because its steps are short:
what is not hidden shows. Takes about two minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict

import torch
from _gpu import arguments, is_possible, write
from _networks import ResNet50
from gpu_preprocessing import Batch, Time, make_batch, make_preprocess, time_table
from torch.nn import functional as F

from lightning_accel.claims.measure import interleaved_ms, median_ratio
from lightning_accel.data import DevicePipeline, Position

DISTINCT = 4  # batches, which come again and again


def step_times(
    name: str, width: int, batches: Sequence[Batch], side: int, device: torch.device, rounds: int
) -> list[Time]:
    """Milliseconds a step: an epoch over ``batches``, by their number."""
    torch.manual_seed(0)
    model = ResNet50(width=width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    preprocess = make_preprocess(side, device)
    # Few batches come again and again: little memory holds what is on the device already.
    distinct = {id(batch): batch for batch in batches}
    ready = {key: preprocess(to_device(batch, device), Position()) for key, batch in distinct.items()}

    def step(batch: Batch) -> None:
        images, labels = batch
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def on_device() -> None:
        for batch in batches:
            step(ready[id(batch)])

    def one_after_another() -> None:
        for index, batch in enumerate(batches):
            step(preprocess(to_device(batch, device), Position(batch_idx=index)))

    pipeline = DevicePipeline(list(batches), device, preprocess, depth=2)

    def piped() -> None:
        for batch in pipeline:
            step(batch)

    bare = "data on the device already"
    sides = {bare: on_device, "copied and preprocessed before each step": one_after_another, "DevicePipeline": piped}
    try:
        spent = interleaved_ms(sides, rounds=rounds, warm_up=1)
    finally:
        pipeline.close()
    return [
        Time(
            what=f"{name}: {way}",
            ms=statistics.median(spent[way]) / len(batches),
            ratio=median_ratio(spent[way], spent[bare]),
        )
        for way in sides
    ]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """As Lightning does without ``pin_memory``."""
    return batch[0].to(device), batch[1].to(device)


def main() -> None:
    parser = arguments("Measure the device pipeline on a GPU.")
    parser.add_argument("--rounds", type=int, default=5, help="how many epochs every side takes")
    args = parser.parse_args()
    if not is_possible(args):
        return
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    samples, side, steps = (4, 32, 3) if args.dry_run else (256, 224, 30)
    widths = {"ResNet-50": 4 if args.dry_run else 64, "a quarter as wide": 4 if args.dry_run else 16}
    few = [make_batch(samples, side) for _ in range(DISTINCT)]
    batches = [few[step % DISTINCT] for step in range(steps)]
    times = [
        run for name, width in widths.items() for run in step_times(name, width, batches, side, device, args.rounds)
    ]
    text = time_table("claim 13: a training step", times)
    print(f"\n{text}")
    write("pipeline", args.out, {"steps": [asdict(run) for run in times]}, "The device pipeline, on", text)


if __name__ == "__main__":
    main()
