"""An epoch of a loader in other processes, in the very order, and with the very draws, that the loader would have."""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_accel.core.hidden_warnings import hidden_warnings
from lightning_accel.data.worker_schedule import LoaderWorkers

_ENDING_S = 30.0  # for all workers; torch gives each of them 5
_PATIENCE_S = 120.0  # for a batch: a worker that was forked while somebody held a lock never answers

# Without a DataLoader's warning of more workers than cores: what waits for a disk computes nothing.
_not_counting_cores = partial(hidden_warnings, "This DataLoader will create")


class LoadingProcesses:
    """Loads what a loader would, with other workers."""

    def __init__(self, loader: DataLoader[Any], pins: bool) -> None:
        self._loader = loader
        self._rebuilt = partial(rebuilt, loader, pins=pins)
        self._kept: DataLoader[Any] | None = None
        self._kept_for: object = None
        self._orders = _Orders()  # of the workers that are kept
        self._under_way: Iterator[Any] | None = None  # the one that they load

    def like_users(self, workers: LoaderWorkers) -> Iterator[Any]:
        """An epoch with as many workers as the user has, which draw the same random numbers."""
        return iter(self._rebuilt(self._indices(), workers, self._loader.generator))

    def beside(self, workers: LoaderWorkers, state: bytes, failed: Callable[[Exception], Any]) -> Iterator[Any]:
        """An epoch with workers where the user has none: each batch exactly once, whatever happens to the workers.

        They are begun with the first batch that is asked for: the sampler then draws its random numbers at the moment
        when it would have without them. From then on it is asked ahead, so it has to be one that draws no more.

        Workers that are kept have a copy of one ``state`` of the data. ``failed`` is told of a worker's error, after
        which the rest is loaded in this process.
        """
        indices = self._indices()
        # What a DataLoader draws when it is iterated, for the seeds of workers.
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        return self._walk(indices, workers, state, failed)

    def close(self) -> None:
        """Ends the workers that are kept."""
        self._kept = None

    def _indices(self) -> Iterator[Any]:
        return iter(self._loader.sampler if self._loader.batch_sampler is None else self._loader.batch_sampler)

    def _walk(
        self, indices: Iterator[Any], workers: LoaderWorkers, state: bytes, failed: Callable[[Exception], Any]
    ) -> Iterator[Any]:
        under_way = deque[Any]()
        order = _remembered(indices, under_way)
        source: Iterator[Any] | None = None
        rest: Iterable[Any] = ()
        try:
            source = self._begun(order, workers, state)
            while (batch := next(source, order)) is not order:
                under_way.popleft()
                if not under_way and inspect.getgeneratorstate(order) == inspect.GEN_CLOSED:
                    rest = (batch,)
                    break
                yield batch
        except Exception as error:
            self._kept = None
            rest = self._rebuilt(itertools.chain(tuple(under_way), indices), LoaderWorkers(), _own_stream())
            # The error of a worker is in a cycle with the frames that raised it, and these have the workers. To end
            # them may wait for ever: torch's handler of a worker's death raises at any line, that of a lock, too.
            ending = Thread(target=traceback.clear_frames, args=(error.__traceback__,), daemon=True)
            ending.start()
            ending.join(_ENDING_S)
            failed(error)
        finally:  # before the last batch is handed out
            source = None
            if self._under_way is order:
                self._under_way = None
        yield from rest

    def _begun(self, order: Iterator[Any], workers: LoaderWorkers, state: bytes) -> Iterator[Any]:
        if not workers.is_kept:
            self._kept = None
            loader = self._rebuilt(order, workers, _own_stream())
        else:
            if self._kept is None or self._kept_for != (workers, state) or self._under_way is not None:
                self._orders, self._kept_for = _Orders(), (workers, state)
                self._kept = self._rebuilt(self._orders, workers, _own_stream())
            self._orders.order = self._under_way = order
            loader = self._kept
        with _not_counting_cores():
            return iter(loader)


def _own_stream() -> torch.Generator:
    """Returns a random stream that is none of the user's, on the device on which a DataLoader draws seeds."""
    return torch.Generator(torch.get_default_device())


def rebuilt(
    loader: DataLoader[Any],
    order: Iterable[Any],
    workers: LoaderWorkers,
    generator: torch.Generator | None,
    *,
    pins: bool = False,
) -> DataLoader[Any]:
    """A loader like ``loader``.

    Args:
        loader: What it is like.
        order: The indices of its batches; where ``loader`` has no batches, of its samples.
        workers: Which load it.
        generator: Of what it draws itself.
        pins: Whether batches are to be in pinned memory, also where ``loader`` does not say so.
    """
    has_batches = loader.batch_sampler is not None
    more: dict[str, Any] = {"batch_sampler": order} if has_batches else {"batch_size": None, "sampler": order}
    if workers.count:
        more |= {"prefetch_factor": workers.prefetch, "persistent_workers": workers.is_kept}
        more |= {"worker_init_fn": loader.worker_init_fn, "timeout": _PATIENCE_S}
        more |= {"multiprocessing_context": start_method()}
        if loader.num_workers:
            more |= {"timeout": loader.timeout, "in_order": loader.in_order}
            more |= {"multiprocessing_context": loader.multiprocessing_context}
    with _not_counting_cores():
        return DataLoader(
            loader.dataset,
            num_workers=workers.count,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory or pins,
            generator=generator,
            **more,
        )


def start_method() -> str:
    """How workers are started that the user's loader did not have.

    Where the program has not chosen another way than Python's own, they are forked, as before Python 3.14: its
    ``forkserver`` imports the program anew and pickles the data. Batches of a worker that a lock holds up are loaded
    here.
    """
    default = multiprocessing.get_all_start_methods()[0]
    method = multiprocessing.get_start_method(allow_none=True) or default
    return "fork" if method == default == "forkserver" else method


def _remembered(indices: Iterator[Any], under_way: deque[Any]) -> Generator[Any, None, None]:
    """Yields the indices of each batch, and appends them to ``under_way``.

    The caller removes them when the batch has arrived.
    """
    for index in indices:
        under_way.append(index)
        yield index


class _Orders:
    """What workers that are kept ask for the order of each epoch."""

    def __init__(self) -> None:
        self.order: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.order
