"""What a program has done wrong, where a real device would go on with wrong numbers."""

from __future__ import annotations

FOUND: list[str] = []
"""One line each, in order. The pytest plugin fails the test that leaves any behind."""


def report(fault: str) -> None:
    """Notes a fault, once."""
    if fault not in FOUND:
        FOUND.append(fault)


def taken() -> list[str]:
    """All that were found, which are forgotten: a test that provokes them looks at them so."""
    found = list(FOUND)
    FOUND.clear()
    return found
