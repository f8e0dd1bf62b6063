"""One walk through a loader with batches prepared ahead: its thread, its jobs, and how all of that ends."""

from __future__ import annotations

import atexit
import copy
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.data.batch import Position
from lightning_accel.data.loader_proxy import LoaderWalk
from lightning_accel.data.pipeline_lanes import BatchJob, Lane

THREAD_NAME = "lightning-accel-pipeline"
# How long closing waits for a batch that a loader's worker is still busy with. The thread ends with that batch.
PATIENCE_S = 5.0


@dataclass(eq=False, slots=True)
class Progress:
    """How far the consumer of one iteration has come."""

    state: Any = None  # the loader's, as of the last batch handed out; None: nothing was fetched ahead, ask the loader
    position: Position | None = None  # of the last batch handed out
    fetch_s: float = 0.0  # what fetching took so far
    prepare_s: float = 0.0  # what moving and preprocessing took so far, on the host


@dataclass(eq=False)
class PipelineRun:
    """Fetches, prepares and hands out batches in order."""

    source: Iterator[Any] | None
    lane: Lane  # is closed with the run
    ask_position: Callable[[], Position]  # of the first batch, once that is wanted
    depth: int  # how many batches are prepared, or being prepared, beyond the one handed out
    in_background: bool  # whether the thread fetches, too; otherwise `take` does
    stateful: Any = None  # the loader, where it has a state and is ahead of what is handed out
    before: Progress = field(default_factory=Progress)  # how far the run before this one came
    progress: Progress = field(default_factory=Progress, init=False)
    _position: Position | None = field(default=None, init=False)  # of the next batch
    _jobs: deque[BatchJob] = field(default_factory=deque, init=False)  # in order, the next to be handed out first
    _inbox: queue.SimpleQueue[BatchJob | None] = field(default_factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _is_exhausted: bool = field(default=False, init=False)
    _is_stopped: bool = field(default=False, init=False)

    def take(self) -> Any:
        """The next batch, as ``next`` has it; what fetching or preparing it raised, after the run was stopped."""
        if self._is_stopped:
            raise StopIteration
        while not self._is_exhausted and len(self._jobs) <= self.depth:
            self._begin()
        job = self._jobs[0]
        job.done.wait()
        if self._is_stopped:  # meanwhile, by somebody else
            raise StopIteration
        self._jobs.popleft()
        if job.error is not None:
            self._end(job)
        try:
            batch = self.lane.hand_out(job)
        except BaseException:
            self.stop()
            raise
        self.progress.position, self.progress.state = job.position, job.state
        return batch

    def settle(self) -> None:
        """Waits until every batch that was begun is there: nothing is being fetched then."""
        for job in self._jobs:
            job.done.wait()
        if self._is_stopped and self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Ends the thread and lets go of everything; batches that were not handed out are dropped."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._thread is not None:
            atexit.unregister(self.stop)
            self._inbox.put(None)
            # The garbage collector may run, and drop an iteration, on any thread.
            if self._thread is not threading.current_thread():
                self._thread.join(PATIENCE_S)
        for job in self._jobs:
            job.error = None  # the traceback has the job
        self._jobs.clear()
        self.source = None

    def _begin(self) -> None:
        position = self._position
        if position is None:
            position = self.ask_position()
            # A shorter loader that begins anew within an epoch, asked for a batch before that is counted: Lightning
            # fetches one early where it knows no length.
            position = position.ahead(1) if position == self.before.position else position
        self._position = position.ahead(1)
        job = BatchJob(position)
        if not self.in_background:
            self._fetch(job)
            if job.error is not None:
                job.done.set()
                self._jobs.append(job)
                return
            job.after = self.lane.after(job.batch)
        if self._thread is None:
            # A daemon, so that a loader's worker that never answers cannot keep the interpreter from ending. Where it
            # answers, the thread is joined at exit, before torch and multiprocessing (whose hooks are older, so run
            # later) end the workers.
            self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
            self._thread.start()
            atexit.register(self.stop)
        self._jobs.append(job)
        self._inbox.put(job)

    def _fetch(self, job: BatchJob) -> None:
        assert self.source is not None
        stopwatch = Stopwatch()
        try:
            if self._is_exhausted:
                raise StopIteration
            job.batch = next(self.source)
            if self.stateful is not None:
                # A copy: state_dict() may give out the very objects that the loader goes on changing as it fetches.
                job.state = copy.deepcopy(self.stateful.state_dict())
        except StopIteration:
            job.error = StopIteration()  # not the one caught: what it was raised amid may hold the iteration
        except Exception as error:
            job.error = error
        self._is_exhausted = job.error is not None
        self.progress.fetch_s += stopwatch.seconds()

    def _work(self) -> None:
        while (job := self._inbox.get()) is not None:
            try:
                with self.lane.working(), torch.no_grad():
                    if self.in_background and not self._is_stopped:
                        self._fetch(job)
                    if job.error is None and not self._is_stopped:
                        stopwatch = Stopwatch()
                        self.lane.prepare(job)
                        self.progress.prepare_s += stopwatch.seconds()
            except StopIteration as error:  # as in a generator (PEP 479): it would look like the end of the data
                job.error = RuntimeError("a batch transform raised StopIteration")
                job.error.__cause__ = error
            except BaseException as error:
                job.error = error
            done = job.done
            del job  # a batch that was handed out is the consumer's to free, not held until the next one comes
            done.set()
        self.lane.close()

    def _end(self, job: BatchJob) -> NoReturn:
        """Stops, and raises what stands in place of the batch."""
        error, job.error = job.error, None
        assert error is not None
        if isinstance(error, StopIteration):
            self.progress.state = None
        self.stop()
        try:
            raise error
        finally:
            del error  # whose traceback has this frame: neither is to keep the other alive


class Iteration(LoaderWalk):
    """The consumer's end of a run, which stops when this is closed, dropped, or at its end."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        # The thread knows the run, and nothing that the run knows knows this.
        self._finalizer = weakref.finalize(self, run.stop)
        self._finalizer.atexit = False  # the run sees to that

    def __next__(self) -> Any:
        return self._run.take()

    def close(self) -> None:
        """Stops here. Batches prepared ahead are dropped, and ``next`` raises StopIteration."""
        self._finalizer()
