"""What happens in a run that techniques may want to act upon: they listen by `Technique.on`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_accel.core.patch import PatchSet
from lightning_accel.techniques.technique_context import Verdicts


@dataclass(frozen=True)
class Decided:
    """These verdicts on the technique's sites hold, of a trial or of an earlier run. Its patches follow them next."""

    verdicts: Verdicts


@dataclass(frozen=True)
class Settled:
    """Patches of the technique were applied or taken back."""


@dataclass(frozen=True)
class Switched:
    """Live trials have switched the technique to this variant, or ``"off"``; its patches have done it already."""

    variant: str


@dataclass(frozen=True)
class Paused:
    """The technique is to leave the next steps alone, or may act again: it had no choices to offer to live trials.

    It had done nothing when they asked, and may find something to do later. Plain steps stay the user's own.
    """

    is_paused: bool


@dataclass(frozen=True)
class Added:
    """A technique was added in mid-run. Every technique is told.

    Attributes:
        name: The technique's.
        untried: Its patches on which there is no verdict yet.
        protects: Where activations must not be changed, for its sake: prefixes of sites → why.
    """

    name: str
    untried: PatchSet
    protects: Mapping[str, str]


Event = Decided | Settled | Switched | Paused | Added
