"""The device pipeline: the next batches move to the device, and are preprocessed there, while this one computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_accel.data.batch import Position
from lightning_accel.data.chain import Preprocess
from lightning_accel.data.loader_proxy import StandIn
from lightning_accel.data.pipeline_iteration import Iteration, PipelineRun, Progress
from lightning_accel.data.pipeline_lanes import BatchTransform, Lane, StreamLane
from lightning_accel.data.transform import Transform

__all__ = ["BatchTransform", "DevicePipeline"]


@dataclass(eq=False, slots=True)
class _Inner:
    """All that a pipeline knows, under one name, as every other name is the loader's."""

    loader: Any
    device: torch.device
    preprocess: BatchTransform | None
    depth: int
    position: Callable[[], Position]
    is_closed: bool = False
    side: torch.cuda.Stream | None = None
    progress: Progress = field(default_factory=Progress)
    under_way: weakref.WeakSet[Iteration] = field(default_factory=weakref.WeakSet)


class DevicePipeline(StandIn):
    """A loader whose batches come out on ``device``, preprocessed, up to ``depth`` of them made ready ahead.

    Each iteration has one thread, which moves and preprocesses batches in order. On CUDA they go through reused pinned
    memory and a side stream; the stream that is current where a batch is handed out waits for that batch, and
    nothing else waits. On a CPU the thread preprocesses, and nothing is copied.

    **Who fetches.** Batches of a :class:`~torch.utils.data.DataLoader` with workers are fetched by that thread, which
    only takes them from a queue: waiting for a later batch does not hold up the consumer, who has an earlier one.
    ``next`` of any other loader is user code in this process, which may draw from global random generators, or use
    what belongs to a thread (sqlite, h5py): it runs on the consumer's thread, in order, ``depth`` batches early. So
    does a DataLoader with workers whose sampler is not one of torch's.

    **Ends.** An error surfaces unchanged where its batch would have come, after the batches before it, and ends the
    iteration. An iteration that is closed or dropped early drops the batches made ready, as a DataLoader drops those
    of its workers.

    Otherwise this stands for the loader: its length, its attributes (to read and to write) and, of a DataLoader, its
    class are the loader's. Only ``loader``, ``seconds``, ``close`` and, for a loader with state, ``state_dict`` and
    ``load_state_dict`` are the pipeline's own.

    Args:
        loader: Any iterable of batches of any structure; of a pipeline, its loader.
        device: Where batches go.
        preprocess: What is done to every batch there, or before where it says so by ``on_host``: a
            :class:`~lightning_accel.data.Preprocess`, or a list of transforms for one with its defaults.
        depth: How many batches may be ready, or being made so, beyond the one handed out. Each takes memory of the
            device, and has to have memory of its own from the loader. 0: each is made ready when it is asked for.
        position: Asked for the place of each iteration's first batch in the run, when that is first asked for (a
            Trainer may begin an iteration before it knows where it resumes). None: batches are trained on, and each
            iteration is one more epoch.

    Raises:
        TypeError: ``loader`` is not iterable.
        ValueError: ``depth`` is not an integer, or below 0; ``preprocess`` is for another device.
    """

    _own = StandIn._own | {"seconds", "state_dict", "load_state_dict"}
    _inner: _Inner

    def __new__(cls, loader: Any, *_: Any, **__: Any) -> DevicePipeline:
        """The subclass with ``state_dict`` for a loader that has it: isinstance() looks for it in classes."""
        is_stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        return object.__new__(StatefulDevicePipeline if is_stateful and cls is DevicePipeline else cls)

    def __init__(
        self,
        loader: Any,
        device: torch.device | str,
        preprocess: BatchTransform | Sequence[Transform] | None = None,
        depth: int = 2,
        *,
        position: Callable[[], Position] | None = None,
    ) -> None:
        if isinstance(loader, DevicePipeline):
            loader = loader.loader
        if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
            raise TypeError(f"a DevicePipeline takes an iterable of batches, such as a DataLoader, not {loader!r}")
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
            raise ValueError(f"depth={depth!r}: how many batches to make ready ahead is an integer, 0 or more")
        device = torch.device(device)
        super().__init__(_Inner(loader, device, _for_device(preprocess, device), depth, position or _Epochs()))

    @property
    def seconds(self) -> tuple[float, float]:
        """What fetching and preparing took so far in the latest iteration, on the host."""
        return self._inner.progress.fetch_s, self._inner.progress.prepare_s

    def close(self) -> None:
        """Ends every iteration under way. From then on iterating gives the loader's batches as they are."""
        self._inner.is_closed = True
        for iteration in list(self._inner.under_way):
            iteration.close()

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch: asks the loader for its iterator, here and on this thread."""
        inner = self._inner
        if inner.is_closed:
            inner.progress = Progress()
            return iter(inner.loader)
        sharing = None
        if getattr(inner.loader, "persistent_workers", False):
            # The loader has one iterator for all who iterate over it, which begins anew: nobody may be fetching then.
            sharing = _SHARING.setdefault(inner.loader, weakref.WeakSet())
            for earlier in list(sharing):
                earlier.settle()
        source = iter(inner.loader)
        run = PipelineRun(
            source,
            self._lane(),
            inner.position,
            inner.depth,
            in_background=_only_takes_from_a_queue(inner.loader, source),
            stateful=inner.loader if isinstance(self, StatefulDevicePipeline) and inner.depth > 0 else None,
            before=inner.progress,
        )
        if sharing is not None:
            sharing.add(run)
        inner.progress = run.progress
        iteration = Iteration(run)
        inner.under_way.add(iteration)
        return iteration

    def _lane(self) -> Lane:
        inner = self._inner
        if inner.device.type != "cuda":
            return Lane(inner.device, inner.preprocess)
        if inner.side is None:
            # One for all iterations: memory of one stream is not given to another, so that a new stream would have
            # the batches of every epoch take memory of their own.
            inner.side = torch.cuda.Stream(inner.device)  # type: ignore[no-untyped-call]
        return StreamLane(inner.side, inner.preprocess)

    @override
    def __repr__(self) -> str:
        inner = self._inner
        return f"DevicePipeline({inner.loader!r}, device='{inner.device}', depth={inner.depth})"

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        inner = self._inner
        return _rebuilt, (inner.is_closed, inner.position, inner.loader, inner.device, inner.preprocess, inner.depth)


class StatefulDevicePipeline(DevicePipeline):
    """What a DevicePipeline is where its loader has ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Any:
        """The loader's state as of the last batch handed out, whatever was fetched ahead of it."""
        state = self._inner.progress.state
        return self._inner.loader.state_dict() if state is None else state

    def load_state_dict(self, state_dict: Any) -> None:
        """Has the loader go on from there with the next iteration."""
        self._inner.loader.load_state_dict(state_dict)
        self._inner.progress.state = None


# Runs over loaders whose iterator outlives an epoch.
_SHARING: weakref.WeakKeyDictionary[Any, weakref.WeakSet[PipelineRun]] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _Epochs:
    """Counts the iterations of a pipeline that nobody tells where it is."""

    begun: int = 0

    def __call__(self) -> Position:
        self.begun += 1
        return Position(epoch=self.begun - 1)


def _for_device(preprocess: BatchTransform | Sequence[Transform] | None, device: torch.device) -> BatchTransform | None:
    if isinstance(preprocess, list | tuple):
        return Preprocess(preprocess, device=device)
    if isinstance(preprocess, Preprocess) and not preprocess.on_host and preprocess.device.type != device.type:
        raise ValueError(
            f"DevicePipeline(device='{device}') with a Preprocess for '{preprocess.device}': give both the same,"
            f" Preprocess(..., device='{device}')."
        )
    return cast(BatchTransform | None, preprocess)


def _rebuilt(is_closed: bool, position: Callable[[], Position], *settings: Any) -> DevicePipeline:
    pipeline = DevicePipeline(*settings, position=position)
    pipeline._inner.is_closed = is_closed
    return pipeline


def _only_takes_from_a_queue(loader: Any, source: Iterator[Any]) -> bool:
    """Whether fetching runs no user code in this process: with workers, all but the sampler is theirs."""
    is_torchs_own = isinstance(loader, DataLoader) and type(source).__module__ == DataLoader.__module__
    if not is_torchs_own or loader.num_workers == 0:
        return False
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        is_torchs = type(sampler).__module__.startswith("torch.utils.data.")
        if not is_torchs and not isinstance(sampler, list | tuple | range):
            return False
        sampler = getattr(sampler, "sampler", None)
    return True
