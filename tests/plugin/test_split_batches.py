"""``out_of_memory="split"``: a batch that does not fit goes through its step in parts, which the run does not notice.

Memory is simulated but for tests/plugin/test_out_of_memory.py: what takes more samples than fit raises torch's error.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_accel import AccelPlugin
from lightning_accel.core.report import AccelWarning
from lightning_accel.memory.page import DeviceStepMemoryError
from support.lightning_models import Call

pytestmark = pytest.mark.numbers

MakeTrainer = Callable[..., Trainer]
FITS = 3
SIZES = [2, 5, 4, 1, 5]


def asks_for(samples: int, most: float) -> None:
    if samples > most:
        raise torch.OutOfMemoryError(f"simulated: Tried to allocate {samples}.00 GiB.")


class _AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        asks_for(len(gradient), ctx.most)
        return gradient, None


class Tight(LightningModule):
    """Has room for ``most`` samples at once; in float64, so that sums of parts are the whole's to twelve places."""

    def __init__(self, most: float = math.inf) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.most = most
        self.calls: list[tuple[int, int]] = []
        self.losses: list[float] = []
        self.dropped = 0

    def predictions(self, x: Tensor) -> Tensor:
        asks_for(len(x), self.most)
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return self.predictions(batch).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.calls.append((batch_idx, len(batch)))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.05)


class InBackward(Tight):
    def predictions(self, x: Tensor) -> Tensor:
        return _AsksInBackward.apply(self.net(x), self.most)


class Batches(IterableDataset[Any]):
    def __init__(self, make: Callable[[int], Any] = lambda size: vectors(size), sizes: list[int] = SIZES) -> None:
        self.make, self.sizes = make, sizes

    def __iter__(self) -> Iterator[Any]:
        torch.manual_seed(1)
        yield from map(self.make, self.sizes)


def vectors(size: int) -> Tensor:
    return torch.randn(size, 4, dtype=torch.float64)


def fit(
    make_trainer: MakeTrainer,
    model: LightningModule,
    batches: Batches | None = None,
    ckpt_path: Any = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Trainer, AccelPlugin]:
    plugin = AccelPlugin(**{"out_of_memory": "split", "precision": "32-true", "log": False, **(settings or {})})
    trainer = make_trainer(plugins=[plugin], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccelWarning)
        trainer.fit(model, DataLoader(batches or Batches(), batch_size=None), ckpt_path=ckpt_path)
    return model, trainer, plugin


def assert_same(model: Tight, plain: Tight) -> None:
    torch.testing.assert_close(model.losses, plain.losses, rtol=1e-12, atol=1e-12)
    # Adam divides by roots of small squares.
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)


def ended(make_trainer: MakeTrainer, model: LightningModule, batches: Batches | None = None, **options: Any) -> str:
    with pytest.raises(DeviceStepMemoryError) as raised:
        fit(make_trainer, model, batches, **options)
    return str(raised.value)


# -- the same training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Tight, InBackward])
def test_losses_and_weights_are_those_of_the_whole_batch(make_trainer: MakeTrainer, kind: type[Tight]) -> None:
    plain, *_ = fit(make_trainer, kind())
    model, _, plugin = fit(make_trainer, kind(FITS))
    assert_same(model, plain)
    assert plugin.report.of("out_of_memory").status == "batches in parts of at most 3 samples"


def test_parts_are_as_few_as_fit_and_batches_that_fit_stay_whole(make_trainer: MakeTrainer) -> None:
    model, *_ = fit(make_trainer, Tight(FITS))
    assert model.calls == [(0, 2), (1, 3), (1, 2), (2, 2), (2, 2), (3, 1), (4, 3), (4, 2)]


def test_halves_that_do_not_fit_are_halved(make_trainer: MakeTrainer) -> None:
    plain, *_ = fit(make_trainer, Tight())
    model, _, plugin = fit(make_trainer, Tight(1))
    assert_same(model, plain)
    assert plugin.state_dict()["out_of_memory"] == [("split", 1)]


class Float32(InBackward):
    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.float()
        self.clipped: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clipped.append(float(sum(p.grad.square().sum() for p in self.parameters())) ** 0.5)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_scaler_and_clipping_see_the_gradients_of_the_whole(make_trainer: MakeTrainer, precision: str) -> None:
    options = {
        "settings": {"precision": precision},
        "gradient_clip_val": 0.1,
        "batches": Batches(lambda size: torch.randn(size, 4)),
    }
    plain, *_ = fit(make_trainer, Float32(), **options)
    model, *_ = fit(make_trainer, Float32(FITS), **options)
    torch.testing.assert_close(model.losses, plain.losses, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(model.clipped, plain.clipped, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("sizes", [[2, 2, 5, 4, 5, 5], [5, 5, 4, 2]], ids=["the first of two", "both"])
def test_gradients_of_earlier_batches_stay_where_a_forward_pass_runs_out(
    make_trainer: MakeTrainer, sizes: list[int]
) -> None:
    options: dict[str, Any] = {"batches": Batches(sizes=sizes), "accumulate_grad_batches": 2}
    plain, *_ = fit(make_trainer, Tight(), **options)
    model, *_ = fit(make_trainer, Tight(FITS), **options)
    assert_same(model, plain)


class Regularised(Tight):
    """A loss that has nothing to do with the batch."""

    def loss(self, batch: Any) -> Tensor:
        self.predictions(batch)
        return sum(p.square().sum() for p in self.parameters())  # type: ignore[return-value]


def test_a_loss_that_does_not_depend_on_the_batch_counts_once(make_trainer: MakeTrainer) -> None:
    plain, *_ = fit(make_trainer, Regularised())
    model, *_ = fit(make_trainer, Regularised(FITS))
    assert_same(model, plain)


class ZeroesByHand(Tight):
    """Keeps gradients where they are, and looks at them before they are zeroed."""

    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.seen: list[float] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(float(sum(p.grad.sum() for p in self.parameters() if p.grad is not None)))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def test_hooks_that_read_gradients_before_they_are_zeroed_find_them(make_trainer: MakeTrainer) -> None:
    plain, *_ = fit(make_trainer, ZeroesByHand())
    model, *_ = fit(make_trainer, ZeroesByHand(FITS))
    assert_same(model, plain)
    torch.testing.assert_close(model.seen, plain.seen, rtol=1e-9, atol=1e-9)


def test_gradients_that_nobody_reads_go_before_those_of_the_parts_come(make_trainer: MakeTrainer) -> None:
    """Else a step in parts would need memory for one more set of gradients than a whole one."""

    class Looks(Tight):
        def __init__(self) -> None:
            super().__init__(FITS)
            self.held: list[bool] = []

        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            self.held.append(self.net[0].weight.grad is not None)
            return loss

    model, *_ = fit(make_trainer, Looks(), Batches(sizes=[2, 5]))
    assert model.held == [False, False, True]  # first step; first part of the second; its second part


# -- batches and outputs ------------------------------------------------------------------------------------------


@dataclass
class Sample:
    x: Tensor
    weight: float
    names: list[str]


def of(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    return batch[0] if isinstance(batch, tuple) else batch["x"] if isinstance(batch, dict) else batch.x


class Reads(Tight):
    def loss(self, batch: Any) -> Tensor:
        x = of(batch)
        if isinstance(batch, Sample):
            assert len(batch.names) == len(x)
            return self.predictions(x).square().mean() * batch.weight
        return self.predictions(x).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


@pytest.mark.parametrize(
    "make",
    [
        vectors,
        lambda size: (vectors(size), torch.arange(size)),
        lambda size: {"x": vectors(size), "name": "train", "temperature": torch.tensor(0.5)},
        lambda size: Sample(vectors(size), 0.5, [str(index) for index in range(size)]),
    ],
    ids=["tensor", "tuple", "dict", "dataclass"],
)
def test_batches_of_every_kind_are_split(make_trainer: MakeTrainer, make: Callable[[int], Any]) -> None:
    plain, *_ = fit(make_trainer, Reads(), Batches(make))
    model, *_ = fit(make_trainer, Reads(FITS), Batches(make))
    assert_same(model, plain)


class Returns(Tight):
    """Extras beside the loss, all of which are kept."""

    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        predictions = self.predictions(batch)
        return {"loss": predictions.square().mean(), "predictions": predictions, "size": len(batch)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.outputs.append(outputs)
        assert not outputs["loss"].requires_grad
        assert len(outputs["predictions"]) == len(batch)


def test_outputs_for_each_sample_are_put_together_and_others_are_the_last_parts(make_trainer: MakeTrainer) -> None:
    plain, *_ = fit(make_trainer, Returns())
    model, *_ = fit(make_trainer, Returns(FITS))
    assert_same(model, plain)
    for ours, theirs in zip(model.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(ours["predictions"], theirs["predictions"].detach(), rtol=1e-9, atol=1e-9)
    assert [one["size"] for one in model.outputs] == [2, 2, 2, 1, 2]


class Skips(Tight):
    """Has no loss for batches that end with a mark."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if float(batch[-1, 0]) == 9.0 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else math.nan)


def marked(*at: int) -> Callable[[int], Tensor]:
    def make(size: int) -> Tensor:
        batch = vectors(size)
        batch[[index for index in at if index < size], 0] = 9.0
        return batch

    return make


def test_parts_without_a_loss_add_nothing(make_trainer: MakeTrainer) -> None:
    model, *_ = fit(make_trainer, Skips(FITS), Batches(marked(4), [2, 5]))
    expected, *_ = fit(make_trainer, Tight(), Batches(sizes=[2]))
    x = vectors_of_second_batch()
    loss = expected.net(x[:3]).square().mean() * 3 / 5
    torch.testing.assert_close(model.losses[1], float(loss), rtol=1e-9, atol=1e-9)
    assert model.optimizers().optimizer.state[model.net[0].weight]["step"] == 2


def vectors_of_second_batch() -> Tensor:
    torch.manual_seed(1)
    vectors(2)
    return vectors(5)


def test_a_step_all_parts_of_which_have_no_loss_is_skipped(make_trainer: MakeTrainer) -> None:
    with pytest.warns(UserWarning, match="returned `None`"):
        model, *_ = fit(make_trainer, Skips(FITS), Batches(marked(2, 4), [2, 5]))
    assert math.isnan(model.losses[1])


# -- what Lightning shows, counts and calls -----------------------------------------------------------------------


class Logs(Tight):
    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.shown: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("step", loss, on_step=True, on_epoch=False)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("samples", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.shown.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def test_logged_means_are_over_samples_in_the_step_and_in_the_epoch(make_trainer: MakeTrainer) -> None:
    plain, there, _ = fit(make_trainer, Logs())
    model, here, _ = fit(make_trainer, Logs(FITS))
    torch.testing.assert_close(model.shown, plain.shown, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dict(here.callback_metrics), dict(there.callback_metrics), rtol=1e-6, atol=1e-6)


class Hooks(Call):
    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in (*("on_before_zero_grad", "on_before_backward", "on_after_backward"), "on_before_optimizer_step"):
            self.called.append(name)
        return super().__getattribute__(name)


class Counts(Tight):
    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.hooks: list[str] = []
        self.backward_calls = 0
        self.gradients: list[float] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.backward_calls += 1
        super().backward(loss, *args, **kwargs)

    def on_before_backward(self, loss: Tensor) -> None:
        self.hooks.append(f"before backward {float(loss):.6f}")

    def on_after_backward(self) -> None:
        self.gradients.append(float(sum(p.grad.sum() for p in self.parameters())))
        self.hooks.append("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks.append("before step")


def test_hooks_around_the_backward_pass_are_called_once_with_what_belongs_to_the_whole(
    make_trainer: MakeTrainer,
) -> None:
    plain, *_ = fit(make_trainer, Counts())
    model, *_ = fit(make_trainer, Counts(FITS))
    assert model.hooks == plain.hooks
    torch.testing.assert_close(model.gradients, plain.gradients, rtol=1e-9, atol=1e-9)
    assert (plain.backward_calls, model.backward_calls) == (5, 8)


class Schedules(Tight):
    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.validated: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val", "interval": "epoch"}}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.net(batch).square().mean()
        self.validated.append(float(loss))
        self.log("val", loss)


def test_steps_schedulers_validations_and_checkpoints_are_those_of_whole_batches(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def run(most: float) -> tuple[Schedules, Trainer, ModelCheckpoint]:
        saves = ModelCheckpoint(tmp_path / str(most), monitor="val")
        plugin = AccelPlugin(out_of_memory="split", precision="32-true", log=False)
        trainer = make_trainer(plugins=[plugin], callbacks=[saves], max_epochs=2, enable_checkpointing=True)
        model = Schedules(most)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccelWarning)
            trainer.fit(*(model, *(DataLoader(Batches(), batch_size=None) for _ in range(2))))
        return model, trainer, saves

    (plain, there, theirs), (model, here, ours) = run(math.inf), run(FITS)
    assert_same(model, plain)
    torch.testing.assert_close(model.validated, plain.validated, rtol=1e-9, atol=1e-9)
    assert here.global_step == there.global_step == 10
    assert model.optimizers().param_groups[0]["lr"] == plain.optimizers().param_groups[0]["lr"] < 0.05
    assert Path(ours.best_model_path).name == Path(theirs.best_model_path).name


# -- said, kept, and resumed --------------------------------------------------------------------------------------


def test_it_is_said_at_once_and_in_the_report(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(out_of_memory="split", precision="32-true", log=False)
    with pytest.warns(AccelWarning, match="gives the same gradients where the loss is a mean over samples"):
        make_trainer(plugins=[plugin]).fit(Tight(FITS), DataLoader(Batches(), batch_size=None))
    start = "out of memory: batches in parts of at most 3 samples put on at step 1: "
    assert [note for note in plugin.report.notes if note.startswith(start)]
    assert plugin.report.of("out_of_memory").is_on


@pytest.mark.parametrize("setting", ["split", "answer"])
def test_a_resumed_run_begins_split_if_that_is_still_wished(
    make_trainer: MakeTrainer, tmp_path: Path, setting: str
) -> None:
    _, trainer, _ = fit(make_trainer, Tight(FITS))
    trainer.save_checkpoint(tmp_path / "split.ckpt")
    options = {"ckpt_path": tmp_path / "split.ckpt", "max_epochs": 2, "settings": {"out_of_memory": setting}}
    resumed, _, plugin = fit(make_trainer, Tight(), **options)
    assert resumed.calls[1:3] == ([(1, 3), (1, 2)] if setting == "split" else [(1, 5), (2, 4)])
    is_told = any("without out_of_memory='split'" in note for note in plugin.report.notes)
    assert is_told == (setting == "answer")


def test_steps_in_parts_have_no_net_of_their_own(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_accel.lightning import safety_net

    spread: list[int] = []

    class Watched(safety_net.Attempt):
        def __init__(self, *args: Any) -> None:
            spread.append(1)
            super().__init__(*args)

    monkeypatch.setattr(safety_net, "Attempt", Watched)
    options: dict[str, Any] = {"settings": {"memory_format": "off", "inplace_activations": "off", "optimizer": "off"}}
    fit(make_trainer, Tight(FITS), Batches(sizes=[5] * 12), **options)
    assert sum(spread) == 3  # the first steps of every run


# -- what is not split --------------------------------------------------------------------------------------------


def test_one_sample_that_does_not_fit_ends_with_the_page(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, Tight(0))
    assert "and change no number, and the batch cannot be split: a single sample at a time is the least." in page
    assert "out_of_memory='split': batches in parts of at most 1 samples" in page


def test_a_batch_that_cannot_be_split_ends_with_the_page(make_trainer: MakeTrainer) -> None:
    batches = Batches(lambda size: (vectors(size), torch.ones(7)))
    page = ended(make_trainer, Reads(FITS), batches)
    assert "the batch cannot be split: the first dimensions of its tensors differ: 5, 7" in page


def test_a_batch_of_another_kind_goes_through_whole_and_the_report_says_why(make_trainer: MakeTrainer) -> None:
    batches = Batches(lambda size: vectors(size) if size > FITS else (vectors(size), torch.ones(7)), [5, 3])
    model, _, plugin = fit(make_trainer, Reads(FITS), batches)
    assert len(model.losses) == 2
    why = "out_of_memory='split': a batch went through its step whole: the first dimensions of its tensors differ: 3, 7"
    assert why in plugin.report.notes


class ByHand(Tight):
    def __init__(self, most: float) -> None:
        super().__init__(most)
        self.automatic_optimization = False


def test_manual_optimization_is_left_to_the_module(make_trainer: MakeTrainer) -> None:
    assert "with manual optimization it is the module that goes backward" in ended(make_trainer, ByHand(FITS))


class StepsInBackward(Tight):
    """An optimizer that steps as soon as a gradient is there."""

    def configure_optimizers(self) -> Any:
        self.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return super().configure_optimizers()


def test_hooks_on_gradients_would_be_called_for_every_part(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, StepsInBackward(FITS))
    assert "hooks on the gradient of 'net.0.weight' would be called for every part" in page


class TakesFiveOnly(Tight):
    def loss(self, batch: Any) -> Tensor:
        if len(batch) not in (2, 5):
            raise ValueError("this model takes batches of five")
        return super().loss(batch)


def test_a_module_that_raises_in_parts_is_not_split(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, TakesFiveOnly(FITS))
    assert "in parts of 3 samples a step raised ValueError: this model takes batches of five" in page


def test_with_several_processes_it_is_todays_page(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, Tight(FITS), strategy="ddp", devices=1)
    assert "batches are not split under DDPStrategy" in page


def test_gradients_that_were_added_to_earlier_ones_are_not_taken_back(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, InBackward(FITS), accumulate_grad_batches=2)
    assert "in its backward pass: the gradients of earlier batches had been added up" in page


def test_without_the_wish_a_batch_is_never_split_and_the_page_names_it(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, Tight(FITS), settings={"out_of_memory": "answer"})
    assert "nothing is left that would need less memory and change no number." in page
    assert "  AccelPlugin(out_of_memory='split')  # about " in page
    assert "    YAML: out_of_memory: split" in page
