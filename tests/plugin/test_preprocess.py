"""``AccelPlugin(preprocess=[...])``: what reaches the module, when, and what a run leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_accel import AccelPlugin
from lightning_accel.data import (
    DevicePipeline,
    GaussianNoise,
    Map,
    MixUp,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    Transform,
)
from lightning_models import Call

MakeTrainer = Callable[..., Any]

NORMALIZE = Normalize([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
CHAIN: list[Transform] = [RandomCrop(8, padding=2), RandomHorizontalFlip(), NORMALIZE, MixUp(0.4, num_classes=4)]
MEAN, STD = (torch.tensor(values).view(1, 3, 1, 1) for values in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))


def dataset(samples: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (samples, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return TensorDataset(images, torch.randint(0, 4, (samples,), generator=generator))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(), **{"batch_size": 4, **options})


def plugin(chain: list[Transform] = CHAIN, **settings: Any) -> AccelPlugin:
    return AccelPlugin(**{"precision": "32-true", "memory_format": "preserve", "preprocess": chain, **settings})


class Sees(LightningModule):
    """Keeps a copy of every batch, by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
        self.seen: dict[str, list[Any]] = {"train": [], "validate": [], "test": [], "predict": []}

    def see(self, stage: str, batch: Any) -> Tensor:
        image, label = next(iter(batch.values())) if isinstance(batch, dict) else batch
        # What the layout and dtype of a clone are is what they were.
        self.seen[stage].append((image.clone(), label.clone()))
        return F.cross_entropy(self.net(image.float()), label)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.see("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.see("validate", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.see("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.see("predict", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TakesTheTransfer(Sees):
    """Has a hook between loader and device, so that nothing can be prepared ahead."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def fit(
    make_trainer: MakeTrainer, module: Sees, data: Any = None, given: AccelPlugin | None = None, **options: Any
) -> Any:
    trainer = make_trainer(plugins=[given or plugin()], **options)
    torch.manual_seed(3)
    trainer.fit(module, loader() if data is None else data)
    return trainer


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True))


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


def test_images_come_in_the_layout_of_the_model(make_trainer: MakeTrainer) -> None:
    module = Sees()
    fit(make_trainer, module, given=plugin([NORMALIZE], memory_format="channels_last"))
    assert all(image.is_contiguous(memory_format=torch.channels_last) for image, _ in module.seen["train"])


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


# -- loaders of every kind ---------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from dataset()


def test_an_iterable_dataset_is_prepared_ahead_like_any_other(make_trainer: MakeTrainer) -> None:
    stream, usual = Sees(), Sees()
    fit(make_trainer, stream, DataLoader(Stream(), batch_size=4))
    fit(make_trainer, usual)
    assert same(stream.seen["train"], usual.seen["train"])


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_of_several_loaders_each_ones_batches_are_preprocessed(make_trainer: MakeTrainer, mode: str) -> None:
    def both() -> CombinedLoader:
        return CombinedLoader({"a": loader(), "b": loader(batch_size=8)}, mode)

    class All(Sees):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.see("train", batch["a"]) + self.see("train", batch["b"])

    class Inline(TakesTheTransfer, All): ...

    ahead, inline = All(), Inline()
    fit(make_trainer, ahead, both(), max_epochs=2)
    fit(make_trainer, inline, both(), max_epochs=2)
    assert all(image.dtype == torch.float32 for image, _ in ahead.seen["train"])
    assert same(ahead.seen["train"], inline.seen["train"])
    first, second = ahead.seen["train"][:2]
    assert not torch.equal(first[0], second[0][:4]), "the same samples, random numbers of each loader"


@pytest.mark.parametrize(
    "options",
    [{"limit_train_batches": 2}, {"overfit_batches": 2}, {"reload_dataloaders_every_n_epochs": 1}, {"max_steps": 3}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_the_trainers_ways_to_cut_an_epoch_short_work(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    ahead, inline = Sees(), TakesTheTransfer()
    fit(make_trainer, ahead, max_epochs=2, **options)
    fit(make_trainer, inline, max_epochs=2, **options)
    assert len(ahead.seen["train"]) > 0
    assert same(ahead.seen["train"], inline.seen["train"])


def test_validation_with_several_loaders(make_trainer: MakeTrainer) -> None:
    class Several(Sees):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.see("validate", batch)

    module = Several()
    make_trainer(plugins=[plugin()]).validate(module, [loader(), loader(batch_size=8)])
    assert [len(image) for image, _ in module.seen["validate"]] == [4, 4, 4, 4, 8, 8]
    assert all(image.dtype == torch.float32 for image, _ in module.seen["validate"])


@pytest.mark.parametrize("stage", ["train", "validate"])
def test_a_look_at_a_persistent_loader_in_mid_epoch_ends_nothing(make_trainer: MakeTrainer, stage: str) -> None:
    """The loader has one iterator, which the look begins anew; the epoch must not be cut short by it, unnoticed."""

    def look(trainer: Any, *args: Any) -> None:
        next(iter(trainer.train_dataloader if stage == "train" else trainer.val_dataloaders))

    module, hook = Sees(), "on_train_batch_end" if stage == "train" else "on_validation_batch_end"
    persistent = {"num_workers": 1, "persistent_workers": True}
    trainer = make_trainer(plugins=[plugin()], callbacks=[Call(**{hook: look})], num_sanity_val_steps=0)
    trainer.fit(module, loader(**persistent), loader(**persistent))
    assert len(module.seen[stage]) == 4


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}, {"val_check_interval": 2}], ids=str)
def test_one_persistent_loader_may_serve_training_and_validation(
    make_trainer: MakeTrainer, options: dict[str, Any]
) -> None:
    module, both = Sees(), loader(num_workers=1, persistent_workers=True)
    make_trainer(plugins=[plugin()], max_epochs=2, **options).fit(module, both, both)
    assert len(module.seen["train"]) == 2 * options.get("limit_train_batches", 4)


class Refills:
    """Gives every batch in the same memory."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        images, labels = dataset().tensors
        buffer = images[:4].clone(), labels[:4].clone()
        for at in range(0, 16, 4):
            for part, source in zip(buffer, (images, labels), strict=True):
                part.copy_(source[at : at + 4])
            yield buffer


def test_a_loader_that_uses_its_memory_again_is_not_read_ahead(make_trainer: MakeTrainer) -> None:
    module, usual, given = Sees(), Sees(), plugin([NORMALIZE])
    fit(make_trainer, module, Refills(), given)
    fit(make_trainer, usual, loader(), plugin([NORMALIZE]))
    assert same(module.seen["train"], usual.seen["train"])
    assert "batches of this Refills are prepared when they are asked for" in given.report.summary()


class Endless:
    """Is its own iterator: what is fetched and not trained on is gone."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.given += 1
        images, labels = dataset().tensors
        return images[:4], labels[:4]


def test_a_stream_loses_no_batch_to_a_limit(make_trainer: MakeTrainer) -> None:
    """Lightning itself takes one more an epoch, as it knows no length."""
    taken = {}
    for name, plugins in {"plain": [], "preprocessed": [plugin([NORMALIZE])]}.items():
        stream = Endless()
        make_trainer(plugins=plugins, max_epochs=2, limit_train_batches=3).fit(Sees(), stream)
        taken[name] = stream.given
    assert taken["preprocessed"] == taken["plain"]


class Named(NamedTuple):
    a: Any
    b: Any


def test_loaders_may_come_in_a_named_tuple(make_trainer: MakeTrainer) -> None:
    class All(TakesTheTransfer):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.see("train", batch.a) + self.see("train", batch.b)

    module = All()
    fit(make_trainer, module, Named(loader(), loader()))
    assert all(image.dtype == torch.float32 for image, _ in module.seen["train"])


# -- how it ends -------------------------------------------------------------------------------------------------------


class Breaks(Dataset[Any]):
    """Raises at its ninth sample."""

    def __init__(self) -> None:
        self.error = RuntimeError("the disk is gone")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == 8:
            raise self.error
        return dataset()[index]


def test_an_error_of_the_dataset_surfaces_unchanged_after_the_batches_before_it(make_trainer: MakeTrainer) -> None:
    broken, module = Breaks(), Sees()
    with pytest.raises(RuntimeError) as caught:
        fit(make_trainer, module, DataLoader(broken, batch_size=4))
    assert caught.value is broken.error
    assert len(module.seen["train"]) == 2
    assert not _pipeline_threads()


def test_an_error_of_a_transform_surfaces_unchanged(make_trainer: MakeTrainer) -> None:
    error = ArithmeticError("mine")

    def fail(xp: Any, batch: Any) -> Any:
        raise error

    with pytest.raises(ArithmeticError) as caught:
        fit(make_trainer, Sees(), given=plugin([Map(fail)]))
    assert caught.value is error
    assert not _pipeline_threads()


def test_an_error_of_the_users_step_leaves_no_thread(make_trainer: MakeTrainer) -> None:
    class Fails(Sees):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(make_trainer, Fails())
    assert not _pipeline_threads()


def test_after_the_run_the_loaders_give_their_batches_as_they_are(make_trainer: MakeTrainer) -> None:
    mine = CombinedLoader({"a": loader()}, "min_size")
    trainer = fit(make_trainer, Sees(), mine)
    assert type(trainer.train_dataloader["a"]) is type(mine.flattened[0]) is DataLoader
    assert next(iter(mine))[0]["a"][0].dtype == torch.uint8
    assert next(iter(trainer.train_dataloader["a"]))[0].dtype == torch.uint8
    assert "process_dataloader" not in vars(trainer.strategy)


def test_while_it_runs_the_loader_looks_like_the_users_own(make_trainer: MakeTrainer) -> None:
    def check(trainer: Any, *args: Any) -> None:
        assert isinstance(trainer.train_dataloader, DataLoader)
        assert isinstance(trainer.train_dataloader, DevicePipeline)
        assert trainer.train_dataloader.batch_size == 4
        assert len(trainer.train_dataloader.dataset) == 16

    fit(make_trainer, Sees(), callbacks=[Call(on_train_batch_start=check)])


def test_checkpoints_are_those_of_a_run_without(make_trainer: MakeTrainer) -> None:
    trainer = fit(make_trainer, Sees(), enable_checkpointing=True)
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    assert set(checkpoint["state_dict"]) == set(Sees().state_dict())


def test_a_second_fit_starts_over(make_trainer: MakeTrainer) -> None:
    module = Sees()
    trainer = fit(make_trainer, module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert len(module.seen["train"]) == 8
    assert all(image.dtype == torch.float32 for image, _ in module.seen["train"])


def test_the_report_says_what_runs_in_one_pass_and_when(make_trainer: MakeTrainer) -> None:
    given = plugin()
    fit(make_trainer, Sees(), given=given)
    record = given.report.of("preprocess")
    assert record.is_on
    assert "[RandomCrop + RandomHorizontalFlip + Normalize], MixUp with NumPy on cpu" in record.status


def test_a_batch_that_lacks_the_part_ends_the_run_with_what_it_has(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        ValueError, match=r"RandomCrop: the batch has no \['image'\]. It has \[0\]: uint8 \(4, 3, 8, 8\)"
    ):
        fit(make_trainer, Sees(), given=plugin([RandomCrop(8, key="image")]))


def _pipeline_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-accel")]
