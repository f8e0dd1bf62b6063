"""What breaks when a Lightning drops one of the private names that the library uses, in plain words: a test a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_accel.lightning import private
from support.lightning_models import Call, Supervised, cnn, images

MakeTrainer = Callable[..., Trainer]


def seen_at(hook: str, look: Callable[..., Any], make_trainer: MakeTrainer, **options: Any) -> list[Any]:
    """What ``look(trainer)`` sees, each time that a fit comes to this hook."""
    seen: list[Any] = []
    callback = Call(**{hook: lambda trainer, *_: seen.append(look(trainer))})
    make_trainer(callbacks=[callback], **options).fit(Supervised(cnn()), images())
    return seen


def test_combined_loader_has_the_loaders_of_a_loop(make_trainer: MakeTrainer) -> None:
    """Without it a loop keeps the pipeline in place of the user's loader, and preprocessing does not know its epoch."""
    (combined,) = seen_at("on_train_start", lambda t: private.combined_loader(t.fit_loop), make_trainer)
    assert len(combined.flattened) == 1
    assert private.combined_loader(make_trainer().test_loop) is None


@pytest.mark.parametrize(("mode", "is_sequential"), [("sequential", True), ("max_size", False)])
def test_mode_says_whether_a_batch_is_of_one_loader(mode: Any, is_sequential: bool) -> None:
    """Without it batches of evaluations over several loaders are preprocessed as if they were one of each."""
    assert private.is_sequential(CombinedLoader([images(), images()], mode)) is is_sequential


def test_results_are_what_a_repeated_step_must_not_log_twice(make_trainer: MakeTrainer) -> None:
    """Without it a step that failed, and is repeated, counts twice in the means over an epoch."""
    trainer = make_trainer()
    assert private.logged_results(trainer) is None
    (results,) = seen_at("on_train_end", private.logged_results, make_trainer)
    assert isinstance(results, dict)


def test_after_closure_clips_gradients(make_trainer: MakeTrainer) -> None:
    """Without it ``precision="16-mixed"`` cannot step an optimizer."""
    trainer, module = make_trainer(max_steps=1, gradient_clip_val=1e-3), Supervised(cnn())
    norms: list[float] = []

    def step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        private.after_closure(trainer.precision_plugin, module, optimizer.optimizer)
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])))

    module.optimizer_step = step  # type: ignore[method-assign, assignment]
    trainer.fit(module, images())
    assert norms[0] == pytest.approx(1e-3, rel=1e-2)


def test_layer_sync_is_what_synchronises_batch_norms() -> None:
    """Without it ``Trainer(sync_batchnorm=True)`` fails on CPUs, and loses subclasses of batch norms."""
    strategy = Trainer(strategy="ddp", accelerator="cpu", sync_batchnorm=True, logger=False).strategy
    assert type(private.layer_sync(strategy)) is TorchSyncBatchNorm
    other = TorchSyncBatchNorm()
    private.replace_layer_sync(strategy, other)
    assert private.layer_sync(strategy) is other


def test_data_parallel_size_is_the_size_of_the_mesh() -> None:
    """Without it ``accel_fsdp`` shards over nodes, and not over all processes."""
    strategy = ModelParallelStrategy()
    assert strategy._data_parallel_size == "auto"
    private.set_data_parallel_size(strategy, 2)
    assert strategy._data_parallel_size == 2


def test_ddp_kwargs_are_what_ddp_is_made_with() -> None:
    """Without them ``accel_ddp`` cannot wrap by what the first step shows."""
    strategy = DDPStrategy(static_graph=True)
    private.ddp_settings(strategy).update(static_graph=False)
    assert strategy._ddp_kwargs == {"static_graph": False}


def test_accelerator_connector_knows_the_cluster(make_trainer: MakeTrainer) -> None:
    """Without it a job of one process acts on SLURM's signals in the middle of a step."""
    assert isinstance(private.cluster_environment(make_trainer()), LightningEnvironment)
    given = SLURMEnvironment(auto_requeue=False)
    assert private.cluster_environment(make_trainer(plugins=[given])) is given


def test_actions_are_the_keys_of_a_command_line() -> None:
    """Without it a misspelt key of AccelCLI is refused without the nearest one."""
    parser = LightningArgumentParser()
    parser.add_argument("--depth", type=int)
    assert "depth" in {action.dest for action in private.parser_actions(parser)}
