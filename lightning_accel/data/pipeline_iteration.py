"""One walk through a loader with batches prepared ahead: its thread, its jobs, and how all of that ends."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from typing_extensions import override

from lightning_accel.data.pipeline_lanes import Job, Lane
from lightning_accel.data.position import Position

THREAD_NAME = "lightning-accel-pipeline"
# How long closing waits for a batch that a loader's worker is still busy with. The thread ends with that batch.
PATIENCE_S = 5.0


@dataclass(eq=False, slots=True)
class Progress:
    """How far the consumer of one iteration has come."""

    state: Any = None  # the loader's, as of the last batch handed out, or as of the beginning
    has_state: bool = False  # otherwise nothing was fetched ahead, and the loader knows
    position: Position | None = None  # of the last batch handed out
    fetch_s: float = 0.0  # what fetching took so far
    prepare_s: float = 0.0  # what moving and preprocessing took so far, on the host


class Run:
    """Fetches, prepares and hands out batches in order."""

    def __init__(
        self,
        source: Iterator[Any],
        lane: Lane,
        position: Callable[[], Position],
        depth: int,
        *,
        before: Progress | None = None,
        in_background: bool,
        snapshot: Callable[[], Any] | None = None,
    ) -> None:
        self.progress = Progress()
        self._source: Iterator[Any] | None = source
        self._lane = lane  # is closed with the run
        self._ask_position = position  # of the first batch, once that is wanted
        self._position: Position | None = None  # of the next batch
        self._before = before or Progress()  # how far the run before this one came
        self._depth = depth  # how many batches are prepared, or being prepared, beyond the one handed out
        self._in_background = in_background  # whether the thread fetches, too; otherwise `take` does
        self._snapshot = snapshot  # the loader's state, asked for after every fetch; None: it has none
        self._jobs: deque[Job] = deque()  # in order, the next to be handed out first
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_exhausted = False
        self._is_stopped = False

    def take(self) -> Any:
        """The next batch, as ``next`` has it; what fetching or preparing it raised, after the run was stopped."""
        if self._is_stopped:
            raise StopIteration
        while not self._is_exhausted and len(self._jobs) <= self._depth:
            self._begin()
        job = self._jobs[0]
        job.done.wait()
        if self._is_stopped:  # meanwhile, by somebody else
            raise StopIteration
        self._jobs.popleft()
        if not job.is_prepared:
            self._end(job)
        try:
            batch = self._lane.hand_out(job)
        except BaseException:
            self.stop()
            raise
        self.progress.position = job.position
        if self._snapshot is not None:
            self.progress.state, self.progress.has_state = job.state, True
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
        self._source = None

    def _begin(self) -> None:
        position = self._position
        if position is None:
            position = self._ask_position()
            # A shorter loader that begins anew within an epoch, asked for a batch before that is counted: Lightning
            # fetches one early where it knows no length.
            position = position.ahead(1) if position == self._before.position else position
        self._position = position.ahead(1)
        job = Job(position)
        if not self._in_background:
            self._fetch(job)
            if not job.has_batch:
                job.done.set()
                self._jobs.append(job)
                return
            job.after = self._lane.after(job.batch)
        if self._thread is None:
            # A daemon, so that a loader's worker that never answers cannot keep the interpreter from ending. Where it
            # answers, the thread is joined at exit, before torch and multiprocessing (whose hooks are older, so run
            # later) end the workers.
            self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
            self._thread.start()
            atexit.register(self.stop)
        self._jobs.append(job)
        self._inbox.put(job)

    def _fetch(self, job: Job) -> None:
        assert self._source is not None
        began = time.perf_counter()
        try:
            job.batch = next(self._source)
            job.state = self._snapshot() if self._snapshot is not None else None
        except StopIteration:
            job.is_end = True
        except Exception as error:
            job.error = error
        self._is_exhausted = not job.has_batch
        self.progress.fetch_s += time.perf_counter() - began

    def _work(self) -> None:
        while (job := self._inbox.get()) is not None:
            try:
                with self._lane.working(), torch.no_grad():
                    self._prepare(job)
            except BaseException as error:
                job.error = error
            done = job.done
            del job  # a batch that was handed out is the consumer's to free, not held until the next one comes
            done.set()
        self._lane.close()

    def _prepare(self, job: Job) -> None:
        if self._in_background and not self._is_stopped:
            if self._is_exhausted:
                job.is_end = True
            else:
                self._fetch(job)
        if job.has_batch and not self._is_stopped:
            began = time.perf_counter()
            self._lane.prepare(job)
            job.is_prepared = True
            self.progress.prepare_s += time.perf_counter() - began

    def _end(self, job: Job) -> NoReturn:
        """Stops, and raises what stands in place of the batch."""
        error, job.error = job.error, None
        if job.is_end:
            self.progress.state, self.progress.has_state = None, False
        self.stop()
        try:
            if error is None:
                raise StopIteration
            if isinstance(error, StopIteration):  # as in a generator (PEP 479): it would look like the end of the data
                raise RuntimeError("a batch transform raised StopIteration") from error
            raise error
        finally:
            del error  # whose traceback has this frame: neither is to keep the other alive


class Iteration(Iterator[Any]):
    """The consumer's end of a run, which stops when this is closed, dropped, or at its end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        # The thread knows the run, and nothing that the run knows knows this.
        self._finalizer = weakref.finalize(self, run.stop)
        self._finalizer.atexit = False  # the run sees to that

    def __next__(self) -> Any:
        return self._run.take()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is at its end: Lightning copies loaders under way, and leaves out iterators of DataLoaders only."""
        return iter, ((),)

    def close(self) -> None:
        """Stops here. Batches prepared ahead are dropped, and ``next`` raises StopIteration."""
        self._finalizer()
