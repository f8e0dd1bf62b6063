"""What a run says on the console in lightning-accel's name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "lightning-accel" in (line := record.getMessage()):
            self.lines.append(line)


@contextmanager
def heard() -> Iterator[list[str]]:
    """The lines that ``rank_zero_info`` says meanwhile."""
    handler, logger = _Lines(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
