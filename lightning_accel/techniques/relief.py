"""What a technique can do for a run that has run out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Relief:
    """A way to need less memory that changes no number, and can be put on in mid-run."""

    settings: Any  # the technique's own, with which it is made anew
    costs: float  # what it adds to the time of a step, as a share of it, about: what costs least is tried first
    # What is left of the activations that a step keeps, as a share of them, about; None where it hangs on their values.
    keeps: float | None = None
    only_anew: str = ""  # why a run under way cannot have it, though the next one can; empty: it can
