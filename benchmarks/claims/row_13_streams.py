"""CUDA streams overlap copies with compute.

Claimed: hidden transfer
Holds: the next batches come through pinned memory on a stream of their own, while the device computes
Holds when: the copies go on beside the step; what that gains, and whether it hides them, depends on how long they take
    next to it
No longer holds: to have the copies go on beside the step costs as much here as they do
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_accel.claims.claim import Figure, NotHereError, Target, claim_in
from lightning_accel.claims.measure import interleaved_ms, speedup
from lightning_accel.claims.row_08_channels_last import conv
from lightning_accel.data import DevicePipeline

CLAIM = claim_in(__doc__, row=13)

SAMPLES, SIDE, STEPS = 256, 224, 12
DISTINCT = 4  # batches, which come again and again

Batch = tuple[Tensor, Tensor]


def measure() -> Iterator[Figure]:
    if not torch.cuda.is_available():
        raise NotHereError("needs a CUDA device: on a CPU there is nothing to copy to")
    device = torch.device("cuda", torch.cuda.current_device())
    yield from epochs(make_batches(SAMPLES, SIDE), device, rounds=7)


def epochs(batches: Sequence[Batch], device: torch.device, rounds: int) -> Iterator[Figure]:
    """The time of a step: over an epoch of ``batches``, pageable on the host, and over the same on the device."""
    step = training_step(device)
    distinct = {id(batch): batch for batch in batches}
    there = {key: copied(batch, device) for key, batch in distinct.items()}
    pipeline = DevicePipeline(list(batches), device)

    def epoch(ready: Callable[[], Iterable[Batch]]) -> Callable[[], None]:
        def run() -> None:
            for batch in ready():
                step(batch)

        return run

    sides = {
        "on the device": epoch(lambda: (there[id(batch)] for batch in batches)),
        "one after another": epoch(lambda: (copied(batch, device) for batch in batches)),
        "pipeline": epoch(lambda: pipeline),
    }
    try:
        spent = interleaved_ms(sides, rounds=rounds, warm_up=2)
    finally:
        pipeline.close()
    times = {name: [ms / len(batches) for ms in values] for name, values in spent.items()}
    serial, piped, bare = (times[name] for name in ("one after another", "pipeline", "on the device"))
    yield speedup("it is compared with copying before each step", serial, piped, Target("more than", 1))
    yield speedup("it is compared with batches that are on the device already", piped, bare, Target("about", 1))


def make_batches(samples: int, side: int) -> list[Batch]:
    """uint8 images ``(samples, 3, side, side)`` with labels, in pageable memory."""
    few = [
        (torch.randint(0, 256, (samples, 3, side, side), dtype=torch.uint8), torch.randint(0, 10, (samples,)))
        for _ in range(DISTINCT)
    ]
    return [few[step % DISTINCT] for step in range(STEPS)]


def copied(batch: Batch, device: torch.device) -> Batch:
    """As a Trainer does without pinned memory."""
    return batch[0].to(device), batch[1].to(device)


def training_step(device: torch.device) -> Callable[[Batch], None]:
    """Of a few convolutions, in bfloat16."""
    torch.manual_seed(0)
    convolutions = [conv(3, 64, stride=4), *(conv(64, 64) for _ in range(3))]
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Batch) -> None:
        images, labels = batch
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
