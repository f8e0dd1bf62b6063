"""Fused and foreach steps in real Lightning runs: checkpoints, resumption, clipping, float16, manual optimization."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.lightning_models import Supervised, mlp, vectors
from support.live_runs import SimulatedTime, fit, simulated
from support.strategies.gan import Gan
from support.technique_table import off

pytestmark = pytest.mark.numbers

MakeTrainer = Callable[..., Any]
adamw = partial(AdamW, lr=0.05)


def plugin(setting: str = "fused", **more: Any) -> AccelPlugin:
    return AccelPlugin.from_plan(Plan().replace(**off() | {"optimizer": setting, "report": False} | more))


def module(optimizer: Any = adamw) -> Supervised:
    torch.manual_seed(0)
    return Supervised(mlp(), optimizer)


class Flags:
    """Makes an optimizer, and notes with which flags each of its steps was taken."""

    def __init__(self, make: Callable[[Any], Optimizer] = adamw) -> None:
        self.make = make
        self.fused: list[bool | None] = []

    def __call__(self, parameters: Any) -> Optimizer:
        optimizer = self.make(parameters)
        # The first argument is what torch's step was given.
        optimizer.register_step_post_hook(lambda _, args, __: self.fused.append(args[0].param_groups[0]["fused"]))
        return optimizer


@pytest.mark.parametrize("setting", ["fused", "foreach"])
@pytest.mark.parametrize("clipping", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
def test_a_run_trains_as_a_plain_one(make_trainer: MakeTrainer, setting: str, clipping: dict[str, Any]) -> None:
    flags = Flags()
    plain, accelerated = module(), module(flags)
    make_trainer(max_epochs=2, **clipping).fit(plain, vectors())
    make_trainer(max_epochs=2, plugins=[plugin(setting)], **clipping).fit(accelerated, vectors())
    assert accelerated.losses == pytest.approx(plain.losses, rel=1e-5)
    torch.testing.assert_close(accelerated.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert set(flags.fused) == {True if setting == "fused" else None}


@pytest.mark.parametrize("first", ["plain", "fused"])
def test_runs_resume_each_others_checkpoints(make_trainer: MakeTrainer, tmp_path: Path, first: str) -> None:
    whole = module()
    make_trainer(max_epochs=4).fit(whole, vectors())
    checkpoint = tmp_path / "last.ckpt"
    begun, resumed, flags = module(), module(Flags()), Flags()
    plugins = {"plain": [], "fused": [plugin()]}
    trainer = make_trainer(max_epochs=2, plugins=plugins[first])
    trainer.fit(begun, vectors())
    trainer.save_checkpoint(checkpoint)
    resumed = module(flags)
    second = "fused" if first == "plain" else "plain"
    trainer = make_trainer(max_epochs=4, plugins=[plugin()] if second == "fused" else [])
    trainer.fit(resumed, vectors(), ckpt_path=checkpoint)
    assert set(flags.fused) == {True if second == "fused" else None}
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_the_middle_is_a_plain_trainers(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    saved = []
    for name, plugins in (("plain", []), ("fused", [plugin()])):
        checkpoints: dict[str, Any] = {"default_root_dir": tmp_path / name, "enable_checkpointing": True}
        trainer = make_trainer(max_epochs=2, plugins=plugins, **checkpoints)
        trainer.fit(module(), vectors())
        path = trainer.checkpoint_callback.best_model_path
        saved.append(torch.load(path, weights_only=True)["optimizer_states"][0])
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    torch.testing.assert_close(saved[1]["state"], saved[0]["state"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_float16_with_a_scaler_and_clipping_steps_fused(make_trainer: MakeTrainer, clip: float | None) -> None:
    """Where the user's own ``fused=True`` would have Lightning refuse to clip (Lightning#21435)."""
    flags = Flags()
    plain, accelerated = module(), module(flags)
    for each, setting in ((plain, "off"), (accelerated, "fused")):
        one = plugin(setting, precision="16-mixed")
        make_trainer(max_epochs=2, plugins=[one], gradient_clip_val=clip).fit(each, vectors())
    assert set(flags.fused) == {True}
    torch.testing.assert_close(accelerated.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def test_manual_optimization_of_two_optimizers_steps_both_fused(make_trainer: MakeTrainer) -> None:
    flags = [Flags(partial(SGD, lr=0.01, momentum=0.9)), Flags(partial(AdamW, lr=0.01))]

    class Marked(Gan):
        def configure_optimizers(self) -> Any:
            return [flags[0](self.generator.parameters()), flags[1](self.critic.parameters())]

    points = DataLoader(TensorDataset(torch.randn(48, 2), torch.randn(48, 4)), batch_size=8)
    one = plugin()
    torch.manual_seed(0)
    make_trainer(plugins=[one]).fit(Marked(clip=0.5), points)
    assert [set(each.fused) for each in flags] == [{True}, {True}]
    assert one.report.applied("optimizer") == ["optimizer 0", "optimizer 1"]


class Slow(LightningModule):
    """Whose optimizer takes most of the simulated time, and less where it is fused."""

    def __init__(self, time: SimulatedTime, fused_ms: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.time, self.fused_ms = time, fused_ms
        self.flags: list[bool | None] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.time.advance(1)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Optimizer:
        optimizer = AdamW(self.parameters())
        optimizer.register_step_post_hook(self.stepped)
        return optimizer

    def stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        group = args[0].param_groups[0]
        assert optimizer.param_groups[0]["fused"] is None
        self.flags.append(group["fused"])
        self.time.advance(self.fused_ms if group["fused"] else 8 if group["foreach"] else 10)


@pytest.mark.parametrize(("fused_ms", "ends"), [(2.0, True), (20.0, None)])
def test_the_runs_own_steps_decide_where_nothing_else_is_in_force(fused_ms: float, ends: bool | None) -> None:
    with simulated(1.0) as time:
        model = Slow(time, fused_ms)
        one = fit(model, 300, accel=off() | {"optimizer": "auto", "trust": "measured", "speed": "off"})
    assert {True, None} <= set(model.flags)
    assert model.flags[-1] is ends
    chosen = "fused" if ends else "foreach"
    assert f"techniques.optimizer={chosen}" in one.report.of("tuning").status or chosen in one.report.to_text()


def test_an_error_of_the_users_is_raised_once_where_only_the_optimizer_is_edited(make_trainer: MakeTrainer) -> None:
    """A step is repeated without edits where there are any in it: this technique has none in forward or loss."""
    calls = []

    class Broken(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            calls.append(batch_idx)
            if batch_idx == 2:
                raise KeyError("user's bug")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError, match="user's bug"):
        make_trainer(plugins=[plugin()]).fit(Broken(mlp(), adamw), vectors())
    assert calls == [0, 1, 2]


def test_evaluating_warns_of_no_optimizer_that_is_not_there(make_trainer: MakeTrainer) -> None:
    make_trainer(plugins=[plugin()]).validate(module(), vectors(), verbose=False)
