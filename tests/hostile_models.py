"""The table of hostile models: everything that runs plain, and watches, counts, remembers or insists."""

from __future__ import annotations

import hostile_watchers  # noqa: F401  (each of these adds its rows)
from hostile_parts import ROWS as ROWS
