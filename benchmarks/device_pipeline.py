"""What preprocessing costs a training when the next batches are prepared while one is in work.

    python benchmarks/device_pipeline.py [--json docs/results]

Fits of a small CNN under a Trainer with AccelPlugin, on random uint8 images, in turn: on batches that need no
preprocessing (*ready*), with `preprocess=[...]` through the pipeline, and with the same preprocessing at the transfer
of each batch (*inline*, as a module with a transfer hook of its own has it). The depth of the network is chosen so that
preprocessing takes 60% of a step's time or more. One thread a side (OMP_NUM_THREADS=1), on two cores or more.

With `pip install torchdata`, *nodes* is the same transforms in a chain of `torchdata.nodes` that prepares two batches
ahead, as a loader of the user's own: a CPU is all that it can be compared on, since no node copies to a device.

A trace of some steps, taken by two transforms and the module's own hooks, is drawn in docs/data.md.

To answer: less than 10% of the throughput.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy and torch are loaded: their products would take the other core

import importlib.util
import itertools
import statistics
import threading
import time
from typing import Any

import torch
from _measure import publish
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.data import (
    ColorJitter,
    Map,
    Normalize,
    Position,
    Preprocess,
    RandomCrop,
    RandomHorizontalFlip,
    Transform,
)
from lightning_accel.settings import Plan

BATCH, SIZE, STEPS, WARM_UP, ROUNDS, SHARE = 64, 64, 40, 10, 7, 0.6
TRACED = 6  # steps in the picture
CHAIN: list[Transform] = [
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    RandomCrop(SIZE, padding=4),
    RandomHorizontalFlip(),
    Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
]


class Trace:
    """When what began and ended, in ms, and on which thread."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, float, str]] = []

    def mark(self, name: str) -> None:
        thread = "training" if threading.current_thread() is threading.main_thread() else "pipeline"
        self.marks.append((name, 1e3 * time.perf_counter(), thread))

    def spans(self) -> list[dict[str, Any]]:
        """What took how long, in the order in which it ended."""
        opened: dict[str, float] = {}
        found = []
        for name, at_ms, thread in self.marks:
            what, _, edge = name.partition(" ")
            if edge == "begins":
                opened[what] = at_ms
            elif what in opened:
                found.append({"what": what, "begin_ms": opened.pop(what), "end_ms": at_ms, "thread": thread})
        return found

    def median_ms(self, what: str) -> float:
        """What one took, the first few left out."""
        times = [span["end_ms"] - span["begin_ms"] for span in self.spans() if span["what"] == what]
        return statistics.median(times[WARM_UP:])

    def picture(self) -> list[dict[str, Any]]:
        """The spans of some steps in mid-run, from the beginning of the first on."""
        spans = self.spans()
        steps = [span for span in spans if span["what"] == "step"][WARM_UP : WARM_UP + TRACED]
        begin, end = steps[0]["begin_ms"], steps[-1]["end_ms"]
        return [
            {**span, "begin_ms": round(span["begin_ms"] - begin, 2), "end_ms": round(span["end_ms"] - begin, 2)}
            for span in spans
            if span["end_ms"] > begin and span["begin_ms"] < end
        ]


class Network(LightningModule):
    """Convolutions, as many as are asked for; it notes when each step begins and ends."""

    def __init__(self, depth: int, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.stem = nn.Conv2d(3, 24, 3, stride=4, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1) for _ in range(depth))
        self.head = nn.Linear(24, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        x = self.stem(images)
        for block in self.blocks:
            x = x + F.relu(block(x))
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)

    def on_train_batch_start(self, *_: Any) -> None:
        self.trace.mark("step begins")

    def on_train_batch_end(self, *_: Any) -> None:
        self.trace.mark("step ends")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class InlineNetwork(Network):
    """With a hook of its own before the transfer, so that no batch can be prepared ahead."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def prepared_by_nodes(loader: Any, chain: list[Transform]) -> Any:
    """The loader with its batches transformed two ahead; a fit goes through it once."""
    from torchdata import nodes

    preprocess, places = Preprocess(chain), itertools.count()
    source = nodes.IterableWrapper(loader)
    # A node is not told where in the run it is: it counts.
    prepared = nodes.Mapper(source, lambda batch: preprocess(batch, Position(batch_idx=next(places))))
    return nodes.Loader(nodes.Prefetcher(prepared, prefetch_factor=2))


def fit(how: str, depth: int) -> tuple[float, Trace]:
    """Steps a second of one fit, after the first few, and its trace."""
    seed_everything(0, verbose=False)
    trace = Trace()

    def noted(name: str) -> Map:
        return Map(lambda xp, batch: (trace.mark(name), batch)[1])

    images = torch.randint(0, 256, (BATCH * STEPS, 3, SIZE, SIZE), dtype=torch.uint8)
    data = TensorDataset(images if how != "ready" else images.float() / 255, torch.randint(0, 10, (len(images),)))
    # Whole batches from the dataset: collating sample by sample would be the loader's time, not what is measured.
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(data), BATCH, drop_last=True)
    loader = DataLoader(data, sampler=sampler, batch_size=None)
    chain = [] if how == "ready" else [noted("preprocess begins"), *CHAIN, noted("preprocess ends")]
    left_alone = {"precision": "32-true", "memory_format": "off", "inplace_activations": False, "report": False}
    plugin = AccelPlugin.from_plan(Plan().replace(**left_alone, preprocess=[] if how == "nodes" else chain))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", plugins=[plugin], max_epochs=1, enable_model_summary=False, **quiet)
    network = (InlineNetwork if how == "inline" else Network)(depth, trace)
    trainer.fit(network, prepared_by_nodes(loader, chain) if how == "nodes" else loader)
    ends = [at_ms for name, at_ms, _ in trace.marks if name == "step ends"][WARM_UP:]
    return 1e3 / statistics.median(b - a for a, b in itertools.pairwise(ends)), trace


def calibrated() -> int:
    """The largest depth at which preprocessing takes `SHARE` of a step, by what both take in fits like the measured."""
    shallow_ms, deep_ms = (fit("ready", depth)[1].median_ms("step") for depth in (1, 9))
    # After them: with large blocks freed once, the C library no longer asks the system for each array.
    preparing_ms = fit("inline", 1)[1].median_ms("preprocess")
    return max(1, int(1 + 8 * (preparing_ms / SHARE - shallow_ms) / (deep_ms - shallow_ms)))


def main() -> None:
    torch.set_num_threads(1)
    depth = calibrated()
    speeds: dict[str, list[float]] = {"ready": [], "pipeline": [], "inline": []}
    if importlib.util.find_spec("torchdata"):
        speeds["nodes"] = []
    traces: dict[str, Trace] = {}
    for round_ in range(ROUNDS):
        for how in speeds if round_ % 2 else reversed(speeds):
            speed, traces[how] = fit(how, depth)
            speeds[how].append(speed)
    preparing_ms = traces["inline"].median_ms("preprocess")
    share = preparing_ms / traces["ready"].median_ms("step")
    rows = []
    for how, found in speeds.items():
        costs = [1 - speed / ready for speed, ready in zip(found, speeds["ready"], strict=True)]
        cost = "" if how == "ready" else f"{statistics.median(costs):+.1%} ({min(costs):+.1%} to {max(costs):+.1%})"
        rows.append([how, f"{statistics.median(found):.1f}", cost])
    publish(
        "device_pipeline",
        "python benchmarks/device_pipeline.py",
        ["batches", "steps a second", "throughput lost (median, range of rounds)"],
        rows,
        {
            "preprocess_ms": round(preparing_ms, 2),
            "share_of_step": round(share, 3),
            "depth": depth,
            "spans": {how: traces[how].picture() for how in ("inline", "pipeline")},
        },
    )
    print(f"  preprocessing a batch takes {preparing_ms:.1f} ms by itself, {share:.0%} of a step on ready batches")


if __name__ == "__main__":
    main()
