"""Evaluation after a fit with live trials: it runs with what the fit has settled for the same module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_accel import AccelPlugin
from lightning_accel.core.host import Host
from lightning_accel.tuning.tuning_result import Tuning
from support.lightning_models import Supervised, mlp, vectors
from support.live_runs import SimulatedTime, Speed, Timed, batches, simulated

STAGES = ("validate", "test", "predict")


class Evaluated(Timed):
    """Notes what is on in the steps of an evaluation."""

    def __init__(self, time: SimulatedTime) -> None:
        super().__init__(time)
        self.evaluated: list[str] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluated.append(Speed.latest.now)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluated.append(Speed.latest.now)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.evaluated.append(Speed.latest.now)
        return self.layer(batch[0])


def trainer_with(plugin: AccelPlugin) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(plugins=[plugin], max_epochs=1, enable_checkpointing=False, **quiet)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("speedup", "settled"), [(0.8, "off"), (1.5, "on")])
def test_it_runs_with_what_the_fit_has_settled(stage: str, speedup: float, settled: str) -> None:
    with simulated(speedup) as time:
        model, trainer = Evaluated(time), trainer_with(AccelPlugin(report=False))
        trainer.fit(model, batches(100))
        getattr(trainer, stage)(model, batches(3))
    assert model.evaluated == [settled] * 3


def test_another_module_is_evaluated_by_the_rules() -> None:
    with simulated(0.8) as time:
        fitted, other, trainer = Timed(time), Evaluated(time), trainer_with(AccelPlugin(report=False))
        trainer.fit(fitted, batches(100))
        trainer.test(other, batches(3))
    assert other.evaluated == ["on"] * 3


@pytest.mark.parametrize("choices", [{}, {"precision": "bf16-mixed"}])
def test_a_number_format_that_lost_is_not_evaluated_in(
    choices: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(kind="cpu", device_name="a CPU with bfloat16", native_bf16=True)
    monkeypatch.setattr(Host, "detect", lambda device: host)
    autocast: list[bool] = []

    class Watched(Supervised):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            autocast.append(torch.is_autocast_enabled("cpu"))

    plugin = AccelPlugin(precision="auto", report=False)
    trainer, model = trainer_with(plugin), Watched(mlp())
    trainer.fit(model, vectors(3))  # too short to try anything
    plugin.load_state_dict({"tuning": Tuning(choices, is_settled=True).to_dict()})
    trainer.test(model, vectors(1))
    trainer.test(Watched(mlp()), vectors(1))  # of which nothing is known
    assert autocast == [bool(choices), True]
