"""Coexistence with other torch profilers, of which only one can be active at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.autograd import profiler, profiler_legacy
from torch.profiler import ProfilerAction, profile

from lightning_accel.core.hidden_warnings import hidden_warnings
from lightning_accel.core.patch import AttributePatch, applied
from lightning_accel.core.torch_private.profilers import before_profilers


def is_profiling() -> bool:
    """Returns whether a profiler is active on this thread, or is prepared and about to begin.

    A second ``torch.profiler`` would start without an error and empty the first. If a prepared one begins after that,
    the process crashes (torch 2.13). The older profiler, tried here, refuses to start beside an active one. To find one
    that warms up by its schedule, all objects are searched, which takes 0.1 s.
    """
    with hidden_warnings():  # deprecated
        probe = profiler_legacy.profile()  # type: ignore[no-untyped-call]
    try:
        probe.__enter__()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return True
    probe.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    others = [one for one in gc.get_objects() if issubclass(type(one), profile)]
    prepared = [one for one in others if getattr(one, "profiler", None) is not None]  # else it was never started
    return any(getattr(one, "current_action", None) is ProfilerAction.WARMUP for one in prepared)


@contextmanager
def closing_ranges() -> Iterator[None]:
    """Ends all ranges that began inside the context, whoever opened them. Leave it before stopping our profiler.

    A range that ends under another profiler than it began under writes to freed memory (torch 2.13), and the process
    crashes then or later. Torch's own range around an optimizer step is open if forward and backward are called inside
    that step. Ending a range twice is harmless.
    """
    enter: Callable[[Any], Any] = profiler.record_function.__enter__

    def __enter__(self: profiler.record_function) -> Any:  # noqa: N807
        entered.callback(self.__exit__, None, None, None)
        return enter(self)

    patch = AttributePatch("", "tracks ranges", profiler.record_function, "__enter__", __enter__)
    with ExitStack() as entered, applied(patch):
        yield


@contextmanager
def giving_way(end: Callable[[], Any], lose: Callable[[], Any]) -> Iterator[None]:
    """Reports when another profiler begins while ours, which has been started, is active.

    Args:
        end: Called when a new profiler is created. Ours still has its data.
        lose: Called when a profiler begins that was created before ours. Ours has been cancelled: stop it, and read no
            results, which would crash the process (torch 2.13).
    """
    make: Callable[..., None] = profiler.profile.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        end()
        make(self, *args, **kwargs)

    patch = AttributePatch("", "makes way", profiler.profile, "__init__", __init__)
    with applied(patch), ExitStack() as stack:
        stack.callback(before_profilers(lose))
        yield
