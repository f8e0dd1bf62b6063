"""A loader whose batches have samples of like length: each sample as often as its own sampler gives it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.data.loader_proxy import StandIn
from lightning_accel.data.loader_state import UnreadableError, state_of
from lightning_accel.data.worker_epoch import rebuilt
from lightning_accel.data.worker_schedule import LoaderWorkers

_NAMES = ("length", "lengths")
_IDS = "input_ids"
_MOST_S = 20.0  # for counting
_SURE_S = 1.0  # after which it is clear how long that takes
_FEW = 32  # samples that show whether it may be counted, and are read at a time
_MEND = "give the dataset a column or an attribute `lengths`, a number for each sample"

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
    """

    _inner: Grouping


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
class Grouping:
    """What a GroupedLoader knows."""

    loader: DataLoader[Any]  # of the training, of which why_not_grouped() has nothing to say
    tell: Callable[[str, bool], Any]  # is told what holds: a line, and whether batches are grouped
    objection: Callable[[], str] = str  # asked before, for a reason to leave it; empty: there is none
    agree: Callable[[Any], Any] | None = None  # maps a value of this process to that of rank 0; None with one process
    grouped: DataLoader[Any] | None = field(default=None, init=False)
    num_samples: int = field(default=0, init=False)
    is_decided: bool = field(default=False, init=False)

    def begin(self) -> Iterator[Any]:
        if not self.is_decided:
            self.is_decided = True
            if why := self._why_not():
                self.tell(f"not grouped by length: {why}", False)
        if self.grouped is not None and len(self.grouped.dataset) != self.num_samples:  # type: ignore[arg-type]
            self.close()
            self.tell("no longer grouped by length: the dataset has another number of samples", False)
        return iter(self.loader if self.grouped is None else self.grouped)

    def close(self) -> None:
        self.grouped, self.is_decided = None, True

    def _why_not(self) -> str:
        """Groups the batches; or says why they stay."""
        if why := self.objection():
            return why
        try:
            lengths: Any = lengths_of(self.loader.dataset)
        except UncountedError as error:
            lengths = str(error)
        if self.agree is not None:
            lengths = self.agree(lengths)
        if isinstance(lengths, str):
            return lengths
        if not len(lengths) or (shortest := lengths.min()) == (longest := lengths.max()):
            return "all samples have the same"
        own = self.loader
        assert isinstance(own.batch_sampler, BatchSampler)
        workers = LoaderWorkers(own.num_workers, own.prefetch_factor or 2, own.persistent_workers)
        self.grouped = rebuilt(own, GroupedBatches(own.batch_sampler, lengths), workers, own.generator)
        self.num_samples = len(lengths)
        self.tell(f"samples of {shortest} to {longest} tokens grouped by length, {_WINDOW} batches at a time", True)
        return ""


class UncountedError(Exception):
    """Of a dataset whose lengths are not known, and not to be counted."""


def lengths_of(dataset: Any) -> np.ndarray[Any, Any]:
    """The length of each sample, of shape (N,).

    A column (of Hugging Face's datasets) or an attribute ``length`` or ``lengths`` says it, or every sample is read
    once, for its ``input_ids``: where that takes seconds, draws no random numbers and changes nothing in the dataset.

    Raises:
        UncountedError: Nothing says it, and it cannot be counted so.
    """
    if (said := _said(dataset)) is not None:
        return said
    try:
        with StateSnapshot(None, Level.RANDOM, torch.device("cpu")) as before:
            return _counted(dataset, before)
    except UncountedError:
        raise
    except Exception as error:  # the data's own: the training will meet it, or not
        raise UncountedError(f"reading its samples fails: {type(error).__name__}: {error}; {_MEND}") from error


def _said(dataset: Any) -> np.ndarray[Any, Any] | None:
    if type(dataset) is Subset:
        whole = _said(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices)]
    for name in _NAMES:
        is_column = name in (getattr(dataset, "column_names", None) or ())
        said = dataset[name][:] if is_column else getattr(dataset, name, None)
        if isinstance(said, list | tuple | np.ndarray | torch.Tensor):
            # Something else may be called so: how many samples there are, or lists of another length each.
            try:
                lengths, count = np.asarray(said), len(dataset)
            except (TypeError, ValueError, RuntimeError):
                continue
            if lengths.shape == (count,) and lengths.dtype.kind in "iuf":
                return lengths
    return None


def _counted(dataset: Any, before: StateSnapshot) -> np.ndarray[Any, Any]:
    lengths = np.empty(count := len(dataset), np.int64)
    few, state, stopwatch = min(_FEW, count), _state(dataset), Stopwatch()
    for read, sample in enumerate(_samples(dataset), 1):
        lengths[read - 1] = _length(sample)
        if read == few:
            if before.drawn():
                raise UncountedError(f"its samples draw random numbers, and their lengths may hang on them; {_MEND}")
            if _state(dataset) != state:
                raise UncountedError(f"its data change as they are read; {_MEND}")
            stopwatch = Stopwatch()
        passed_s = stopwatch.seconds()
        if read > few and passed_s > _SURE_S and (all_s := passed_s / (read - few) * count) > _MOST_S:
            raise UncountedError(f"to read its {count:,} samples would take about {all_s:,.0f} s; {_MEND}")
    if before.drawn():
        raise UncountedError(f"some of its samples draw random numbers; {_MEND}")
    return lengths


def _samples(dataset: Any) -> Iterator[Any]:
    """As a DataLoader reads them: several at a time from a dataset that has a method for it."""
    indices = range(len(dataset))
    if not callable(several := getattr(dataset, "__getitems__", None)):
        yield from map(dataset.__getitem__, indices)
        return
    for begin in indices[::_FEW]:
        yield from several([*indices[begin : begin + _FEW]])


def _state(dataset: Any) -> bytes:
    try:
        return state_of(dataset)
    except UnreadableError as error:
        raise UncountedError(f"whether its data change as they are read cannot be seen: {error}; {_MEND}") from error


def _length(sample: Any) -> int:
    ids = sample.get(_IDS) if isinstance(sample, Mapping) else None
    if ids is None:
        raise UncountedError(f"a sample is no mapping with {_IDS}, but of type {type(sample).__name__}; {_MEND}")
    if getattr(ids, "ndim", 1) != 1:
        raise UncountedError(f"{_IDS} of a sample have the shape {tuple(ids.shape)}, not (length,); {_MEND}")
    return len(ids)
