"""A loader whose workers are chosen from epoch to epoch, by what is waited for it, in the order that it has."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_accel.core.clocks import HostClock, Stopwatch, clock_for
from lightning_accel.core.host import usable_cores
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.core.step_timeline import StepTally, StepTimeline
from lightning_accel.data.loader_proxy import LoaderWalk, StandIn
from lightning_accel.data.loader_state import UnreadableError, state_of
from lightning_accel.data.worker_epoch import LoadingProcesses, start_method
from lightning_accel.data.worker_schedule import LEAST_WAIT, LoaderWorkers, WorkerCost, course

LEAST_BATCHES = 8
"""Of an epoch that tells something."""

_LOOK = 16  # batches after which an epoch that hardly waits is not watched any further

_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


class TunedLoader(StandIn):
    """Stands for a DataLoader, and loads its batches with other workers where that is faster.

    **The batches are the same**, to the bit. Their order is asked of the loader's own sampler, at the same moments as
    the loader itself would, and the seed that a DataLoader draws for its workers is drawn whoever loads: so all random
    streams of the run go on as they would have. Workers are given only to data that draw no random numbers, and that
    neither change as they are read nor while the model is trained, as a whole epoch has shown. Where they fail, the
    rest of the epoch is loaded in this process, from the batch on that is missing.
    """

    _inner: LoaderTuning


def why_left(loader: Any) -> str:
    """Why a loader cannot have other workers, as far as it can be told beforehand; empty: it can."""
    if type(loader) is not DataLoader:
        return f"it is a {type(loader).__name__}, which is not rebuilt: only a DataLoader of torch's own is"
    if isinstance(loader.dataset, IterableDataset | MapDataPipe):
        return (
            f"each worker would have all of its {type(loader.dataset).__name__}, or a part that depends on their number"
        )
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) not in (*_SAMPLERS, list, tuple, range):
        return f"its {type(sampler).__name__} may follow the training, and workers would ask it ahead"
    if loader.num_workers and loader.persistent_workers:
        return "its workers are persistent, and have states of their own"
    if not loader.num_workers and (method := start_method()) != "fork":
        return f"workers are started by {method!r} here, which runs the program anew: set num_workers yourself"
    return ""


class LoaderTuning:
    """What a TunedLoader knows, and decides between two epochs.

    Args:
        loader: A loader of the training.
        device: Where batches go.
        tell: Is told what holds, whenever that changes: a line, and whether it is other than the user's.
        objection: Asked once, at the end of the first epoch, for a reason to leave it; empty: there is none.
        processes: How many of the run share this machine's cores.
        pins: Whether batches of other settings are to be in pinned memory.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device,
        tell: Callable[[str, bool], Any],
        *,
        objection: Callable[[], str] = str,
        processes: int = 1,
        pins: bool = False,
    ) -> None:
        self.loader, self._tell, self._objection = loader, tell, objection
        self._users = LoaderWorkers(loader.num_workers, loader.prefetch_factor or 2)
        self._course = course(self._users, max(1, usable_cores() // processes))
        self._workers = next(self._course)
        self._is_settled = False
        self._waited: float | None = None  # the share of the user's own
        self._tally = StepTally()  # of the epoch under way, or the last
        self._timeline = StepTimeline(clock_for(device), lambda step: self._tally.took(step))
        self._processes = LoadingProcesses(loader, pins)
        self._epoch: LoaderEpoch | None = None  # the one under way, or the last

    def begin(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            self._conclude(epoch)
        timeline = None if self._is_settled else self._timeline
        if self._workers != self._users:
            try:
                self._epoch = self._with_workers(timeline)
            except UnreadableError as error:
                self._stay(f"taken back: {error}")
        if self._epoch is None:
            source = iter(self.loader)
            if self._is_settled:
                return source
            self._epoch = LoaderEpoch(source, self._timeline, self.loader if not self._users.count else None)
        if timeline is not None:
            timeline.restart()
            self._tally = StepTally()
        return self._epoch

    def close(self) -> None:
        self._workers, self._is_settled, self._epoch = self._users, True, None
        self._processes.close()

    def _with_workers(self, timeline: StepTimeline | None) -> LoaderEpoch:
        if self._users.count:
            return LoaderEpoch(self._processes.like_users(self._workers), timeline)
        state = data_state(self.loader)
        source = self._processes.beside(self._workers, state, self._failed)
        return LoaderEpoch(source, timeline, self.loader, state)

    def _failed(self, error: Exception) -> None:
        last = (str(error).strip().splitlines() or [""])[-1]
        self._stay(f"taken back: a worker failed: {type(error).__name__}: {last}")

    def _stay(self, why: str) -> None:
        """Goes back to the user's own loader from the next epoch on, for good."""
        self._workers, self._is_settled = self._users, True
        self._processes.close()
        self._tell(why, False)

    def _conclude(self, epoch: LoaderEpoch) -> None:
        if self._is_settled and self._workers == self._users:  # a worker has failed
            return
        if why := epoch.complaint():
            self._stay(f"{'left' if self._workers == self._users else 'taken back'}: {why}")
        if self._is_settled or not epoch.tells:
            return
        cost = self._cost(epoch)
        if self._waited is None and (why := self._objection()):
            self._stay(f"left: {why}")
            return
        self._waited = cost.waited if self._waited is None else self._waited
        try:
            self._workers = self._course.send(cost)
        except StopIteration as end:
            self._workers, self._is_settled = end.value, True
        waiting = f"waiting for data took {self._waited:.0%} of the time"
        if self._workers == self._users:
            no_gain = "that is little" if self._waited < LEAST_WAIT else "no other setting was faster"
            self._stay(f"left: {waiting}, and {no_gain}")
        else:
            self._tell(f"{self._workers}{'' if self._is_settled else ' on trial'}; with {self._users} {waiting}", True)

    def _cost(self, epoch: LoaderEpoch) -> WorkerCost:
        self._timeline.settle()
        tally = self._tally
        # The median of the steps: some of the first are on trial, and validations fall into others.
        step_ms, wait_ms = statistics.median(tally.step_ms), sum(tally.wait_ms) / len(tally.step_ms)
        whole_ms = step_ms + wait_ms
        start_ms = epoch.first_s * 1e3 / len(tally.step_ms)
        return WorkerCost(whole_ms / 1e3, wait_ms / whole_ms, start_ms / whole_ms)


def data_state(loader: DataLoader[Any]) -> bytes:
    """A digest of what a loader's batches are made of, which is another one if anything has changed.

    Raises:
        lightning_accel.data.loader_state.UnreadableError: It cannot be handed to another process.
    """
    try:
        return state_of(loader.dataset, loader.collate_fn)
    except UnreadableError as error:
        raise UnreadableError(f"the data cannot be loaded in other processes: {error}") from error


class LoaderEpoch(LoaderWalk):
    """Batches as ``source`` has them.

    The timeline, if there is one, is told of every fetch, and of a step's end where the next batch is asked for.
    ``watched`` is a loader of the user's without workers: whether its batches hang on more than their indices is found
    out. ``state`` is what it had for data when workers were given them; None: ``source`` is its own.
    """

    def __init__(
        self,
        source: Iterator[Any],
        timeline: StepTimeline | None,
        watched: DataLoader[Any] | None = None,
        state: bytes | None = None,
    ) -> None:
        self._source, self._watched, self._state = source, watched, state
        self._timelines = [] if timeline is None else [timeline]
        self._complaint = ""
        self._is_compared = False
        self.count = 0  # how many have been fetched
        self.first_s = 0.0  # what the first one took, in seconds
        self._is_own = watched is not None and state is None
        if watched is not None and state is None:
            self._look = min(_LOOK, len(watched) // 2)
            self._first = StepTally()  # of the steps before the look, by the host
            self._timelines.append(StepTimeline(HostClock(), self._first.took))

    def __next__(self) -> Any:
        for timeline in self._timelines:
            timeline.step_ended()
        is_watched = self._is_own and not self._complaint
        # Not around the first, for which torch's samplers draw.
        before = StateSnapshot(None, Level.RANDOM, torch.device("cpu")) if is_watched and self.count else None
        for timeline in self._timelines:
            timeline.fetch_began()
        fetch = Stopwatch()
        try:
            batch = next(self._source)
        finally:
            for timeline in self._timelines:
                timeline.fetch_ended()
        if not self.count:
            self.first_s = fetch.seconds()
        if before is not None and before.drawn():
            self._complaint = "its data draw random numbers, and workers would draw others"
        elif is_watched and self.count == self._look:
            self._look_closer()
        self.count += 1
        if self._watched is not None and self.count == len(self._watched):
            self._compare()  # now, as the user's code may change it between two epochs
        return batch

    @property
    def tells(self) -> bool:
        """Whether there were enough batches to say something."""
        return self.count >= LEAST_BATCHES and (self._watched is None or self._state is not None)

    def complaint(self) -> str:
        """Why workers would have loaded, or have loaded, other batches; empty if there is no reason."""
        self._compare()
        return self._complaint

    def _compare(self) -> None:
        if self._state is None or self._is_compared or self._complaint:
            return
        self._is_compared = True
        if self._data_state() not in (self._state, None):
            self._complaint = "its data change while the model trains, which workers, who have a copy, do not see"

    def _look_closer(self) -> None:
        """Takes the state of the data, once it is clear that batches are waited for."""
        first = self._first
        waited, worked = sum(first.wait_ms), len(first.wait_ms) * statistics.median(first.step_ms or [0.0])
        if waited < LEAST_WAIT * (waited + worked):
            self._complaint = f"waiting for data took {waited / (waited + worked):.0%} of the time, and that is little"
        else:
            self._state = self._data_state()

    def _data_state(self) -> bytes | None:
        """What the loader has for data; None, and a complaint, if it cannot be handed to another process."""
        assert self._watched is not None
        try:
            return data_state(self._watched)
        except UnreadableError as error:
            self._complaint = str(error)
            return None
