"""A step that raises because of an edit is run once more as the user wrote it, and the run goes on as a plain one."""

from __future__ import annotations

import copy
import json
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.core.report import AccelWarning
from lightning_accel.settings import Plan
from support.plugin.safety_net_ranks import CANNOT_BE_KEPT_AGAIN, RUNS, WEIGHTS_ONLY
from support.scripts import SUPPORT, run_script

pytestmark = pytest.mark.numbers

SETTINGS: dict[str, Any] = {"memory_format": "channels_last", "precision": "32-true", "report": False}


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
    plugin = AccelPlugin.from_plan(Plan().replace(**SETTINGS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccelWarning)
        return *fit(kind, plugin), plugin


@pytest.mark.parametrize("kind", [ViewsLate, ViewsGradient], ids=["a view at step 5", "a view of a gradient"])
def test_a_step_that_an_edit_makes_raise_is_repeated_without_and_the_run_goes_on(kind: type[Net]) -> None:
    plain, _ = fit(kind, None)
    model, _, plugin = fit_with_edits(kind)
    assert plugin.report.refused("memory_format")["conv"].startswith("a step raised RuntimeError: view size")
    assert any("ran without memory_format" in note for note in plugin.report.notes)
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


class AsksForTheGradientOfLogits(LightningModule):
    """Which the loss in pieces does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 96)

    def training_step(self, batch: Any) -> Tensor:
        logits = self.head(self.body(batch[0]))
        loss = F.cross_entropy(logits, torch.arange(len(logits)))
        (gradient,) = torch.autograd.grad(loss, [logits], retain_graph=True)
        return loss + gradient.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_one_technique_cannot_do_is_done_without_it_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch, make_trainer: Callable[..., Trainer]
) -> None:
    monkeypatch.setattr("lightning_accel.techniques.loss.technique.FEWEST_CLASSES", 96)
    monkeypatch.setattr("lightning_accel.techniques.loss.technique.SMALLEST_BYTES", 0)
    model, data = AsksForTheGradientOfLogits(), DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=8)
    twin = copy.deepcopy(model)
    plugin = AccelPlugin(precision="32-true", techniques={"optimizer": "off"})
    make_trainer(plugins=[plugin], max_epochs=2).fit(model, data)
    make_trainer(max_epochs=2).fit(twin, data)
    assert "taken back: grad was called" in plugin.report.of("loss").status
    assert plugin.report.applied("inplace_activations") == ["body.1"]
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


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


class IsStopped(Net):
    """Is told in its fifth step to stop; a repetition is not told again."""

    by: Callable[[], None]
    is_told = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4 and not self.is_told:
            type(self).is_told = True  # an attribute of its own would be taken back
            type(self).by()
        return loss


def _raise(error: Exception) -> None:
    raise error


_TYPED_IN = compile("raise TimeoutError('time is up')", "<stdin>", "exec")


@pytest.mark.parametrize(
    ("by", "is_event"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), True),
        (lambda: _raise(TimeoutError("time is up")), True),
        (lambda: np.load("time is up"), True),
        (lambda: exec(_TYPED_IN, {"__name__": "__main__"}), True),
        (lambda: _raise(RuntimeError("time is up")), False),
    ],
    ids=[
        "a signal",
        "an error of the system",
        "one in a library's function",
        "one in code without a file",
        "an error that an edit may have caused",
    ],
)
def test_an_event_that_would_not_come_again_ends_the_run(by: Callable[[], None], is_event: bool) -> None:
    kind = type("IsStoppedBy", (IsStopped,), {"by": staticmethod(by)})
    before = signal.signal(signal.SIGINT, lambda *_: _raise(RuntimeError("time is up")))
    try:
        with pytest.raises(Exception, match="time is up") if is_event else nullcontext():
            fit_with_edits(kind)
    finally:
        signal.signal(signal.SIGINT, before)


class RaisesInOneFit(Net):
    is_broken = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.is_broken:
            raise ValueError("not a number I like")
        return super().training_step(batch, batch_idx)


def test_an_error_of_the_users_own_costs_the_next_fit_no_edits(make_trainer: Callable[..., Trainer]) -> None:
    model, plugin = RaisesInOneFit(), AccelPlugin.from_plan(Plan().replace(**SETTINGS))
    data = DataLoader(TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(2, (24,))), batch_size=4)
    with pytest.raises(ValueError, match="not a number I like"):
        make_trainer(plugins=[plugin]).fit(model, data)
    model.is_broken = False
    make_trainer(plugins=[plugin]).fit(model, data)
    assert plugin.report.applied("memory_format") == ["conv"]


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
        precision="32-true",
        techniques={"memory_format": "off", "flash_attention": "off", "inplace_activations": False},
        report=False,
    )
    with pytest.raises(ValueError, match="not a number"):
        fit(Counted, plugin)
    assert calls == [0, 1, 2, 3]


# -- several ranks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of ``safety_net_ranks.py`` left what each rank came to."""
    folder = tmp_path_factory.mktemp("safety_net_ranks")
    run_script(SUPPORT / "plugin" / "safety_net_ranks.py", folder)
    return folder


@pytest.fixture
def ranks(folder: Path) -> Callable[[str, int], dict[str, Any]]:
    """What a rank of a run came to."""
    return lambda run, rank: json.loads((folder / f"{run}.{rank}.json").read_text())


@pytest.mark.medium
@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("plain")])
def test_a_rank_that_repeats_a_step_stays_with_the_others(
    ranks: Callable[[str, int], dict[str, Any]], name: str
) -> None:
    assert any("ran when it was repeated" in note for note in ranks(name, 1)["notes"])
    for rank in (0, 1):
        for what in ("weights", "statistics"):
            plain = ranks("plain, accumulating" if "accumulating" in name else "plain", rank)
            assert ranks(name, rank)[what] == pytest.approx(plain[what], rel=1e-5, abs=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_cannot_be_kept_once_it_has_begun_runs_all_the_same(
    ranks: Callable[[str, int], dict[str, Any]], rank: int
) -> None:
    assert not any("repeated" in note for note in ranks(CANNOT_BE_KEPT_AGAIN, rank)["notes"])
    assert ranks(CANNOT_BE_KEPT_AGAIN, rank)["weights"] == pytest.approx(ranks("plain", rank)["weights"], rel=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("fitted", [1, 2])
def test_a_checkpoint_of_weights_has_the_users_layout_where_ddp_keeps_one_that_was_refused(
    ranks: Callable[[str, int], dict[str, Any]], folder: Path, fitted: int
) -> None:
    """DDP's buckets count on the layout that the weights had when it was made: it stays until the run ends."""
    for rank in (0, 1):
        said = ranks(f"{WEIGHTS_ONLY}.{fitted}", rank)
        assert "conv" in said["refused"]
        assert said["strides in the run"] == [72, 1, 24, 8]
    saved = torch.load(folder / f"{WEIGHTS_ONLY}.{fitted}.ckpt", weights_only=True)
    assert saved["state_dict"]["conv.weight"].stride() == (72, 9, 3, 1)
