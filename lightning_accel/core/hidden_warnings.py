"""Hides warnings, and has no other warning shown again.

Python remembers which warnings it has shown, and forgets all of that at each change of its filters by
``warnings.filterwarnings`` or ``warnings.catch_warnings``. A warning that a plain run shows once would come back.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def hide_warnings(message: str = "") -> Callable[[], None]:
    """Hides all warnings whose text begins with ``message``, a regular expression.

    Returns:
        Shows them again. It does nothing if others have reset the filters.
    """
    filters: Any = warnings.filters
    entry = "ignore", re.compile(message, re.IGNORECASE), Warning, None, 0  # as filterwarnings() makes it
    filters.insert(0, entry)

    def show() -> None:
        with suppress(ValueError):
            filters.remove(entry)

    return show


@contextmanager
def hidden_warnings(message: str = "") -> Iterator[None]:
    """Hides all warnings whose text begins with ``message``, a regular expression."""
    show = hide_warnings(message)
    try:
        yield
    finally:
        show()
