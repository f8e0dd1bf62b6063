"""Runs under Lightning's XLA strategy on PJRT's CPU device, with AccelXLAPlugin and without: ``make test-xla``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

pytest.importorskip("torch_xla", reason="needs torch_xla, in an environment of its own: make test-xla")

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from lightning_accel import AccelPlugin, AccelXLAPlugin
from lightning_accel.callbacks import SpeedMemoryLogger
from support.xla_runs import Classifier, executed, fit, rows, trainer

pytestmark = pytest.mark.numbers

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda parameters: Adam(parameters, lr=0.01, weight_decay=0.1),
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01, amsgrad=True),
    "SGD": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_checkpoint_are_those_of_a_plain_run(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    plugin = AccelXLAPlugin()
    plain = fit(loader=rows(6), optimizer=make, save=tmp_path / "plain.ckpt")
    ours = fit(plugin, loader=rows(6), optimizer=make, save=tmp_path / "ours.ckpt")
    assert plugin.report.of("optimizer").changes == {
        "optimizer 0": f"{name} → torch_xla's, an operation for each parameter"
    }
    assert ours.seen.values() == pytest.approx(plain.seen.values(), rel=1e-5)
    expected, found = read(tmp_path / "plain.ckpt"), read(tmp_path / "ours.ckpt")
    assert found.keys() == expected.keys()
    check_alike(found["state_dict"], expected["state_dict"])
    check_alike(found["optimizer_states"], expected["optimizer_states"])


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_run_is_resumed_both_ways(name: str, tmp_path: Path) -> None:
    make, half = OPTIMIZERS[name], tmp_path / "half.ckpt"
    whole = fit(loader=rows(6), optimizer=make, max_epochs=2).seen.values()
    for first, second in (((), (AccelXLAPlugin(),)), ((AccelXLAPlugin(),), ())):
        fit(*first, loader=rows(6), optimizer=make, save=half)
        rest = fit(*second, loader=rows(6), optimizer=make, resume=half, max_epochs=2)
        assert rest.seen.values() == pytest.approx(whole[6:], rel=1e-5)


def test_a_run_under_xla_goes_on_on_the_cpu_with_accel_plugin(tmp_path: Path) -> None:
    half = tmp_path / "half.ckpt"
    whole = fit(AccelXLAPlugin(), loader=rows(6), max_epochs=2).seen.values()
    fit(AccelXLAPlugin(), loader=rows(6), save=half)
    rest = fit(AccelPlugin(precision="32-true"), loader=rows(6), resume=half, max_epochs=2, accelerator="cpu")
    assert rest.seen.values() == pytest.approx(whole[6:], rel=1e-5)


def test_callbacks_read_nothing_from_the_device_in_a_step(tmp_path: Path) -> None:
    """Neither the logger nor the record: losses are read where an epoch ends."""
    plugin, logger = AccelXLAPlugin(), CSVLogger(tmp_path)
    ours = fit(plugin, loader=rows(8), logger=logger, callbacks=[LearningRateMonitor()], log_every_n_steps=1)
    assert ours.seen.read == [ours.seen.read[0]] * 8
    assert ours.seen.compiled[2:] == [ours.seen.compiled[2]] * 6
    assert list((Path(logger.log_dir) / "accel").glob("*.jsonl"))


def test_speed_is_logged_without_a_program_for_it() -> None:
    """Lightning makes device tensors of the numbers that it is given to log, and reads them."""
    logger = SpeedMemoryLogger()
    module = fit(AccelXLAPlugin(), loader=rows(3), callbacks=[logger], max_epochs=3)
    assert len(logger.history) == 3
    assert module.seen.compiled[-1] == module.seen.compiled[2]
    assert module.seen.read[-1] == module.seen.read[0]


def test_each_step_ends_where_gradients_are_accumulated() -> None:
    """Lightning ends a step where the optimizer steps: four batches would be one program, of four times the size."""
    plain = fit(loader=rows(8), accumulate_grad_batches=4)
    ours = fit(AccelXLAPlugin(), loader=rows(8), accumulate_grad_batches=4)
    assert plain.seen.executed[6] == plain.seen.executed[4]
    assert ours.seen.executed[6] == ours.seen.executed[4] + 2
    assert ours.seen.values() == pytest.approx(plain.seen.values(), rel=1e-5)


def test_each_validation_step_ends() -> None:
    """Without that they are one program, of as many batches as there are, at the first value that somebody reads."""

    class Counting(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.executed.append(executed())
            self.seen.losses.append(self._loss(batch))

    plain, ours = Counting(OPTIMIZERS["AdamW"]), Counting(OPTIMIZERS["AdamW"])
    trainer().validate(plain, rows(3), verbose=False)
    trainer(AccelXLAPlugin()).validate(ours, rows(3), verbose=False)
    assert [count - plain.seen.executed[0] for count in plain.seen.executed] == [0, 0, 0]
    assert [count - ours.seen.executed[0] for count in ours.seen.executed] == [0, 1, 2]


def test_bf16_is_autocast() -> None:
    plugin = AccelXLAPlugin(precision="bf16-mixed")
    plain, ours = fit(loader=rows(4)), fit(plugin, loader=rows(4))
    assert ours.seen.dtypes == {torch.bfloat16}
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert ours.seen.values() == pytest.approx(plain.seen.values(), rel=0.02)
    assert plugin.report.of("precision").is_on


def test_after_a_run_everything_is_the_users_own() -> None:
    running, module = trainer(AccelXLAPlugin()), Classifier(OPTIMIZERS["Adam"])
    running.fit(module, rows(3))
    assert_untouched(running, module)


def assert_untouched(running: Trainer, module: Classifier) -> None:
    edited = {"training_step", "validation_step", "test_step", "predict_step", "batch_to_device"}
    assert not edited & set(vars(running.strategy))
    (optimizer,) = running.optimizers
    states = list(optimizer.state.values())
    assert {frozenset(state) for state in states} == {frozenset({"step", "exp_avg", "exp_avg_sq"})}
    assert {state["step"].device.type for state in states} == {"cpu"}


def read(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=False))


def check_alike(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert (found.device, found.dtype) == (expected.device, expected.dtype)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            check_alike(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            check_alike(one, other)
    else:
        assert found == expected
