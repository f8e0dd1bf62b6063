"""A step that raises because of an edit is run once more as the user wrote it, and the run goes on as a plain one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.engine import AccelWarning

pytestmark = pytest.mark.numbers

SETTINGS: dict[str, Any] = {"memory_format": "channels_last", "precision": "32-true", "log": False}


class Net(LightningModule):
    """A small network with everything that a repeated step might do twice: statistics, dropout, logging."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8 * 36, 2)
        self.losses: list[float] = []
        self.steps = 0

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()

    def flat(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("seen", float(batch_idx), on_step=False, on_epoch=True)
        loss = nn.functional.cross_entropy(self.head(self.dropout(self.flat(self.features(batch[0])))), batch[1])
        self.losses.append(float(loss.detach()))
        self.steps += 1
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class ViewsLate(Net):
    """Takes a branch with a ``.view()`` for the first time when the trials are long over."""

    def flat(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1) if self.steps == 4 else super().flat(x)


class _ViewsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view(-1).view(gradient.shape)


class ViewsGradient(Net):
    def features(self, x: Tensor) -> Tensor:
        return self.norm(_ViewsGradient.apply(self.conv(x))).relu()


def fit(kind: type[Net], plugin: AccelPlugin | None, steps: int = 6) -> tuple[Net, Trainer]:
    seed_everything(0)
    model = kind()
    data = TensorDataset(torch.randn(steps * 4, 3, 8, 8), torch.randint(2, (steps * 4,)))
    trainer = Trainer(
        plugins=[plugin] if plugin else [],
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4))
    return model, trainer


def fit_with_edits(kind: type[Net]) -> tuple[Net, Trainer, AccelPlugin]:
    plugin = AccelPlugin(**SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccelWarning)
        return *fit(kind, plugin), plugin


@pytest.mark.parametrize("kind", [ViewsLate, ViewsGradient], ids=["a view at step 5", "a view of a gradient"])
def test_a_step_that_an_edit_makes_raise_is_repeated_without_and_the_run_goes_on(kind: type[Net]) -> None:
    plain, _ = fit(kind, None)
    model, _, plugin = fit_with_edits(kind)
    assert plugin.report.refused("memory_format")["conv"].startswith("a step raised RuntimeError: view size")
    assert any("ran when it was repeated" in note for note in plugin.report.notes)
    torch.testing.assert_close(model.losses, plain.losses, rtol=1e-4, atol=1e-5)
    assert model.norm.num_batches_tracked == plain.norm.num_batches_tracked
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


class BreaksOurTrial(Net):
    """Raises in its first step exactly as long as a technique of ours is trying something."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if torch.overrides._get_current_function_mode_stack():
            raise RuntimeError("somebody is watching")
        return loss


def test_after_a_failed_trial_step_everything_is_as_in_a_plain_run() -> None:
    plain, plain_trainer = fit(BreaksOurTrial, None)
    model, trainer, plugin = fit_with_edits(BreaksOurTrial)
    assert "a step raised RuntimeError: somebody is watching" in plugin.report.refused("memory_format")["conv"]
    assert model.losses == plain.losses
    assert model.steps == plain.steps
    assert trainer.callback_metrics["seen"] == plain_trainer.callback_metrics["seen"]
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


class Raises(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise ValueError("not a number I like")
        return super().training_step(batch, batch_idx)


def test_an_error_of_the_users_own_comes_out_alone() -> None:
    with pytest.raises(ValueError, match="not a number I like") as caught:
        fit_with_edits(Raises)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


class StepsTwice(Net):
    """Raises after its optimizer has stepped, where a repetition would step once more."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.attempts = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.attempts += 1
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        if batch_idx == 3:
            raise ValueError("after the step")


def test_a_step_in_which_an_optimizer_has_stepped_is_not_repeated() -> None:
    attempts: list[Net] = []

    class Remembered(StepsTwice):
        def __init__(self) -> None:
            super().__init__()
            attempts.append(self)

    with pytest.raises(ValueError, match="after the step"):
        fit_with_edits(Remembered)
    assert attempts[0].attempts == 4


def test_without_edits_nothing_is_repeated() -> None:
    calls: list[int] = []

    class Counted(Raises):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

    plugin = AccelPlugin(
        memory_format="preserve", precision="32-true", flash_attention="off", inplace_activations=False, log=False
    )
    with pytest.raises(ValueError, match="not a number"):
        fit(Counted, plugin)
    assert calls == [0, 1, 2, 3]
