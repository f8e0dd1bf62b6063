"""Batches of samples of like length: less padding, every sample as often, the run's random streams as they were."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_accel.data.grouped_loader import GroupedLoader, Grouping, why_not_grouped

pytestmark = pytest.mark.numbers

DOCUMENTED = [getattr(torch, name).__doc__ for name in sorted(dir(torch))]
LENGTHS = [len(text.split()) for text in DOCUMENTED if isinstance(text, str) and text]
"""Words of real texts: what torch says of its functions."""


class Texts:
    """Each sample's tokens are its own number, as often as it is long."""

    def __init__(self, lengths: list[int] | None = None) -> None:
        self.lengths = list(LENGTHS if lengths is None else lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [index] * self.lengths[index]}


class Lines:
    def __init__(self) -> None:
        self.all: list[tuple[str, bool]] = []

    def __call__(self, line: str, is_grouped: bool) -> None:
        self.all.append((line, is_grouped))


Batch = list[tuple[int, int]]  # of each sample its number and its length


def collate(samples: list[Any]) -> Batch:
    return [(sample["input_ids"][0], len(sample["input_ids"])) for sample in samples]


def loader(data: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(data or Texts(), collate_fn=collate, **{"batch_size": 8, "shuffle": True, **options})


def epoch(of: Any, seed: int = 0) -> list[Batch]:
    torch.manual_seed(seed)
    return list(of)


def samples(batches: list[Batch]) -> Batch:
    return sorted(itertools.chain.from_iterable(batches))


def padding_share(batches: list[Batch]) -> float:
    padded = sum(len(batch) * max(length for _, length in batch) for batch in batches)
    return 1 - sum(length for batch in batches for _, length in batch) / padded


def test_padding_is_a_sixth_of_the_tokens_where_it_was_two_thirds() -> None:
    plain, grouped = padding_share(epoch(loader())), padding_share(epoch(GroupedLoader(Grouping(loader(), Lines()))))
    assert plain > 0.6
    assert grouped < 0.25


@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_sizes_of_batches_and_random_streams_are_those_of_the_loader(drop_last: bool) -> None:
    own = loader(drop_last=drop_last)
    assert len(LENGTHS) % 8
    plain, drawn = epoch(own), torch.rand(3)
    grouped, drawn_after = epoch(GroupedLoader(Grouping(own, Lines()))), torch.rand(3)
    assert [len(batch) for batch in grouped] == [len(batch) for batch in plain]
    assert samples(grouped) == samples(plain)
    assert torch.equal(drawn_after, drawn)


def test_a_window_has_the_samples_that_the_sampler_has_there_and_its_batches_no_order() -> None:
    own = loader(batch_size=2, drop_last=True)
    plain, grouped = epoch(own), epoch(GroupedLoader(Grouping(own, Lines())))
    assert len(plain) > 200
    assert samples(grouped[:50]) == samples(plain[:50])
    longest = [max(length for _, length in batch) for batch in grouped[:50]]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_the_order_is_the_same_wherever_the_sampler_begins_the_same_and_another_in_another_epoch() -> None:
    first, resumed = GroupedLoader(Grouping(loader(), Lines())), GroupedLoader(Grouping(loader(), Lines()))
    order = epoch(first, 1)
    assert epoch(first, 2) != order
    assert epoch(resumed, 1) == order


@pytest.mark.parametrize("persistent", [False, True])
def test_the_users_workers_load_the_same_batches(persistent: bool) -> None:
    alone = epoch(GroupedLoader(Grouping(loader(), Lines())))
    stand_in = GroupedLoader(Grouping(loader(num_workers=2, prefetch_factor=3, persistent_workers=persistent), Lines()))
    assert epoch(stand_in) == alone
    assert samples(epoch(stand_in)) == samples(alone)


def test_ranks_have_batches_of_like_length_at_the_same_time() -> None:
    own = [DistributedSampler(Texts(), 2, rank, seed=3) for rank in (0, 1)]  # type: ignore[arg-type, var-annotated]
    for sampler in own:
        sampler.set_epoch(5)

    def longest(of: Any) -> torch.Tensor:
        return torch.tensor([max(length for _, length in batch) for batch in of], dtype=torch.float)

    loaders = [loader(sampler=sampler, shuffle=False) for sampler in own]
    plain = [longest(one) for one in loaders]
    grouped = [list(GroupedLoader(Grouping(one, Lines()))) for one in loaders]
    assert {number for batches in grouped for batch in batches for number, _ in batch} == set(range(len(LENGTHS)))
    apart = (longest(grouped[0]) - longest(grouped[1])).abs().mean()
    assert apart < (plain[0] - plain[1]).abs().mean() / 2


def test_ranks_take_the_lengths_of_rank_0() -> None:
    lines = Lines()
    own = loader()
    stand_in = GroupedLoader(Grouping(own, lines, agree=lambda found: "rank 0 could not count"))
    assert epoch(stand_in) == epoch(own)
    assert lines.all == [("not grouped by length: rank 0 could not count", False)]


def _of_sampler(make: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: loader(sampler=make(Texts()), shuffle=False)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [1, 2], "it is a list, which is not rebuilt"),
    "an order of the user's": (lambda: loader(shuffle=False), "SequentialSampler is not random, or is yours"),
    "an order by rank": (
        _of_sampler(lambda data: DistributedSampler(data, 2, 0, shuffle=False)),
        "DistributedSampler is not random, or is yours",
    ),
    "a stream": (lambda: DataLoader(Stream()), "its Stream has no batches of samples that a sampler chooses"),
    "single samples": (lambda: DataLoader(Texts(), batch_size=None), "no batches"),  # type: ignore[arg-type]
    "batches of the user's": (
        lambda: DataLoader(
            Texts(),  # type: ignore[arg-type]
            batch_sampler=type("Mine", (BatchSampler,), {})(SequentialSampler(LENGTHS), 2, False),
        ),
        "its Mine says which samples come together",
    ),
    "a shuffle": (loader, ""),
    "a shuffle with replacement": (_of_sampler(lambda data: RandomSampler(data, replacement=True)), ""),
    "a shuffle over ranks": (_of_sampler(lambda data: DistributedSampler(data, 2, 0)), ""),
}


@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_grouped_says_why(make: Callable[[], Any], why: str) -> None:
    found = why_not_grouped(make())
    assert why in found
    assert bool(why) == bool(found)


def test_a_shuffle_of_each_ranks_own_is_left() -> None:
    assert "ranks would wait" in why_not_grouped(loader(), is_one_of_many=True)


@pytest.mark.parametrize(
    ("data", "objection", "why"),
    [
        (Texts([5] * 64), "", "all samples have the same"),
        ([(1, 2)] * 64, "", "a sample is no mapping"),
        (None, "it is one of several", "it is one of several"),
    ],
)
def test_what_turns_out_not_to_be_grouped_is_the_users_loader(data: Any, objection: str, why: str) -> None:
    lines = Lines()
    own = DataLoader(data or Texts(), 8, shuffle=True, collate_fn=str)
    assert epoch(GroupedLoader(Grouping(own, lines, objection=lambda: objection))) == epoch(own)
    [(line, is_grouped)] = lines.all
    assert why in line
    assert not is_grouped


def test_a_dataset_that_grows_is_the_users_own_again() -> None:
    lines, data = Lines(), Texts()
    own = loader(data)
    stand_in = GroupedLoader(Grouping(own, lines))
    epoch(stand_in)
    data.lengths.append(3)
    assert epoch(stand_in) == epoch(own)
    assert lines.all[-1] == ("no longer grouped by length: the dataset has another number of samples", False)


def test_closed_it_is_the_users_loader() -> None:
    own = loader()
    stand_in = GroupedLoader(Grouping(own, Lines()))
    epoch(stand_in)
    stand_in.close()
    assert epoch(stand_in) == epoch(own)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))])
def test_it_stands_for_the_loader_and_a_copy_is_one(copied: Callable[[Any], Any]) -> None:
    own = loader()
    stand_in = GroupedLoader(Grouping(own, Lines()))
    assert isinstance(stand_in, DataLoader)
    assert (len(stand_in), stand_in.batch_sampler) == (len(own), own.batch_sampler)
    assert type(copied(stand_in)) is DataLoader
