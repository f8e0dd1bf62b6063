"""The table of hostile models: everything that runs plain, and watches, counts, remembers or insists."""

from __future__ import annotations

# Each of these adds its rows.
from support import (
    hostile_hooks,  # noqa: F401
    hostile_kinds,  # noqa: F401
    hostile_recorders,  # noqa: F401
    hostile_steps,  # noqa: F401
    hostile_values,  # noqa: F401
    hostile_weights,  # noqa: F401
)
from support.hostile_parts import ROWS as ROWS
