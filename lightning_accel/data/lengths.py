"""How many tokens each sample of a dataset of text has: as it says itself, or counted once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.data.loader_state import UnreadableError, state_of

_NAMES = ("length", "lengths")
_IDS = "input_ids"
_MOST_S = 20.0  # for counting
_SURE_S = 1.0  # after which it is clear how long that takes
_FEW = 32  # samples that show whether it may be counted, and are read at a time
_MEND = "give the dataset a column or an attribute `lengths`, a number for each sample"


class UncountedError(Exception):
    """Of a dataset whose lengths are not known, and not to be counted."""


def lengths_of(dataset: Any) -> np.ndarray[Any, Any]:
    """The length of each sample, of shape (N,).

    A column (of Hugging Face's datasets) or an attribute ``length`` or ``lengths`` says it, or every sample is read
    once, for its ``input_ids``: where that takes seconds, draws no random numbers and changes nothing in the dataset.

    Raises:
        UncountedError: Nothing says it, and it cannot be counted so.
    """
    said = _said(dataset)
    return _counted(dataset) if said is None else said


def _said(dataset: Any) -> np.ndarray[Any, Any] | None:
    if type(dataset) is Subset:
        whole = _said(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices)]
    for name in _NAMES:
        is_column = name in (getattr(dataset, "column_names", None) or ())
        said = dataset[name][:] if is_column else getattr(dataset, name, None)
        if isinstance(said, list | tuple | np.ndarray | torch.Tensor):
            lengths = np.asarray(said)
            # Something else may be called so: how many samples there are, say.
            if lengths.shape == (len(dataset),) and lengths.dtype.kind in "iuf":
                return lengths
    return None


def _counted(dataset: Any) -> np.ndarray[Any, Any]:
    try:
        with StateSnapshot(None, Level.RANDOM, torch.device("cpu")) as before:
            return _read(dataset, before)
    except UncountedError:
        raise
    except Exception as error:  # the data's own: the training will meet it, or not
        raise UncountedError(f"reading its samples fails: {type(error).__name__}: {error}; {_MEND}") from error


def _read(dataset: Any, before: StateSnapshot) -> np.ndarray[Any, Any]:
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
