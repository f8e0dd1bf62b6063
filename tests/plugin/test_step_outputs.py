"""What outlives a step is as it would be plain, whatever the step computed in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.edges import Net, compute_in_bfloat16, run

pytestmark = pytest.mark.numbers


@pytest.fixture(autouse=True)
def _computes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_bfloat16(monkeypatch)


class Remembers(Net):
    """Feeds a layer with what the last step left."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.dtypes: list[torch.dtype] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.features(batch[0]).mean((2, 3))
        outputs = self.head(features)
        if self.last is not None:
            self.dtypes.append(self.last.dtype)
            outputs = outputs + nn.functional.linear(self.last, self.head.weight)
        self.last = features.detach()
        return F.cross_entropy(outputs, batch[1])


def test_a_tensor_that_is_carried_into_the_next_step_is_in_float32() -> None:
    plugin = AccelPlugin(report=False)
    model = run(Remembers, plugin)
    assert set(model.dtypes) == {torch.float32}
    assert plugin.report.of("precision").status == "32-true: self.last would outlive a step in bfloat16"


def test_what_a_list_outside_of_the_module_keeps_is_found() -> None:
    kept: list[Tensor] = []

    class Keeps(Net):
        def features(self, x: Tensor) -> Tensor:
            features = super().features(x)
            kept.append(features.mean((2, 3)).detach())
            return features

    plugin = AccelPlugin(report=False)
    run(Keeps, plugin)
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert plugin.report.of("precision").status.startswith("32-true: kept of Keeps.features[")


class Returns(Net):
    """Returns more than a loss, in every kind of step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.features(batch[0])
        outputs = self.head(features.mean((2, 3)))
        return {"loss": F.cross_entropy(outputs, batch[1]), "features": features, "outputs": outputs}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


class Reads(Callback):
    """Reads what steps return, as callbacks do that draw pictures."""

    def __init__(self) -> None:
        self.read = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.read += 1
        outputs["outputs"].detach().numpy()  # NumPy has no bfloat16
        outputs["features"].view(len(batch[0]), -1)
        batch[0].view(len(batch[0]), -1)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def test_what_steps_return_can_be_read_as_in_a_plain_run() -> None:
    plugin, reads = AccelPlugin(report=False), Reads()
    run(Returns, plugin, callbacks=[reads])
    assert reads.read > 16
    assert plugin.report.of("precision").is_on
    assert plugin.report.of("memory_format").is_on


class MovesItsWeight(Net):
    """Brings a weight to the dtype of what it is multiplied with, as losses of metric learning do."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(4, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.conv(batch[0]).relu().amax((2, 3))
        self.proxies.data = self.proxies.data.to(features.dtype)
        return F.cross_entropy(features.matmul(self.proxies.t()), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_a_parameter_that_the_step_brings_to_another_dtype_trains_as_it_was() -> None:
    plugin = AccelPlugin(techniques={"memory_format": "off"}, report=False)
    plain, model = run(MovesItsWeight, None), run(MovesItsWeight, plugin)
    assert model.proxies.dtype == torch.float32
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert any("ran without precision" in note for note in plugin.report.notes)


class Scatters(Net):
    """Adds what layers made into a float32 table: a message names a dtype."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x).flatten(1)
        table = torch.zeros(len(x), features.shape[1])
        table.index_add_(0, torch.arange(len(x)), features)
        return table.view(len(x), 8, *x.shape[2:])


def test_of_an_error_that_names_a_dtype_only_the_precision_is_taken_back() -> None:
    plugin = AccelPlugin(techniques={"inplace_activations": True}, report=False)
    run(Scatters, plugin)
    assert plugin.report.of("precision").status.startswith("32-true: a step raised RuntimeError")
    assert any("ran without precision" in note for note in plugin.report.notes)
    assert plugin.report.of("memory_format").is_on
    assert plugin.report.of("inplace_activations").is_on


class StepsByHand(MovesItsWeight):
    """The same with manual optimization, where the optimizer raises within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_an_optimizer_that_raises_in_the_first_step_is_repeated_with_manual_optimization_too() -> None:
    plugin = AccelPlugin(techniques={"memory_format": "off"}, report=False)
    plain, model = run(StepsByHand, None), run(StepsByHand, plugin)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert model.trainer.global_step == plain.trainer.global_step


class Validates(Net):
    """Keeps predictions until the end of the validation."""

    def __init__(self) -> None:
        super().__init__()
        self.predictions: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.predictions.append(self.head(self.features(batch[0]).mean((2, 3))))

    def on_validation_epoch_end(self) -> None:
        torch.cat(self.predictions).numpy()
        self.predictions.clear()


def test_what_validation_keeps_is_in_float32_and_training_goes_on_in_bfloat16() -> None:
    plugin = AccelPlugin(report=False)
    run(Validates, plugin)
    assert plugin.report.of("precision").status.startswith("bf16-mixed")


class DrawsForImages(Net):
    """Noise for activations: filled in the order of their memory."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features + 0.1 * torch.randn_like(features)


class DrawsForTheBatch(Net):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x + 0.1 * torch.randn_like(x))


class DropsPixels(Net):
    def features(self, x: Tensor) -> Tensor:
        return F.dropout(super().features(x), 0.2, self.training)


class DropsLate(Net):
    """Draws nothing until its sixth step."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return F.dropout(features, 0.2, self.training) if len(self.losses) >= 5 else features


class DropsLateBesideOthers(DropsLate):
    """The same, where every step draws something."""

    def features(self, x: Tensor) -> Tensor:
        torch.rand(1)
        return super().features(x)


@pytest.mark.parametrize("kind", [DrawsForImages, DrawsForTheBatch, DropsPixels, DropsLate, DropsLateBesideOthers])
def test_random_streams_are_those_of_a_plain_run(kind: type[Net]) -> None:
    settings: dict[str, Any] = {"precision": "32-true", "report": False, "trust": "checked"}
    plain = run(kind, None)
    state = torch.get_rng_state()
    plugin = AccelPlugin.from_plan(Plan().replace(**settings))
    model = run(kind, plugin)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model.losses, plain.losses, rtol=1e-4, atol=1e-5)
    is_left_alone = kind is not DrawsForTheBatch
    assert plugin.report.of("memory_format").is_on is not is_left_alone


class Looks(Callback):
    """Looks at weights, gradients and the optimizer's state, as they are between two steps."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gradient = pl_module.conv.weight.grad
        self.seen.append(float(gradient.view(-1)[:9].sum()))
        gradient.add_(0.01 * torch.randn_like(gradient))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        (state,) = [trainer.optimizers[0].state[pl_module.conv.weight]]
        self.seen += [pl_module.conv.weight.stride(), *(value.stride() for value in state.values())]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        nn.utils.parameters_to_vector(pl_module.parameters())


class WithMomentum(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_hooks_see_weights_gradients_and_states_in_the_users_own_layout() -> None:
    looks = [Looks(), Looks()]
    plain = run(WithMomentum, None, callbacks=[looks[0]])
    plugin = AccelPlugin(precision="32-true", report=False)
    model = run(WithMomentum, plugin, callbacks=[looks[1]])
    assert plugin.report.of("memory_format").is_on
    torch.testing.assert_close(looks[1].seen, looks[0].seen, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def test_weights_are_in_channels_last_in_every_step_though_hooks_look_at_them() -> None:
    class Notes(Net):
        def features(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                notes.append(self.conv.weight.stride()[1])
            return super().features(x)

    notes: list[int] = []
    run(Notes, AccelPlugin(precision="32-true", trust="checked", report=False), callbacks=[Looks()])
    assert set(notes[4:]) == {1}


class KeepsAPart(Net):
    """Keeps one image, or the rows of all, for a picture that is drawn later."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.kept = part, torch.empty(0)

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        self.kept = self.part(features.detach())
        return features

    def on_validation_epoch_end(self) -> None:
        self.kept.view(-1)


@pytest.mark.parametrize("part", [lambda images: images[0], lambda images: images.flatten(2)], ids=["one", "rows"])
def test_a_part_of_an_image_is_kept_in_the_users_own_layout(part: Callable[[Tensor], Tensor]) -> None:
    run(lambda: KeepsAPart(part), AccelPlugin(precision="32-true", report=False, trust="checked"))


class ReadsFlatGradients(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.norms = [float(p.grad.view(-1).norm()) for p in self.parameters() if p.grad is not None]
        optimizer.zero_grad()


class StoresWeights(Callback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.module = pl_module

    def state_dict(self) -> dict[str, Any]:
        return {"flat": torch.cat([parameter.data.view(-1) for parameter in self.module.parameters()])}


def test_gradients_are_zeroed_and_callbacks_give_their_state_in_the_users_own_layout(tmp_path: Path) -> None:
    plugin = AccelPlugin(precision="32-true", report=False, trust="checked")
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    model = run(ReadsFlatGradients, plugin, callbacks=[StoresWeights(), checkpoints], enable_checkpointing=True)
    assert plugin.report.of("memory_format").is_on
    assert len(model.norms) == 4
    assert len([*tmp_path.iterdir()]) >= 3


class MakesItsOwn(Net):
    """Has a hook between steps make a sum in 16 bits, a view of it, and a matrix by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("inverse", torch.empty(0))
        self.forms: list[Any] = []

    def make(self) -> None:
        self.total = torch.zeros(4, dtype=torch.bfloat16)
        self.first = self.total[0]
        self.inverse = torch.linalg.inv(torch.eye(8).expand(2, 8, 8))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.total += 1.0
        self.forms.append((self.total.dtype, float(self.first), self.inverse.stride()))
        return super().validation_step(batch, batch_idx)


class ByModule(MakesItsOwn):
    def on_validation_epoch_start(self) -> None:
        self.make()


class ByCallback(MakesItsOwn):
    class Makes(Callback):
        def on_validation_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            pl_module.make()

    def configure_callbacks(self) -> list[Callback]:
        return [self.Makes()]


@pytest.mark.parametrize("kind", [ByModule, ByCallback])
@pytest.mark.parametrize("precision", ["auto", "32-true"])
def test_what_a_hook_makes_between_steps_is_the_users_own(kind: type[MakesItsOwn], precision: str) -> None:
    plain = run(kind, None, num_sanity_val_steps=0)
    model = run(kind, AccelPlugin(precision=precision, report=False, trust="checked"), num_sanity_val_steps=0)
    assert model.forms == plain.forms
    assert model.state_dict()["total"].dtype == torch.bfloat16
