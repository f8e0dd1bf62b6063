"""The table of hostile models: everything that runs plain, and watches, counts, remembers or insists."""

from __future__ import annotations

# Each of these adds its rows.
import hostile_hooks  # noqa: F401
import hostile_kinds  # noqa: F401
import hostile_recorders  # noqa: F401
import hostile_steps  # noqa: F401
import hostile_values  # noqa: F401
import hostile_weights  # noqa: F401
from hostile_parts import ROWS as ROWS
