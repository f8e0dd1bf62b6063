"""A loader whose workers change from epoch to epoch, and whose batches, order and random streams do not."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_accel.data import tuned_loader
from lightning_accel.data.tuned_loader import LoaderTuning, TunedLoader, why_left
from lightning_accel.data.worker_schedule import Course, LoaderWorkers

pytestmark = pytest.mark.numbers

CPU = torch.device("cpu")
BY_WORKERS = multiprocessing.Value("i")  # samples; no part of a dataset, which must not change as it is read


class Slow(Dataset[Any]):
    def __init__(self, count: int = 40, seconds: float = 0.0005) -> None:
        self.samples, self.seconds = torch.arange(float(count)), seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        if get_worker_info() is not None:
            with BY_WORKERS.get_lock():
                BY_WORKERS.value += 1
        return self.samples[index]


class Lines:
    """What a tuned loader says."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self.is_changed = False

    def __call__(self, line: str, is_changed: bool) -> None:
        self.all.append(line)
        self.is_changed = is_changed

    @property
    def last(self) -> str:
        return self.all[-1] if self.all else ""


@pytest.fixture
def always_tries(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the given settings tried, epoch after epoch, whatever the clock says: the last of them stays."""

    def follow(*settings: LoaderWorkers) -> None:
        def course(own: LoaderWorkers, cores: int) -> Course:
            yield own
            for one in settings[:-1]:  # noqa: UP028  # a tuple's iterator is sent nothing
                yield one
            return settings[-1]

        monkeypatch.setattr(tuned_loader, "course", course)

    return follow


Make = Callable[[], DataLoader[Any]]


def train(loader: Any, epochs: int = 4, *, take: int | None = None) -> list[tuple[list[float], float]]:
    """Batches, each with a number of the stream that a training draws from."""
    seen = []
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            seen.append((batch.tolist(), torch.rand(1).item()))
            if number + 1 == take:
                break
    return seen


def streams() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def seeded(make: Make) -> DataLoader[Any]:
    torch.manual_seed(3)
    return make()


def assert_the_same(make: Make, **options: Any) -> Lines:
    """A training by the loader, and by the tuned one: the same batches, and the random streams have come as far."""
    plain = train(seeded(make), **options)
    after = streams()
    lines = Lines()
    loader = TunedLoader(LoaderTuning(seeded(make), CPU, lines))
    BY_WORKERS.value = 0
    assert train(loader, **options) == plain
    assert streams() == after
    loader.close()
    return lines


ORDERS: dict[str, Make] = {
    "in order": lambda: DataLoader(Slow(), 4),
    "shuffled": lambda: DataLoader(Slow(), 4, shuffle=True),
    "with a last smaller batch": lambda: DataLoader(Slow(39), 4, shuffle=True),
    "without it": lambda: DataLoader(Slow(39), 4, shuffle=True, drop_last=True),
    "by a generator of its own": lambda: DataLoader(
        Slow(), 4, shuffle=True, generator=torch.Generator().manual_seed(1)
    ),
    "with replacement": lambda: DataLoader(Slow(), 4, sampler=RandomSampler(range(40), replacement=True)),
    "by weights": lambda: DataLoader(Slow(), 4, sampler=WeightedRandomSampler([1.0, 2.0] * 20, 40)),
    "by a batch sampler": lambda: DataLoader(Slow(), batch_sampler=BatchSampler(RandomSampler(range(40)), 4, False)),
    "sample by sample": lambda: DataLoader(Slow(), batch_size=None, shuffle=True),
    "with a lambda": lambda: DataLoader(Slow(), 4, shuffle=True, collate_fn=lambda parts: torch.stack(parts) * 2),
}


DRAWN_AS_THE_SHUFFLED = ("without it", "with replacement", "by weights", "with a lambda")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(o, id=name, marks=[pytest.mark.slow] * (name in DRAWN_AS_THE_SHUFFLED))
        for name, o in ORDERS.items()
    ],
)
def test_workers_change_neither_batches_nor_random_streams(make: Make, always_tries: Callable[..., None]) -> None:
    always_tries(LoaderWorkers(1), LoaderWorkers(2), LoaderWorkers(2, is_kept=True))
    lines = assert_the_same(make, epochs=6)
    assert lines.is_changed
    assert BY_WORKERS.value >= 5 * 36  # all epochs but the first


def test_epochs_that_are_left_early_are_the_same(always_tries: Callable[..., None]) -> None:
    """As with Trainer(limit_train_batches=...): what workers have loaded ahead is dropped, and drawn anew."""
    always_tries(LoaderWorkers(1), LoaderWorkers(2, is_kept=True))
    lines = assert_the_same(ORDERS["shuffled"], epochs=5, take=9)
    assert lines.is_changed


@pytest.mark.medium
def test_own_workers_are_given_more_to_have_ready_and_draw_the_same(always_tries: Callable[..., None]) -> None:
    class Augmented(Slow):
        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index) + torch.rand(())

    always_tries(LoaderWorkers(2, prefetch=4))
    lines = assert_the_same(
        lambda: DataLoader(Augmented(), 4, shuffle=True, num_workers=2, multiprocessing_context="fork")
    )
    assert lines.is_changed


def test_a_training_that_waits_gets_workers_by_the_clock() -> None:
    lines = Lines()
    loader = TunedLoader(LoaderTuning(DataLoader(Slow(seconds=0.01), 4), CPU, lines))
    train(loader, epochs=2)
    assert "num_workers=1" in lines.all[0]
    assert "with no workers waiting for data took" in lines.all[0]
    loader.close()


class Refusing(Slow):
    """A dataset that is what it is by a function."""

    def __init__(self, read: Callable[[Any], Any], **parts: Any) -> None:
        super().__init__()
        self.read, self.parts = read, parts

    def __getitem__(self, index: int) -> Tensor:
        self.read(self.parts)
        return super().__getitem__(index)


def _open(parts: dict[str, Any]) -> None:
    if "file" not in parts:
        parts["file"] = open(os.devnull)  # noqa: SIM115


LEFT: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "torch's stream": (lambda parts: torch.rand(1), {}, "draw random numbers"),
    "Python's stream": (lambda parts: random.random(), {}, "draw random numbers"),
    "NumPy's stream": (lambda parts: np.random.rand(), {}, "draw random numbers"),
    "a generator of its own": (lambda parts: parts["g"].random(), {"g": np.random.default_rng(0)}, "change"),
    "a torch generator": (
        lambda parts: torch.rand(1, generator=parts["g"]),
        {"g": torch.Generator()},
        "change",
    ),
    "a counter": (lambda parts: parts.update(n=parts["n"] + 1), {"n": 0}, "change"),
    "a cache": (lambda parts: parts["all"].append(1), {"all": []}, "change"),
    "a tensor": (lambda parts: parts["t"].add_(1), {"t": torch.zeros(9)}, "change"),
    "an array": (lambda parts: parts["a"].__iadd__(1), {"a": np.zeros(9)}, "change"),
    "an open file": (_open, {}, "open file"),
    "a lock": (lambda parts: None, {"lock": multiprocessing.Lock()}, "cannot be loaded in other processes"),
}


@pytest.mark.parametrize(("read", "parts", "why"), LEFT.values(), ids=LEFT)
def test_data_that_workers_would_change_are_left(
    read: Callable[[Any], Any], parts: dict[str, Any], why: str, always_tries: Callable[..., None]
) -> None:
    always_tries(LoaderWorkers(1))
    data = Refusing(read, **parts)
    lines = Lines()
    loader = TunedLoader(LoaderTuning(DataLoader(data, 4), CPU, lines))
    BY_WORKERS.value = 0
    train(loader, epochs=3)
    assert why in lines.last
    assert not lines.is_changed
    assert BY_WORKERS.value == 0
    if "file" in data.parts:
        data.parts["file"].close()


def test_random_numbers_drawn_by_a_collate_function_are_seen(always_tries: Callable[..., None]) -> None:
    """As transformers' collator for masked language models draws them."""
    always_tries(LoaderWorkers(1))
    lines = assert_the_same(lambda: DataLoader(Slow(), 4, collate_fn=lambda parts: torch.stack(parts) + torch.rand(1)))
    assert "draw random numbers" in lines.last


def test_a_dataset_that_is_set_between_epochs_is_read_as_it_is_then(always_tries: Callable[..., None]) -> None:
    """As with ``dataset.set_epoch()``; workers that are kept have a copy of before, and are started anew."""
    always_tries(LoaderWorkers(1), LoaderWorkers(1, is_kept=True))

    def sums(loader: Any) -> list[float]:
        found = []
        for epoch in range(5):
            loader.dataset.samples = torch.arange(40.0) + 100 * epoch
            found.append(sum(batch.sum().item() for batch in loader))
        return found

    loader = TunedLoader(LoaderTuning(DataLoader(Slow(), 4), CPU, lines := Lines()))
    assert sums(loader) == sums(DataLoader(Slow(), 4))
    assert lines.is_changed
    loader.close()


def test_data_that_the_training_begins_to_change_are_given_back(always_tries: Callable[..., None]) -> None:
    always_tries(LoaderWorkers(1))
    loader = TunedLoader(LoaderTuning(DataLoader(data := Slow(), 4), CPU, lines := Lines()))
    train(loader, epochs=2)
    for batch in loader:
        data.samples += batch.sum() * 0 + 1
    train(loader, epochs=1)
    assert "taken back: its data change while the model trains" in lines.last
    loader.close()


class Failing(Slow):
    """Cannot be read in other processes from some sample on."""

    def __init__(self, fail: Callable[[], Any], fails_from: int) -> None:
        super().__init__()
        self.fail, self.fails_from = fail, fails_from

    def __getitem__(self, index: int) -> Tensor:
        if get_worker_info() is not None and index >= self.fails_from:
            self.fail()
        return super().__getitem__(index)


def _raise() -> None:
    raise ConnectionError("no database here")


FAILURES = {"raises": _raise, "dies": lambda: os.kill(os.getpid(), signal.SIGKILL)}


@pytest.mark.parametrize("fails_from", [0, 17])
@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_where_a_worker_fails_no_batch_is_lost_and_none_repeated(
    fail: Callable[[], Any], fails_from: int, always_tries: Callable[..., None]
) -> None:
    always_tries(LoaderWorkers(2))
    lines = assert_the_same(lambda: DataLoader(Failing(fail, fails_from), 4, shuffle=True))
    assert "taken back: a worker failed" in lines.last
    assert not lines.is_changed


def test_workers_that_do_not_end_are_not_waited_for(
    always_tries: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's handler of a dead worker may leave the lock of a queue taken, for which the loader's end then waits."""
    always_tries(LoaderWorkers(2))
    monkeypatch.setattr("lightning_accel.data.worker_epoch._ENDING_S", 0.1)
    has_ended = threading.Event()
    monkeypatch.setattr(traceback, "clear_frames", lambda frames: has_ended.wait())
    lines = assert_the_same(lambda: DataLoader(Failing(_raise, 17), 4, shuffle=True))
    has_ended.set()
    assert "taken back: a worker failed" in lines.last


@pytest.mark.medium
def test_a_worker_that_never_answers_is_given_up(
    always_tries: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_accel.data.worker_epoch._PATIENCE_S", 0.25)
    always_tries(LoaderWorkers(1))
    lines = assert_the_same(lambda: DataLoader(Failing(lambda: time.sleep(1), 8), 4, shuffle=True), epochs=3)
    assert "taken back: a worker failed" in lines.last


def test_an_error_of_the_users_own_data_is_the_users_own(always_tries: Callable[..., None]) -> None:
    class Broken(Slow):
        def __getitem__(self, index: int) -> Tensor:
            if index == 39 and self.samples[0] == 1:
                raise KeyError("sample 39")
            return super().__getitem__(index)

    always_tries(LoaderWorkers(1))
    loader = TunedLoader(LoaderTuning(DataLoader(data := Broken(), 4), CPU, Lines()))
    train(loader, epochs=2)
    data.samples[0] = 1
    with pytest.raises(KeyError, match=r"^'sample 39'$"):  # not as workers wrap it
        train(loader, epochs=1)


def test_two_walks_at_a_time_do_not_disturb_each_other(always_tries: Callable[..., None]) -> None:
    """A callback that looks into ``trainer.train_dataloader`` while an epoch goes on."""
    always_tries(LoaderWorkers(1), LoaderWorkers(1, is_kept=True))
    loader = TunedLoader(LoaderTuning(DataLoader(Slow(), 4), CPU, Lines()))
    train(loader, epochs=3)
    outer, inner = iter(loader), iter(loader)
    assert [next(outer).tolist(), next(inner).tolist(), next(outer).tolist()] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    loader.close()


class Mining(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Special(DataLoader[Any]):
    pass


BEFOREHAND: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [1, 2], "it is a list"),
    "a subclass": (lambda: Special(Slow()), "it is a Special"),
    "a stream": (lambda: DataLoader(Stream()), "each worker would have all of its Stream"),
    "a sampler": (lambda: DataLoader(Slow(), sampler=Mining()), "Mining may follow the training"),
    "a batch sampler": (lambda: DataLoader(Slow(), batch_sampler=BatchSampler(Mining(), 2, False)), "Mining"),
    "kept workers": (lambda: DataLoader(Slow(), num_workers=1, persistent_workers=True), "persistent"),
    "nothing": (lambda: DataLoader(Slow(), 4, shuffle=True), ""),
}


@pytest.mark.parametrize(("make", "why"), BEFOREHAND.values(), ids=BEFOREHAND)
def test_what_cannot_be_rebuilt_is_known_beforehand(make: Callable[[], Any], why: str) -> None:
    assert why in why_left(make())
    assert bool(why) == bool(why_left(make()))


def test_workers_that_would_run_the_program_anew_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows and macOS, and where the program has chosen so."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "spawn")
    assert "'spawn' here, which runs the program anew" in why_left(DataLoader(Slow()))


def test_it_stands_for_the_loader() -> None:
    own = DataLoader(Slow(), 4)
    loader = TunedLoader(LoaderTuning(own, CPU, Lines()))
    assert isinstance(loader, DataLoader)
    assert (len(loader), loader.batch_size, loader.dataset) == (10, 4, own.dataset)
    assert copy.copy(loader) is own  # a copy is of the user's
    loader.close()


def test_a_copied_walk_is_at_its_end() -> None:
    walk = iter(TunedLoader(LoaderTuning(DataLoader(Slow(), 4), CPU, Lines())))
    next(walk)
    assert list(copy.deepcopy(walk)) == []
