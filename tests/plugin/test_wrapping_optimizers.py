"""Optimizers of others that have less than torch's: a run with them is a plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.lightning_models import Supervised, cnn, images, sgd
from support.wrapping_optimizers import WRAPPING, Wrapping

pytestmark = pytest.mark.numbers

MakeTrainer = Callable[..., Trainer]


@pytest.mark.parametrize("plan", [{}, {"memory_format": "channels_last"}, {"memory_budget": "8 GiB"}])
@pytest.mark.parametrize("kind", WRAPPING)
def test_a_run_trains_is_saved_and_goes_on_as_a_plain_one(
    make_trainer: MakeTrainer, tmp_path: Path, kind: type[Wrapping], plan: dict[str, Any]
) -> None:
    def fit(*plugins: Any, epochs: int = 2, resumed: Path | None = None) -> tuple[Supervised, Trainer]:
        torch.manual_seed(0)
        module = Supervised(cnn(), lambda parameters: kind(sgd(parameters)))
        trainer = make_trainer(plugins=plugins, max_epochs=epochs, enable_model_summary=False)
        trainer.fit(module, images(), ckpt_path=resumed)
        return module, trainer

    plain, _ = fit()
    accelerated, trainer = fit(AccelPlugin.from_plan(Plan().replace(precision="32-true", report=False, **plan)))
    torch.testing.assert_close(accelerated.losses, plain.losses, rtol=1e-4, atol=1e-5)
    trainer.save_checkpoint(tmp_path / "at_work.ckpt")
    (went_on, _), (plain, _) = fit(epochs=3, resumed=tmp_path / "at_work.ckpt"), fit(epochs=3)
    torch.testing.assert_close(went_on.losses, plain.losses[-len(went_on.losses) :], rtol=1e-4, atol=1e-5)


def test_a_layout_is_refused_to_a_model_whose_optimizer_is_not_known(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(precision="32-true", report=False)
    module = Supervised(cnn(), lambda parameters: Wrapping(sgd(parameters)))
    make_trainer(plugins=[plugin]).fit(module, images())
    refused = plugin.report.refused("memory_format")
    assert refused
    assert all("is not an optimizer of torch's" in reason for reason in refused.values()), refused
