"""What the tests of reports share: a run to be reported, and records that are made of one by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.core.states import Sites
from lightning_accel.evidence.events import PlanHeld, RunStarted, StepMeasured, TrialDecided
from lightning_accel.evidence.peaks import Peaks
from lightning_accel.evidence.record import Record
from lightning_accel.evidence.step_breakdown import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS,
    PARAMETERS,
    Anatomy,
    LayoutCopy,
    MemoryPeaked,
    ModuleCost,
)
from lightning_accel.experiment.pair_test import RatioInterval
from support.measured_runs import Folder

MIB = 1 << 20
PEAKS = Peaks(float32_flops=1e11, bfloat16_flops=2e11, bytes_per_sec=1e10)

ODD = """<b onclick="x">&amp; | `'$\\_日本* [a](b)"""
"""What would be read as markup, if it were not told not to be; no name of a module may hold a dot."""


class Nested(LightningModule):
    """Modules within modules, one of them with an odd name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.heads = nn.ModuleDict({ODD: nn.Linear(8, 2)})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.heads[ODD](self.body(batch)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def vectors(batches: int = 40) -> DataLoader[Tensor]:
    return DataLoader(torch.ones(4 * batches, 8), batch_size=4)  # type: ignore[arg-type]


def make_trainer(folder: Path | None, *plugins: Any, **options: Any) -> Trainer:
    """On one CPU, with a folder of its own (None: none), and a SpeedMemoryLogger, which is to measure all there is."""
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    logger = False if folder is None else Folder(folder)
    measured = {"callbacks": [SpeedMemoryLogger(every_s=0.0)], "logger": logger}
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **measured, **quiet}
    return Trainer(plugins=list(plugins), **{**settings, **options})


def record_of(**changes: Any) -> Record:
    """A record of 64 steps of 10 ms on a GPU of 8 GiB, of which one was taken apart; by hand, so that all is known."""
    header = RunStarted(
        started="2026-11-23T12:00:00+00:00",
        command=["train.py"],
        model="mine.Model",
        parameters=1000,
        settings=None,
        precision="bf16-mixed",
        strategy="SingleDeviceStrategy",
        machine="a GPU (cuda)",
        cores=4,
        world_size=1,
        versions={"torch": "2.13.0"},
        device_bytes=8192 * MIB,
        loaders=[{"batch_size": 4, "num_workers": 0}],
    )
    peak = {PARAMETERS: 100 * MIB, GRADIENTS: 100 * MIB, ACTIVATIONS: 300 * MIB, LOGITS: 500 * MIB}
    anatomy = Anatomy(
        step=3,
        modules=[
            ModuleCost(module="", kind="Model", forward_ms=1.0, backward_ms=1.0, moved_bytes=1000),
            ModuleCost(module="a.b", kind="Linear", forward_ms=1.0, backward_ms=3.0, flops=4 * 10**8, moved_bytes=1000),
            ModuleCost(module="a.c", kind="ReLU", forward_ms=1.0, backward_ms=1.0, moved_bytes=10**7),
            ModuleCost(module="(optimizer)", kind="", forward_ms=9.0),
        ],
        copies=[
            LayoutCopy(module="a", line="train.py:3, in forward", made_by="permute", moved_bytes=99, ms=0.1, count=2)
        ],
        waits={"train.py:4, in training_step": 2},
        operations=100,
        operations_ms=9.0,
        work_ms=8.5,
    )
    values = {
        "path": Path("runs/version_1/accel/20261123T120000-1.jsonl"),
        "header": header,
        "steps": [steps(1, 10.0)],
        "epochs": [{"epoch": 0, "steps": 64, "peak_memory_mib": 1200.0, "peak_memory_source": "the allocator's peak"}],
        "status": "finished",
        "anatomy": anatomy,
        "memory": MemoryPeaked(peak_bytes=1000 * MIB, parts=peak, modules={"a.b": 300 * MIB, "": 500 * MIB}),
        **changes,
    }
    return Record(**values)


def steps(first: int, ms: float, *, wait_ms: float = 0.1, losses: Any = ()) -> StepMeasured:
    """64 of them, each of the same length."""
    return StepMeasured(
        first=first,
        last=first + 63,
        timed=64,
        cycle_ms=[ms] * 32,
        wait_ms=[wait_ms] * 32,
        samples=256,
        losses=list(losses),
        looked_at=4,
        parts_ms={"waiting for data": 4 * wait_ms, "forward": 4 * (ms - wait_ms)},
        held_mib=[100.0] * 4,
    )


def with_header(record: Record, **changes: Any) -> Record:
    return replace(record, header=replace(record.header, **changes))


def told(**techniques: Any) -> dict[str, Any]:
    """What a record has of techniques that are on or not, with what came of their sites, ``applied`` or ``refused``."""
    nothing = {"on": False, "state": "off", "status": "off", "details": ""}
    report = {name: nothing | ({"state": "decided"} if one else {}) | one for name, one in techniques.items()}
    sites = {name: Sites(name) for name in techniques}
    for name, one in report.items():
        for site, reason in {**one.pop("applied", {})}.items():
            sites[name].change(site, "ON", reason)
        for site, reason in {**one.pop("refused", {})}.items():
            sites[name].change(site, "OFF", reason)
    changes = {(name, site): one for name, of in sites.items() for site, one in of.items()}
    return {"report": {"device": "a GPU", "notes": [], "techniques": report}, "sites": changes}


def decided(name: str, verdict: Any, ratio: Any, without: Any = (), with_it: Any = (), peaks: Any = ()) -> TrialDecided:
    """Of a live trial on 24 steps: what either side had, and held."""
    sides = {"original": dict.fromkeys(without, "on"), "candidate": dict.fromkeys(with_it, "on")}
    return TrialDecided(name, verdict, RatioInterval(*map(float, ratio)), 24, **sides, peak_bytes=tuple(peaks))


def tuned(ratio: float, low: float, high: Any, choices: Any, step: int | None = None) -> dict[str, Any]:
    """What a record has of live trials that compared one arm, and all of it with plain."""
    bounds = ratio, low, high
    trials = {name: decided(name, "faster", bounds, (), ["precision"]) for name in ("whole plan", "precision")}
    held = PlanHeld(choices=choices, whole=trials["whole plan"], is_settled=True, step=step)
    return {"trials": trials, "held": held}
