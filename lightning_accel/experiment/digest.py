"""The one digest: a short name for what is the same in two processes. No other file imports ``hashlib``."""

from __future__ import annotations

import hashlib

hasher = hashlib.sha256
"""The hash behind :func:`digest`, for what is too much to be held at once."""


def digest(*parts: object) -> str:
    """16 hexadecimal digits that tell these parts from others: bytes by their content, all else by its ``repr``."""
    whole = hasher()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        whole.update(b"%d:" % len(content) + content)
    return whole.hexdigest()[:16]
