"""``AccelPlugin(preprocess=[...])`` with loaders of every kind, and how its runs end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_accel.data import (
    DevicePipeline,
    Map,
    RandomCrop,
)
from support.lightning_models import Call
from support.preprocess_runs import NORMALIZE, MakeTrainer, Sees, TakesTheTransfer, dataset, fit, loader, plugin, same

pytestmark = pytest.mark.numbers

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
