"""A loader whose batches have samples of like length: each sample as often as its own sampler gives it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_accel.data.lengths import UncountedError, lengths_of
from lightning_accel.data.loader_proxy import StandIn
from lightning_accel.data.worker_epoch import rebuilt
from lightning_accel.data.worker_schedule import LoaderWorkers

_WINDOW = 50  # batches; so that an epoch stays random, a quarter of it at most
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class GroupedBatches:
    """The batches of a loader's own, grouped by length: ``lengths`` has those of all samples, of shape (N,).

    The order that the sampler gives is cut into windows; within each, samples of like length come into one batch, and
    the batches into a random order. Sizes of batches stay where they are, the short one at the end.

    The order of a window's batches follows from its samples: so the random streams of the run are not drawn from, and
    where the sampler begins again (Lightning does so in resuming a run in mid-epoch) its batches are the same again. On
    several ranks it follows from what all of them know: each has its longest batches when the others have theirs.
    """

    def __init__(self, batches: BatchSampler, lengths: np.ndarray[Any, Any]) -> None:
        self._batches, self._lengths = batches, lengths

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        source = iter(self._batches)
        size = max(1, min(_WINDOW, len(self) // 4))
        for number in itertools.count():
            window = list(itertools.islice(source, size))
            if not window:
                return
            yield from self._grouped(window, number)

    def _grouped(self, window: list[list[Any]], number: int) -> list[list[Any]]:
        samples = [sample for batch in window for sample in batch]
        places = np.random.default_rng(self._seed(samples, number)).permutation(len(window))
        samples.sort(key=self._lengths.__getitem__)
        grouped, begin = [*window], 0
        for place in places:
            end = begin + len(window[place])
            grouped[place], begin = samples[begin:end], end
        return grouped

    def _seed(self, samples: list[Any], number: int) -> list[int]:
        sampler = self._batches.sampler
        if isinstance(sampler, DistributedSampler):
            return [sampler.seed % 2**64, sampler.epoch, number]
        return [zlib.crc32(np.asarray(samples, np.int64).tobytes()), number]


class GroupedLoader(StandIn):
    """Stands for a DataLoader, and has its batches grouped by length, which changes the training.

    Lengths are asked for when it is iterated first.

    Args:
        loader: A loader of the training, of which :func:`why_not_grouped` has nothing to say.
        tell: Is told what holds: a line, and whether batches are grouped.
        objection: Asked before, for a reason to leave it; empty: there is none.
        agree: Maps a value of this process to that of rank 0; None with one process.
    """

    _inner: _Grouping

    def __init__(
        self,
        loader: DataLoader[Any],
        tell: Callable[[str, bool], Any],
        *,
        objection: Callable[[], str] = str,
        agree: Callable[[Any], Any] | None = None,
    ) -> None:
        object.__setattr__(self, "_inner", _Grouping(loader, tell, objection, agree))


def why_not_grouped(loader: Any, *, is_one_of_many: bool = False) -> str:
    """Why a loader's batches cannot be grouped, as far as it can be told beforehand; empty: they can.

    ``is_one_of_many``: whether each of several processes has one.
    """
    if type(loader) is not DataLoader:
        return f"it is a {type(loader).__name__}, which is not rebuilt: only a DataLoader of torch's own is"
    batches: Any = loader.batch_sampler
    if batches is None or isinstance(loader.dataset, IterableDataset | MapDataPipe):
        return f"its {type(loader.dataset).__name__} has no batches of samples that a sampler chooses"
    if type(batches) is not BatchSampler:
        return f"its {type(batches).__name__} says which samples come together"
    sampler: Any = batches.sampler
    if type(sampler) is DistributedSampler and sampler.shuffle:
        return ""
    if type(sampler) not in _SHUFFLING:
        return f"the order of its {type(sampler).__name__} is not random, or is yours: shuffle=True has one to change"
    if is_one_of_many:
        return f"its {type(sampler).__name__} is of this process alone, and ranks would wait for each other's longest"
    return ""


@dataclass(eq=False)
class _Grouping:
    """What a GroupedLoader knows."""

    loader: DataLoader[Any]
    tell: Callable[[str, bool], Any]
    objection: Callable[[], str]
    agree: Callable[[Any], Any] | None
    grouped: DataLoader[Any] | None = None
    num_samples: int = 0
    is_decided: bool = False

    def begin(self) -> Iterator[Any]:
        if not self.is_decided:
            self.is_decided = True
            self._decide()
        if self.grouped is not None and len(self.grouped.dataset) != self.num_samples:  # type: ignore[arg-type]
            self.close()
            self.tell("no longer grouped by length: the dataset has another number of samples", False)
        return iter(self.loader if self.grouped is None else self.grouped)

    def close(self) -> None:
        self.grouped, self.is_decided = None, True

    def _decide(self) -> None:
        if why := self.objection():
            self.tell(f"not grouped by length: {why}", False)
            return
        try:
            lengths: Any = lengths_of(self.loader.dataset)
        except UncountedError as error:
            lengths = str(error)
        if self.agree is not None:
            lengths = self.agree(lengths)
        if isinstance(lengths, str):
            self.tell(f"not grouped by length: {lengths}", False)
            return
        if not len(lengths) or (shortest := lengths.min()) == (longest := lengths.max()):
            self.tell("not grouped by length: all samples have the same", False)
            return
        own = self.loader
        assert isinstance(own.batch_sampler, BatchSampler)
        workers = LoaderWorkers(own.num_workers, own.prefetch_factor or 2, own.persistent_workers)
        self.grouped = rebuilt(own, GroupedBatches(own.batch_sampler, lengths), workers, own.generator)
        self.num_samples = len(lengths)
        self.tell(f"samples of {shortest} to {longest} tokens grouped by length, {_WINDOW} batches at a time", True)
