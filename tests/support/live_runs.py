"""Runs whose time is simulated: a step takes what a technique of the test's own makes of it, so verdicts are known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.core import clocks
from lightning_accel.settings import Plan
from lightning_accel.techniques import BuildContext, Technique, Traits, register
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.registry import forget
from lightning_accel.techniques.technique_events import Event, Switched
from support.technique_table import off

BATCH_SIZE = 4
OTHERS_OFF = off()  # all techniques but those that a test declares


class SimulatedTime:
    """What the clock of the trials takes for the time: it passes when a step says so, with noise of its own.

    Attributes:
        noise: The standard deviation of the log of what a step takes.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.noise = 0.01
        self._rng = random.Random(0)

    def perf_counter_ns(self) -> int:
        return round(self.now_ms * 1e6)

    def advance(self, ms: float) -> None:
        self.now_ms += ms * self._rng.lognormvariate(0, self.noise)


class Speed(Technique):
    """Makes a step ``speedup`` times as fast while its arm is on, and notes every switch and every step."""

    traits = Traits(acts_without_sites=True)
    speedup = 1.5
    latest: Speed

    def __init__(self) -> None:
        self.now = "on"
        self.switches: list[str] = []
        self.run.live = Live(variants=("on",))
        type(self).latest = self

    @classmethod
    def from_settings(cls, settings: Any, context: BuildContext) -> Speed:
        return cls()

    def on(self, event: Event) -> None:
        if isinstance(event, Switched):
            self.now = event.variant
            self.switches.append(event.variant)


@contextmanager
def simulated(speedup: float) -> Iterator[SimulatedTime]:
    """A technique ``speed`` of that speedup, and a clock that steps advance."""
    register("speed", options=Literal["auto", "off"], default="auto")(Speed)
    Speed.speedup = speedup
    time = SimulatedTime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "perf_counter_ns", time.perf_counter_ns)
        try:
            yield time
        finally:
            forget("speed")


class Timed(LightningModule):
    """A linear layer whose step takes 10 ms of simulated time, less where the arm is on; ``seen`` has every choice."""

    def __init__(self, time: SimulatedTime, *, manual: bool = False, optimizers: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.time, self.num_optimizers = time, optimizers
        self.automatic_optimization = not manual
        self.seen: list[str] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        on = Speed.latest.now == "on"
        self.seen.append(Speed.latest.now)
        self.time.advance(10 / (Speed.speedup if on else 1.0) * len(batch[0]) / BATCH_SIZE)
        return self.trained(batch)

    def trained(self, batch: list[Tensor]) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        if not self.automatic_optimization:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.zero_grad()
                self.manual_backward(loss, retain_graph=True)
                optimizer.step()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.time.advance(500)

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.parameters(), 0.01) for _ in range(self.num_optimizers)]
        return made if len(made) > 1 else made[0]


def batches(count: int, size: int = BATCH_SIZE) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(count * size, 8)), batch_size=size)


def fit(model: LightningModule, steps: int = 200, *, loader: Any = None, **settings: Any) -> AccelPlugin:
    """Fits ``model`` with the plugin, and returns that."""
    trainer, ckpt_path, val = settings.pop("trainer", None), settings.pop("ckpt_path", None), settings.pop("val", None)
    accel = settings.pop("accel", {})
    plugin = AccelPlugin.from_plan(Plan().replace(**{"report": False, **OTHERS_OFF, **accel}))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    limits = {"max_epochs": 1} if "max_steps" not in settings else {}
    options = {"enable_checkpointing": False, **quiet, **limits, **settings}
    trainer = trainer or Trainer(plugins=[plugin], **options)
    trainer.fit(model, loader if loader is not None else batches(steps), val, ckpt_path=ckpt_path)
    return plugin
