"""``AccelPlugin(preprocess=[...])``: what reaches the module, when, and what a run leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor

from lightning_accel.core.host import Host
from lightning_accel.data import (
    GaussianNoise,
)
from lightning_accel.tuning.tuning_result import Tuning
from support.lightning_models import Call
from support.preprocess_runs import NORMALIZE, MakeTrainer, Sees, TakesTheTransfer, dataset, fit, loader, plugin, same

pytestmark = pytest.mark.numbers

MEAN, STD = (torch.tensor(values).view(1, 3, 1, 1) for values in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))


def plainly_normalized(images: Tensor) -> Tensor:
    return (images.float() / 255 - MEAN) / STD


# -- what reaches the module -------------------------------------------------------------------------------------------


def test_training_gets_float_images_and_blended_labels(make_trainer: MakeTrainer) -> None:
    module = Sees()
    fit(make_trainer, module)
    image, label = module.seen["train"][0]
    assert image.dtype == torch.float32
    assert label.shape == (4, 4)
    torch.testing.assert_close(label.sum(1), torch.ones(4))


def test_images_come_in_the_dtype_that_the_step_computes_in(make_trainer: MakeTrainer) -> None:
    module = Sees()
    fit(make_trainer, module, given=plugin(precision="bf16-mixed"))
    assert module.seen["train"][0][0].dtype == torch.bfloat16


def test_of_a_precision_that_the_run_has_chosen_and_gives_up_they_come_in_float32(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are made ahead, and neither live trials nor the repetition of a step can know what the next runs in."""
    monkeypatch.setattr(Host, "detect", lambda device: Host(kind="cpu", device_name="simulated", native_bf16=True))

    class TakesThemAsTheyAre(Sees):
        def see(self, stage: str, batch: Any) -> Tensor:
            return super().see(stage, (batch[0], batch[1])) + self.net(batch[0]).sum()

    given, module = plugin(precision="auto"), TakesThemAsTheyAre()
    fit(make_trainer, module, given=given)
    given.load_state_dict({"tuning": Tuning({}, is_settled=True).to_dict()})
    make_trainer(plugins=[given]).test(module, loader())
    assert {image.dtype for stage in ("train", "test") for image, _ in module.seen[stage]} == {torch.float32}


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_elsewhere_only_what_is_deterministic_happens(make_trainer: MakeTrainer, stage: str) -> None:
    module, data = Sees(), loader()
    getattr(make_trainer(plugins=[plugin()]), stage)(module, data)
    for (image, label), (raw, plain_label) in zip(module.seen[stage], data, strict=True):
        torch.testing.assert_close(image, plainly_normalized(raw))
        assert torch.equal(label, plain_label)


def test_validation_within_a_fit_is_no_training(make_trainer: MakeTrainer) -> None:
    module, data = Sees(), loader()
    trainer = make_trainer(plugins=[plugin()])
    trainer.fit(module, loader(), data)
    validated = module.seen["validate"]
    assert len(validated) == 2 + 4, "the check for sanity and the epoch's"
    for (image, _), (raw, _) in zip(validated[2:], data, strict=True):
        torch.testing.assert_close(image, plainly_normalized(raw))


# -- randomness --------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_batches(make_trainer: MakeTrainer) -> None:
    first, second = Sees(), Sees()
    fit(make_trainer, first, loader(shuffle=True), max_epochs=2)
    fit(make_trainer, second, loader(shuffle=True), max_epochs=2)
    assert same(first.seen["train"], second.seen["train"])


def test_every_epoch_has_random_numbers_of_its_own(make_trainer: MakeTrainer) -> None:
    module = Sees()
    fit(make_trainer, module, max_epochs=2)
    train = module.seen["train"]
    assert not same(train[:4], train[4:])


def test_batches_are_the_same_prepared_ahead_or_at_their_transfer(make_trainer: MakeTrainer) -> None:
    ahead, inline = Sees(), TakesTheTransfer()
    fit(make_trainer, ahead, loader(shuffle=True), max_epochs=2)
    fit(make_trainer, inline, loader(shuffle=True), max_epochs=2)
    assert same(ahead.seen["train"], inline.seen["train"])


def test_batches_are_the_same_with_workers(make_trainer: MakeTrainer) -> None:
    without, with_workers = Sees(), Sees()
    fit(make_trainer, without, loader())
    fit(make_trainer, with_workers, loader(num_workers=1))
    assert same(without.seen["train"], with_workers.seen["train"])


def test_preprocessing_draws_nothing_from_the_runs_own_generator(make_trainer: MakeTrainer) -> None:
    numbers = []
    for chain in ([NORMALIZE], [NORMALIZE, GaussianNoise(0.1)]):
        fit(make_trainer, Sees(), given=plugin(chain))
        numbers.append(torch.rand(()))
    assert numbers[0] == numbers[1]


class Counting:
    """A loader that can say where it is, and go on from there."""

    def __init__(self) -> None:
        self.next_batch = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        images, labels = dataset().tensors
        self.next_batch %= 4
        while self.next_batch < 4:
            at = self.next_batch
            self.next_batch += 1
            yield images[4 * at : 4 * at + 4], labels[4 * at : 4 * at + 4]

    def state_dict(self) -> dict[str, Any]:
        return {"next_batch": self.next_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_batch = state["next_batch"]


def fit_in_two(make_trainer: MakeTrainer, kind: type[Sees], data: Callable[[], Any]) -> tuple[Sees, Sees]:
    """Two epochs, stopped after six of their eight batches and resumed by another Trainer."""
    stopped, resumed = kind(), kind()

    def save_and_stop(trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint("sixth.ckpt")
            trainer.should_stop = True

    fit(make_trainer, stopped, data(), max_epochs=2, callbacks=[Call(on_train_batch_end=save_and_stop)])
    torch.manual_seed(3)
    make_trainer(plugins=[plugin()], max_epochs=2).fit(resumed, data(), ckpt_path="sixth.ckpt")
    return stopped, resumed


@pytest.mark.parametrize("kind", [Sees, TakesTheTransfer])
def test_a_run_resumed_within_an_epoch_sees_what_it_would_have_seen(
    make_trainer: MakeTrainer, kind: type[Sees]
) -> None:
    whole = kind()
    fit(make_trainer, whole, Counting(), max_epochs=2)
    stopped, resumed = fit_in_two(make_trainer, kind, Counting)
    assert len(stopped.seen["train"]) == 6
    assert same(stopped.seen["train"] + resumed.seen["train"], whole.seen["train"])


class Schedules(Sees):
    """Asks how many steps there will be: Lightning then begins to iterate before it has read the checkpoint's loops."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 8
        return super().configure_optimizers()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_random_numbers_go_by_where_the_resumed_run_is_and_not_by_where_its_loader_was_built(
    make_trainer: MakeTrainer,
) -> None:
    class Inline(TakesTheTransfer, Schedules): ...

    _, ahead = fit_in_two(make_trainer, Schedules, loader)
    _, inline = fit_in_two(make_trainer, Inline, loader)
    assert len(ahead.seen["train"]) == 2
    assert same(ahead.seen["train"], inline.seen["train"])


# -- the user's hooks --------------------------------------------------------------------------------------------------


class AfterTransfer(Sees):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("after", batch[0].dtype))
        return batch[0] * 0 + 7, batch[1]


class AllHooks(AfterTransfer):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("before", batch[0].dtype))
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append(("transfer", batch[0].dtype))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def test_after_the_transfer_the_users_hook_gets_what_was_preprocessed(make_trainer: MakeTrainer) -> None:
    module = AfterTransfer()
    fit(make_trainer, module)
    assert module.calls == [("after", torch.float32)] * 4
    assert all((image == 7).all() for image, _ in module.seen["train"])


def test_the_users_hooks_run_in_the_documented_order(make_trainer: MakeTrainer) -> None:
    module = AllHooks()
    fit(make_trainer, module)
    raw = torch.uint8
    assert module.calls == [("before", raw), ("transfer", raw), ("after", torch.float32)] * 4


def test_a_data_modules_hooks_run_in_the_documented_order(make_trainer: MakeTrainer) -> None:
    class Data(LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def train_dataloader(self) -> Any:
            return loader()

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls.append(batch[0].dtype)
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls.append(batch[0].dtype)
            return batch

    data, given = Data(), plugin()
    make_trainer(plugins=[given]).fit(Sees(), datamodule=data)
    assert data.calls == [torch.uint8, torch.float32] * 4
    assert "Data.on_before_batch_transfer comes before" in given.report.summary()


def test_a_data_modules_own_transfer_is_followed_by_preprocessing(make_trainer: MakeTrainer) -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            seen.append(batch[0].dtype)
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append(batch[0].dtype)
            return batch

    seen: list[Any] = []
    make_trainer(plugins=[plugin()]).fit(Sees(), datamodule=Data())
    assert seen == [torch.uint8, torch.float32] * 4


def test_an_example_input_is_left_alone(make_trainer: MakeTrainer) -> None:
    module = TakesTheTransfer()
    module.example_input_array = torch.zeros(1, 3, 8, 8)

    def check(trainer: Trainer, module: Any, *args: Any) -> None:
        example = module._apply_batch_transfer_handler(module.example_input_array)
        assert torch.equal(example, module.example_input_array)

    fit(make_trainer, module, callbacks=[Call(on_train_batch_start=check)])


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
def test_a_step_that_takes_batches_from_the_loader_gets_them_preprocessed(make_trainer: MakeTrainer) -> None:
    class Takes(TakesTheTransfer):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, *_ = next(dataloader_iter)
            return self.see("train", batch)

    module, usual = Takes(), Sees()
    fit(make_trainer, module)
    fit(make_trainer, usual)
    assert same(module.seen["train"], usual.seen["train"])
