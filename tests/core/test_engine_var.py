"""Variables that hold on threads which Python did not start, as autograd's for GPUs are none of its own."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

from lightning_accel.core.engine_var import EngineVar


def foreign(function: Callable[[], Any]) -> Any:
    """The result on a thread that ``threading`` knows nothing of."""
    found: list[Any] = []
    is_over = threading.Event()

    def work() -> None:
        found.append(function())
        is_over.set()

    _thread.start_new_thread(work, ())
    is_over.wait()
    return found[0]


def own(function: Callable[[], Any]) -> Any:
    """The result on a thread of Python's."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_of_autograds_sees_what_was_set() -> None:
    variable = EngineVar("variable", default=0)
    with variable.being(1), variable.being(2):
        assert foreign(variable.get) == 2
    assert foreign(variable.get) == 0


def test_another_thread_of_the_users_does_not() -> None:
    variable = EngineVar("variable", default=0)
    with variable.being(1):
        assert variable.get() == 1
        assert own(variable.get) == 0
    assert variable.get() == 0


def test_what_such_a_thread_sets_itself_is_what_it_sees() -> None:
    variable = EngineVar("variable", default=0)

    def within() -> int:
        with variable.being(2):
            return variable.get()

    with variable.being(1):
        assert foreign(within) == 2
        assert foreign(variable.get) == 1


def test_it_ends_where_it_raises() -> None:
    variable = EngineVar("variable", default=0)
    try:
        with variable.being(1):
            raise KeyError
    except KeyError:
        pass
    assert (variable.get(), foreign(variable.get)) == (0, 0)
