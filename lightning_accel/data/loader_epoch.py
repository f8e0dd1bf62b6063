"""One walk through a loader: timed, and watched for what workers would change."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_accel.core.clocks import HostClock, Stopwatch
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.core.step_timeline import StepTally, StepTimeline
from lightning_accel.data.loader_proxy import LoaderWalk
from lightning_accel.data.loader_state import UnreadableError, state_of
from lightning_accel.data.worker_schedule import LEAST_WAIT

LEAST_BATCHES = 8
"""Of an epoch that tells something."""

_LOOK = 16  # batches after which an epoch that hardly waits is not watched any further


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
