"""What outlives a step, and who looks at it, in the forms that strangers' code has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.edges import Net, compute_in_bfloat16, run

pytestmark = pytest.mark.numbers
FLOAT32: dict[str, Any] = {"precision": "32-true", "report": False}


@pytest.fixture(autouse=True)
def _computes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_bfloat16(monkeypatch)


class LateBank(Net):
    """Keeps what it made from its third step on, at one that is not looked at otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.features(batch[0]).mean((2, 3))
        outputs = self.head(features)
        if self.bank:
            outputs = outputs + F.linear(self.bank[0], self.head.weight)
        self.losses.append(0.0)
        if len(self.losses) > 2:
            self.bank.append(features.detach())
        return F.cross_entropy(outputs, batch[1])


def test_what_a_later_step_begins_to_keep_is_in_float32() -> None:
    model = run(LateBank, AccelPlugin(report=False))
    assert {kept.dtype for kept in model.bank} == {torch.float32}


class OwnQueue(Net):
    """Has a memory bank in bfloat16 of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(16, 8, dtype=torch.bfloat16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.features(batch[0]).mean((2, 3))
        keys = features.detach().bfloat16()
        similar = torch.mm(keys, self.queue.t()).float()
        self.queue = torch.cat([keys, self.queue])[:16]
        return F.cross_entropy(self.head(features), batch[1]) + similar.mean()


def test_a_bank_in_bfloat16_that_is_the_users_own_stays_so() -> None:
    plugin = AccelPlugin(report=False)
    model = run(OwnQueue, plugin)
    assert model.queue.dtype == torch.bfloat16
    assert plugin.report.of("precision").status == "32-true: self.queue is in bfloat16 of its own"


class HoldsGraph(Net):
    """Keeps what its backward pass is yet to read, and not from the first of accumulated batches on."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.kept: list[Tensor] = []

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        self.losses.append(0.0)
        if len(self.losses) > 3:
            self.kept = [features]
        return self.second(features)


def test_what_a_backward_pass_reads_is_left_until_that_is_over() -> None:
    model = run(HoldsGraph, AccelPlugin(report=False), accumulate_grad_batches=2)
    assert {kept.dtype for kept in model.kept} == {torch.float32}


class KeepsOneBatch(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.head(self.features(batch[0]).mean((2, 3)))
        if batch_idx == 2:
            self.kept = outputs

    def on_validation_epoch_end(self) -> None:
        if hasattr(self, "kept"):
            self.kept.numpy()


class KeepsEverySample(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.head(self.features(batch[0]).mean((2, 3)))
        self.kept += [part for _ in range(800) for part in outputs + 0]

    def on_validation_epoch_end(self) -> None:
        [kept.numpy() for kept in self.kept]
        self.kept.clear()


@pytest.mark.parametrize("kind", [KeepsOneBatch, KeepsEverySample])
def test_hooks_can_read_what_validation_keeps_of_any_batch(kind: type[Net]) -> None:
    run(kind, AccelPlugin(techniques={"memory_format": "off"}, report=False))


class OwnLayout(Net):
    """Is in channels_last by itself, and keeps what that makes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.to(memory_format=torch.channels_last)
        self.strides: set[Any] = set()
        self.last: Tensor | None = None

    def features(self, x: Tensor) -> Tensor:
        if self.last is not None:
            self.strides.add(self.last.stride())
        features = super().features(x)
        self.last = features.detach().float()
        return features


def test_a_layout_that_is_the_users_own_stays_as_turns_are_switched() -> None:
    model = run(OwnLayout, AccelPlugin(report=False), steps=60)
    assert len(model.strides) == 1


class Adversary(Net):
    """Two optimizers in turn, with a schedule; the second network's step is one that bfloat16 cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(8, 1)

    def configure_optimizers(self) -> Any:
        critic = torch.optim.Adam(self.critic.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(critic, 2)
        return [torch.optim.Adam([*self.conv.parameters(), *self.head.parameters()]), critic], [schedule]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        own, critic = self.optimizers()
        self.toggle_optimizer(critic)
        self._step(critic, self.critic(self.features(batch[0]).mean((2, 3)).detach()).mean())
        self.untoggle_optimizer(critic)
        self.lr_schedulers().step()
        self.toggle_optimizer(own)
        table = torch.zeros(len(batch[0]), 8)
        table.index_add_(0, torch.arange(len(table)), self.conv(batch[0]).amax((2, 3)))
        self._step(own, F.cross_entropy(self.head(table), batch[1]))
        self.untoggle_optimizer(own)

    def _step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_a_repeated_step_finds_toggled_parameters_and_schedules_as_they_were() -> None:
    plugin = AccelPlugin(techniques={"memory_format": "off"}, report=False)
    plain, model = run(Adversary, None), run(Adversary, plugin)
    assert any("ran without precision" in note for note in plugin.report.notes)
    schedules = [one.trainer.lr_scheduler_configs[0].scheduler.last_epoch for one in (plain, model)]
    assert schedules[0] == schedules[1]
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


class NoisyGradients(Net):
    def __init__(self) -> None:
        super().__init__()
        self.conv.weight.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))


def test_noise_that_a_hook_adds_to_gradients_is_that_of_a_plain_run() -> None:
    plain = run(NoisyGradients, None)
    state = torch.get_rng_state()
    plugin = AccelPlugin.from_plan(Plan().replace(**FLOAT32))
    model = run(NoisyGradients, plugin)
    assert torch.equal(torch.get_rng_state(), state)
    assert "a hook on the backward pass draws random numbers" in plugin.report.of("memory_format").status
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


class SharesMemory(Net):
    """Has a second network in the memory of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Conv2d(3, 8, 3, padding=1).requires_grad_(False)
        self.teacher.weight.data = self.conv.weight.data

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + self.teacher(x)


def test_weights_in_one_memory_stay_there() -> None:
    plugin = AccelPlugin.from_plan(Plan().replace(**FLOAT32))
    model = run(SharesMemory, plugin)
    assert model.teacher.weight.data_ptr() == model.conv.weight.data_ptr()
    assert plugin.report.of("memory_format").refusals


class Counts(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class HoldsMode(Callback):
    """Has a function mode open from one hook to another, and copies a layer between two steps."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.mode = Counts()
        self.mode.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.counts.append(self.mode.count)


def test_a_function_mode_that_a_hook_leaves_open_sees_the_step() -> None:
    holds, plugin = HoldsMode(), AccelPlugin.from_plan(Plan().replace(**FLOAT32))
    run(Net, plugin, callbacks=[holds])
    assert plugin.report.of("memory_format").is_on
    assert min(holds.counts) > 10
    with Counts() as alone:
        torch.zeros(1)
    assert alone.count == 1


class CopiesItself(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 6:
            vars(self)["copied"] = copy.deepcopy(self.conv)
        return super().training_step(batch, batch_idx)


def test_a_copy_that_was_made_in_mid_run_returns_what_lies_as_in_a_plain_run() -> None:
    model = run(CopiesItself, AccelPlugin.from_plan(Plan().replace(**FLOAT32)))
    assert model.copied(torch.randn(2, 3, 8, 8)).is_contiguous()


class ReadsCompiled(Callback):
    """Calls compiled code on a weight, between two steps."""

    def __init__(self) -> None:
        self.norm = torch.compile(torch.linalg.vector_norm, backend="eager", fullgraph=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self.norm(pl_module.conv.weight)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="Dynamo of torch 2.11 sees two layouts of one weight")
def test_compiled_code_in_a_hook_is_traced_as_in_a_plain_run() -> None:
    plugin = AccelPlugin.from_plan(Plan().replace(**FLOAT32))
    run(Net, plugin, callbacks=[ReadsCompiled()])
    assert plugin.report.of("memory_format").is_on


class CompiledLoss(Net):
    def __init__(self) -> None:
        super().__init__()
        vars(self)["loss"] = torch.compile(F.cross_entropy, backend="eager", fullgraph=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.head(self.features(batch[0]).mean((2, 3))), batch[1])


def test_a_compiled_loss_costs_no_edits() -> None:
    plugin = AccelPlugin.from_plan(Plan().replace(**FLOAT32))
    run(CompiledLoss, plugin)
    assert plugin.report.of("memory_format").is_on
