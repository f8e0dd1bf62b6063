"""How many samples a batch holds, found from the batch itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

from torch.nn.utils.rnn import PackedSequence

SizeReader = Callable[[Any], int]


class SampleCounter:
    """Counts samples, and remembers *where* in a batch their number stands: a step costs a look-up, not a search.

    Args:
        batch_size_fn: The user's own count, with which nothing is searched.
        say: Called once, of the first batch that has no samples to be found.
        callback: Whose count it is; its name is part of what is said.
        metric: What is left out then.
    """

    def __init__(
        self, batch_size_fn: SizeReader | None, say: Callable[[str], object], callback: str, metric: str
    ) -> None:
        self._batch_size_fn = batch_size_fn
        self._say, self._callback, self._metric = say, callback, metric
        self._read: SizeReader | None = None
        self._unknown_type: type | None = None

    def count(self, batch: Any) -> int | None:
        """The samples of ``batch``; None where it does not tell them."""
        if self._batch_size_fn is not None:
            return int(self._batch_size_fn(batch))
        if self._read is not None:
            try:
                return self._read(batch)
            except Exception:  # a batch of another build: search again
                self._read = None
        if batch is None:
            return 0  # Lightning skips such a batch
        if type(batch) is self._unknown_type:
            return None
        with suppress(Exception):  # an object whose attributes raise: its samples are unknown, and the run goes on
            if (read := size_reader(batch)) is not None:
                samples = read(batch)
                self._read = read
                return samples
        if self._unknown_type is None:
            self._say(
                f"{self._callback}: a batch of type {type(batch).__name__} does not tell how many samples it holds, so"
                f" {self._metric} is left out. Give {self._callback}(batch_size_fn=...) to have it."
            )
        self._unknown_type = type(batch)
        return None


def size_reader(batch: Any) -> SizeReader | None:
    """A function that reads the number of samples off batches built like ``batch``; None when there is none.

    In this order: a ``batch_size`` the batch itself knows; a list of mappings inside the batch, one a sample (as in
    detection); the first dimension of the first tensor or array that has one; the length of the first list.
    """
    return _by_shape(batch) or _by_length(batch)


def _by_shape(batch: Any) -> SizeReader | None:
    if isinstance(batch, PackedSequence):
        return lambda packed: int(packed.batch_sizes[0])
    if isinstance(getattr(batch, "batch_size", None), int):
        return operator.attrgetter("batch_size")
    if isinstance(shape := getattr(batch, "shape", None), tuple):
        return (lambda tensor: int(tensor.shape[0])) if shape else None
    parts = list(_parts(batch))
    if isinstance(batch, list | tuple):
        for get, part in parts:
            if isinstance(part, list | tuple) and part and all(isinstance(item, Mapping) for item in part):
                return _after(get, len)
    return next((_after(get, read) for get, part in parts if (read := _by_shape(part)) is not None), None)


def _by_length(batch: Any) -> SizeReader | None:
    found = next((_after(get, read) for get, part in _parts(batch) if (read := _by_length(part)) is not None), None)
    return found or (len if isinstance(batch, list | tuple) and batch else None)


def _parts(batch: Any) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """The parts of a collection, each with the function that fetches it."""
    if isinstance(batch, Mapping):
        for key, part in batch.items():
            yield operator.itemgetter(key), part
    elif isinstance(batch, list | tuple):
        for index, part in enumerate(batch):
            yield operator.itemgetter(index), part
    elif is_dataclass(batch) and not isinstance(batch, type):
        for entry in fields(batch):
            yield operator.attrgetter(entry.name), getattr(batch, entry.name, None)


def _after(get: Callable[[Any], Any], read: SizeReader) -> SizeReader:
    return lambda batch: read(get(batch))
