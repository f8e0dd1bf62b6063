"""Of torch's profilers there can be one at a time: whether one is at work, and how to make way for another."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import profiler, profiler_legacy
from torch.profiler import ProfilerAction, profile

from lightning_accel.core.patch import AttributePatch, applied
from lightning_accel.core.torch_private.profilers import before_profilers


def is_profiling() -> bool:
    """Whether a profiler is at work on this thread, or has been prepared and is about to begin.

    A second one of ``torch.profiler`` would start all the same, and empty the first; one that was prepared, and begins
    after that, ends the process (torch 2.13). The older profiler, which is tried here, refuses beside one at work; for
    one that warms up by its schedule all objects are looked through, in a tenth of a second.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        probe = profiler_legacy.profile()  # type: ignore[no-untyped-call]
    try:
        probe.__enter__()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return True
    probe.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return any(issubclass(type(one), profile) and _warms_up(one) for one in gc.get_objects())


def _warms_up(one: profile) -> bool:
    # Some are half made, or never started.
    is_prepared = getattr(one, "profiler", None) is not None
    return is_prepared and getattr(one, "current_action", None) is ProfilerAction.WARMUP


@contextmanager
def closing_ranges() -> Iterator[None]:
    """To be left before a profiler of ours is stopped: ends the ranges that began under it, whosever they are.

    A range that ends under another profiler than it began under writes to memory that has been freed (torch 2.13), and
    the process dies of it, then or later. Torch's own range around an optimizer's step is open where forward and
    backward are called from within it. To end a range twice is no harm.
    """
    entered: list[profiler.record_function] = []

    def tracking(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def __enter__(self: profiler.record_function) -> Any:  # noqa: N807
            entered.append(self)
            return original(self)

        return __enter__

    kind = profiler.record_function
    try:
        with applied(AttributePatch("", "tracks ranges", kind, "__enter__", tracking(kind.__enter__))):
            yield
    finally:
        for one in reversed(entered):
            one.__exit__(None, None, None)


@contextmanager
def giving_way(end: Callable[[], Any], lose: Callable[[], Any]) -> Iterator[None]:
    """For as long as a profiler of ours is at work, which has been started: tells when another one begins.

    Args:
        end: Called while ours still has what it has seen, where a new profiler is made.
        lose: Called where one begins that was made before ours. Ours has then been cancelled: it is to be stopped,
            and asked for nothing, as that ends the process (torch 2.13).
    """

    def made(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            end()
            original(self, *args, **kwargs)

        return __init__

    patch = AttributePatch("", "makes way", profiler.profile, "__init__", made(profiler.profile.__init__))
    patch.apply()
    restore = before_profilers(lose)
    try:
        yield
    finally:
        restore()
        patch.undo()
