"""What a run with live trials trains to: the same as a plain run, whichever way its steps went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from support.lightning_models import Supervised
from support.live_runs import Speed, Timed, fit, simulated
from support.models import TinyTransformer

pytestmark = [pytest.mark.numbers, pytest.mark.medium]

MakeTrainer = Callable[..., Trainer]


def text(batches: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (4 * batches, 16), generator=generator)
    return DataLoader(TensorDataset(tokens, tokens.cumsum(1) % 11), batch_size=4)


def losses(
    make_trainer: MakeTrainer, *, threads: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor:
    """Of every step of a small GPT, in float64."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Supervised(TinyTransformer(dim=32, blocks=2, dropout=0.0)).to(dtype)
    make_trainer(**options).fit(model, text(150))
    return torch.tensor(model.losses, dtype=torch.float64)


def test_losses_are_no_further_from_a_plain_runs_than_those_on_another_number_of_threads(
    make_trainer: MakeTrainer,
) -> None:
    """Attention is fused in every other turn or so: its rounding is another, and no worse."""
    plain, on_two_threads = losses(make_trainer), losses(make_trainer, threads=2)
    exact = losses(make_trainer, dtype=torch.float64)
    force: Any = {"force": ["TransformerBlock"]}  # on trial, though the clock be against it at these sizes
    plugin = AccelPlugin(precision="32-true", techniques={"flash_attention": force}, report=False)
    live = losses(make_trainer, plugins=[plugin])
    assert "whole plan" in plugin.report.of("tuning").details
    # Two threads may happen to sum in the same order as one: what rounding costs shows against float64, too.
    spread = max(float((one - other).abs().max()) for one, other in ((plain, on_two_threads), (plain, exact)))
    assert float((live - plain).abs().max()) <= 4 * spread


class Scheduled(Timed):
    """Trains on random batches, with momentum, weight decay and a learning rate that changes with every step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([torch.randn(batch[0].shape, generator=self.generator)], batch_idx)

    def configure_optimizers(self) -> Any:
        self.generator = torch.Generator().manual_seed(2)
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=150)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


CALLBACKS: dict[str, Callable[[], Any]] = {
    "no callback": lambda: [],
    "an exponential average": lambda: [EMAWeightAveraging(decay=0.9, update_every_n_steps=3)],
    "an equal average": lambda: [WeightAveraging()],
}


BY_NORM, BY_VALUE = {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("callbacks", "clipping"),
    [("no callback", BY_NORM), ("an exponential average", {}), ("an equal average", BY_VALUE)],
)
def test_schedules_clipping_and_averages_come_out_the_same(callbacks: str, clipping: dict[str, Any]) -> None:
    trained = []
    with simulated(1.5) as time:
        for trust in ("measured", "checked"):
            torch.manual_seed(0)
            model = Scheduled(time)
            fit(model, 150, accel={"trust": trust}, callbacks=CALLBACKS[callbacks](), **clipping)
            trained.append((model, len(Speed.latest.switches)))
    (live, switches), (plain, none) = trained
    assert switches > 10
    assert none == 0
    assert torch.equal(live.layer.weight, plain.layer.weight)
    assert torch.equal(live.layer.bias, plain.layer.bias)


def test_an_average_is_validated_in_the_middle_of_the_trials() -> None:
    """The averaging callback swaps the weights around every validation."""
    trained = []
    with simulated(1.5) as time:
        for trust in ("measured", "checked"):
            torch.manual_seed(0)
            model = Scheduled(time)
            val = DataLoader(TensorDataset(torch.ones(4, 8)), batch_size=4)
            averaging = EMAWeightAveraging(decay=0.9)
            fit(model, 150, accel={"trust": trust}, callbacks=[averaging], val=val, val_check_interval=7)
            trained.append(model)
    assert torch.equal(trained[0].layer.weight, trained[1].layer.weight)
