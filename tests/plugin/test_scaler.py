"""`16-mixed` on a CPU: what the gradient scaler does in real Lightning runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.settings import Plan
from support.lightning_models import Call, Supervised, cnn, images, mlp, sgd, vectors

pytestmark = pytest.mark.numbers

MakeTrainer = Callable[..., Any]


def fp16(**settings: Any) -> AccelPlugin:
    return AccelPlugin.from_plan(Plan().replace(precision="16-mixed", memory_format="off", report=False, **settings))


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def module(optimizer: Any = sgd, kind: type[Supervised] = Supervised) -> Supervised:
    torch.manual_seed(0)
    return kind(mlp(), optimizer)


class Gradients(Call):
    """The gradients that ``on_before_optimizer_step`` sees, and those the optimizer then steps with."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.before.append(torch.cat([p.grad.flatten().clone() for p in pl_module.parameters() if p.grad is not None]))


def stepped_with(optimizer: torch.optim.Optimizer, into: list[Tensor]) -> torch.optim.Optimizer:
    optimizer.register_step_pre_hook(lambda optimizer, *_: into.append(gradient_of(optimizer)))
    return optimizer


def gradient_of(optimizer: torch.optim.Optimizer) -> Tensor:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([torch.zeros(0), *(p.grad.flatten().clone() for p in parameters if p.grad is not None)])


# -- automatic optimization ---------------------------------------------------------------------------------------


def test_weights_are_close_to_those_of_a_float32_run(make_trainer: MakeTrainer) -> None:
    plain, accelerated = module(), module()
    make_trainer(max_epochs=2).fit(plain, vectors())
    make_trainer(max_epochs=2, plugins=[fp16()]).fit(accelerated, vectors())
    torch.testing.assert_close(weights(accelerated), weights(plain), rtol=2e-2, atol=2e-3)


def test_weights_equal_those_of_lightnings_own_scaler(make_trainer: MakeTrainer) -> None:
    theirs, ours = module(), module()
    make_trainer(plugins=[MixedPrecision("16-mixed", "cpu")], gradient_clip_val=0.1).fit(theirs, vectors())
    one = fp16(inplace_activations=False, optimizer="off")
    make_trainer(plugins=[one], gradient_clip_val=0.1).fit(ours, vectors())
    assert ours.losses == theirs.losses
    assert torch.equal(weights(ours), weights(theirs))


def test_hooks_before_the_optimizer_step_see_unscaled_gradients(make_trainer: MakeTrainer) -> None:
    plain, accelerated = Gradients(), Gradients()
    make_trainer(callbacks=[plain], limit_train_batches=1).fit(module(), vectors())
    make_trainer(callbacks=[accelerated], limit_train_batches=1, plugins=[fp16()]).fit(module(), vectors())
    torch.testing.assert_close(accelerated.before[0], plain.before[0], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_by_norm_holds_for_the_unscaled_gradient(make_trainer: MakeTrainer, fused: bool) -> None:
    seen: list[Tensor] = []
    model = module(lambda p: stepped_with(torch.optim.SGD(p, lr=0.1, fused=fused), seen))
    make_trainer(gradient_clip_val=0.01, plugins=[fp16()]).fit(model, vectors())
    assert [gradient.norm().item() for gradient in seen] == pytest.approx([0.01] * 4, rel=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_by_value_holds_for_the_unscaled_gradient(make_trainer: MakeTrainer, fused: bool) -> None:
    seen: list[Tensor] = []
    model = module(lambda p: stepped_with(torch.optim.AdamW(p, fused=fused), seen))
    trainer = make_trainer(gradient_clip_val=1e-3, gradient_clip_algorithm="value", plugins=[fp16()])
    trainer.fit(model, vectors())
    assert [gradient.abs().max().item() for gradient in seen] == pytest.approx([1e-3] * 4)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_fused_optimizer_updates_as_the_ordinary_one(make_trainer: MakeTrainer, clip: float | None) -> None:
    ordinary = module(lambda p: torch.optim.AdamW(p, lr=1e-2))
    fused = module(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
    for model in (ordinary, fused):
        make_trainer(gradient_clip_val=clip, plugins=[fp16()]).fit(model, vectors())
    torch.testing.assert_close(weights(fused), weights(ordinary), rtol=1e-4, atol=1e-6)


def test_accumulated_gradients_are_unscaled_once(make_trainer: MakeTrainer) -> None:
    plain, accelerated = module(), module()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 2}
    make_trainer(**options).fit(plain, vectors())
    make_trainer(**options, plugins=[fp16()]).fit(accelerated, vectors())
    torch.testing.assert_close(weights(accelerated), weights(plain), rtol=2e-2, atol=2e-3)


class SometimesNone(Supervised):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return None if batch_idx % 4 == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 100.0])
def test_a_training_step_that_returns_none_spoils_no_later_gradient(
    make_trainer: MakeTrainer, accumulate: int, clip: float | None
) -> None:
    seen: list[Tensor] = []
    model = module(lambda p: stepped_with(torch.optim.SGD(p, lr=1e-3), seen), SometimesNone)
    trainer = make_trainer(accumulate_grad_batches=accumulate, gradient_clip_val=clip, plugins=[fp16()])
    trainer.fit(model, vectors(8))
    assert len(seen) == (6 if accumulate == 1 else 2)
    assert max(gradient.norm().item() for gradient in seen) < 10


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_whose_training_step_returns_none_does_not_update(make_trainer: MakeTrainer) -> None:
    class AlwaysNone(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            return None

    model = module(kind=AlwaysNone)
    before = weights(model)
    make_trainer(plugins=[fp16()]).fit(model, vectors())
    assert torch.equal(weights(model), before)


class Overflowing(Supervised):
    """Its second step computes an infinite loss."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * math.inf if len(self.losses) == 1 else loss


def test_an_overflow_skips_the_step_and_halves_the_scale(make_trainer: MakeTrainer) -> None:
    seen: list[Tensor] = []
    model = module(lambda p: stepped_with(sgd(p), seen), Overflowing)
    plugin = fp16()
    trainer = make_trainer(plugins=[plugin])
    trainer.fit(model, vectors())
    assert len(seen) == 3
    assert plugin.scaler is not None
    assert plugin.scaler.skipped_steps == 1
    assert plugin.scaler.get_scale() == 2.0**15
    assert torch.isfinite(weights(model)).all()


def test_an_overflow_skips_the_step_of_a_fused_optimizer(make_trainer: MakeTrainer) -> None:
    model = module(lambda p: torch.optim.AdamW(p, fused=True), Overflowing)
    plugin = fp16()
    make_trainer(plugins=[plugin], gradient_clip_val=1.0).fit(model, vectors())
    assert plugin.scaler is not None
    assert plugin.scaler.skipped_steps == 1
    assert torch.isfinite(weights(model)).all()


def test_skipped_steps_and_the_loss_scale_are_logged(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(precision="16-mixed")
    trainer = make_trainer(plugins=[plugin], callbacks=[SpeedMemoryLogger()])
    trainer.fit(module(kind=Overflowing), vectors())
    assert trainer.callback_metrics["accel/skipped_steps"] == 1
    assert trainer.callback_metrics["accel/loss_scale"] == 2.0**15


def test_a_learning_rate_scheduler_steps_as_under_lightnings_own_scaler(make_trainer: MakeTrainer) -> None:
    class Scheduled(Overflowing):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    rates = []
    for plugin in (MixedPrecision("16-mixed", "cpu"), fp16()):
        trainer = make_trainer(plugins=[plugin])
        trainer.fit(module(kind=Scheduled), vectors())
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates[0] == rates[1] == 0.05 / 16


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lbfgs_trains_without_a_scaler(make_trainer: MakeTrainer, precision: Any) -> None:
    model = module(lambda p: torch.optim.LBFGS(p, max_iter=3))
    before = weights(model)
    make_trainer(plugins=[AccelPlugin(precision=precision)]).fit(model, vectors(2))
    assert not torch.equal(weights(model), before)


def test_lbfgs_with_a_scaler_is_refused_by_name(make_trainer: MakeTrainer) -> None:
    model = module(torch.optim.LBFGS)
    with pytest.raises(ValueError, match=r"LBFGS with precision='16-mixed'.*'bf16-mixed' or '32-true'"):
        make_trainer(plugins=[fp16()]).fit(model, vectors())


def test_an_optimizer_without_gradients_is_stepped_without_error(make_trainer: MakeTrainer) -> None:
    class Idle(Supervised):
        automatic_optimization = False

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.automatic_optimization = False
            self.idle = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            used, idle = self.optimizers()
            used.zero_grad()
            self.manual_backward(self.loss(batch))
            used.step()
            idle.step()

        def configure_optimizers(self) -> Any:
            return [sgd(self.net.parameters()), sgd(self.idle.parameters())]

    model = module(kind=Idle)
    before = weights(model)
    make_trainer(plugins=[fp16()]).fit(model, vectors())
    assert not torch.equal(weights(model), before)


# -- checkpoints --------------------------------------------------------------------------------------------------


def test_the_scale_resumes(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plugins=[fp16()])
    trainer.fit(module(kind=Overflowing), vectors())
    trainer.save_checkpoint("a.ckpt")
    plugin = fp16()
    make_trainer(plugins=[plugin], max_epochs=2).fit(module(), vectors(), ckpt_path="a.ckpt")
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**15
    assert plugin.scaler._get_growth_tracker() == 2 + 4


def test_a_checkpoint_of_lightnings_scaler_resumes_with_its_scale(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plugins=[MixedPrecision("16-mixed", "cpu")])
    trainer.fit(module(kind=Overflowing), vectors())
    trainer.save_checkpoint("a.ckpt")
    plugin = fp16()
    make_trainer(plugins=[plugin], max_epochs=2).fit(module(), vectors(), ckpt_path="a.ckpt")
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**15
    assert plugin.scaler._get_growth_tracker() == 2 + 4


def test_our_checkpoint_resumes_under_lightnings_scaler_with_its_scale(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plugins=[fp16()])
    trainer.fit(module(kind=Overflowing), vectors())
    trainer.save_checkpoint("a.ckpt")
    theirs = MixedPrecision("16-mixed", "cpu")
    make_trainer(plugins=[theirs], max_epochs=2).fit(module(), vectors(), ckpt_path="a.ckpt")
    assert theirs.scaler is not None
    assert theirs.scaler.get_scale() == 2.0**15
    assert theirs.scaler._get_growth_tracker() == 2 + 4


def test_a_checkpoint_of_before_lightning_1_6_resumes_with_its_scale(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plugins=[MixedPrecision("16-mixed", "cpu")])
    trainer.fit(module(kind=Overflowing), vectors())
    trainer.save_checkpoint("a.ckpt")
    checkpoint = torch.load("a.ckpt", weights_only=False)
    checkpoint["native_amp_scaling_state"] = checkpoint.pop("MixedPrecision")
    torch.save(checkpoint, "old.ckpt")
    plugin = fp16()
    make_trainer(plugins=[plugin], max_epochs=2).fit(module(), vectors(), ckpt_path="old.ckpt")
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 2.0**15


def test_a_second_fit_after_an_exception_starts_with_no_leftovers(make_trainer: MakeTrainer) -> None:
    def explode(*_: Any) -> None:
        raise RuntimeError("in the middle of a step")

    plugin = fp16()
    model = module()
    with pytest.raises(RuntimeError, match="in the middle"):
        make_trainer(plugins=[plugin], callbacks=[Call(on_before_optimizer_step=explode)]).fit(model, vectors())
    assert plugin.scaler is not None
    assert not plugin.scaler._per_optimizer_states
    make_trainer(plugins=[plugin]).fit(model, vectors())
    assert torch.isfinite(weights(model)).all()


def test_a_cnn_in_channels_last_trains_in_half_precision(make_trainer: MakeTrainer) -> None:
    model = Supervised(cnn())
    plugin = AccelPlugin(precision="16-mixed", techniques={"memory_format": "channels_last"})
    make_trainer(plugins=[plugin], max_epochs=2).fit(model, images())
    assert plugin.report.applied("memory_format")
    assert all(map(math.isfinite, model.losses))
