"""What the tests of TraceCallback share: a model of blocks, a run that is traced, and how its files are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.callbacks import TraceCallback
from lightning_accel.callbacks._phase_patch import PARTS
from lightning_accel.core.profilers import is_profiling
from lightning_accel.core.torch_private.compilation import compiled_call
from support.measured_runs import Model, loader


class Blocks(Model):
    """Two blocks of the same kind, and a head."""

    def __init__(self, hook: Any = lambda *_: None) -> None:
        super().__init__(hook)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.hook(self, batch_idx)
        return self.layer(self.blocks(batch)).sum()


def fit(make_trainer: Any, traces: TraceCallback, model: Model | None = None, data: Any = None, **options: Any) -> Any:
    """Trains, checks that nothing is left of the tracing, and returns the Trainer."""
    model = Blocks() if model is None else model
    validates = {"val_dataloaders": options.pop("validates")} if "validates" in options else {}
    trainer = make_trainer(callbacks=[traces, *options.pop("callbacks", [])], **options)
    strategy = trainer.strategy
    initialised = torch.autograd.profiler.profile.__init__
    try:
        trainer.fit(model, loader(8) if data is None else data, **validates)
    finally:
        assert not PARTS.keys() & vars(strategy).keys()
        assert not {"start", "stop"} & set(vars(trainer.profiler))
        assert all(compiled_call(module) is None for module in model.modules())
        assert torch.autograd.profiler.profile.__init__ is initialised
        assert not is_profiling()
    return trainer


def read(file: Path) -> dict[str, Any]:
    with gzip.open(file, "rt", encoding="utf-8") as text:
        found: dict[str, Any] = json.load(text)
    return found


def ranges(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Those with a name of ours or of somebody's, in the order in which they begin."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation" and event["ph"] == "X"]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def names(trace: dict[str, Any]) -> list[str]:
    return [event["name"] for event in ranges(trace)]


def traced_steps(traces: TraceCallback) -> list[list[int]]:
    return [read(file)["lightning_accel"]["steps"] for file in traces.files]
