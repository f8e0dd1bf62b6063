"""The ways in which each training is run, and compared with the plain one."""

from __future__ import annotations

from dataclasses import dataclass

from strangers.differences import differences
from strangers.harness import DEFAULTS, IN_TURNS, NUDGED, PLAIN, ROUNDED, TRUE, Legs, long, mixed, moved, plain, run
from strangers.table import Training


@dataclass(frozen=True)
class Case:
    """A way to run a training.

    Attributes:
        variants: Of its legs, each from the checkpoint of the one before.
        switches: Whether it is long enough for live trials, whose clock decides nothing.
    """

    variants: tuple[str, ...]
    switches: bool = False

    @property
    def is_exact(self) -> bool:
        return DEFAULTS not in self.variants

    def legs(self, training: Training) -> Legs:
        if len(self.variants) == 1:
            return ((self.variants[0], long(training) if self.switches else training.epochs),)
        return tuple((variant, training.epochs) for variant in self.variants)


CASES = {
    "32-true": Case((TRUE,)),
    "defaults": Case((DEFAULTS,)),
    "32-true, switching": Case((TRUE,), switches=True),
    "defaults, switching": Case((DEFAULTS,), switches=True),
    "32-true, resumed plain": Case((TRUE, PLAIN)),
    "plain, resumed in 32-true": Case((PLAIN, TRUE)),
    "defaults, resumed plain": Case((DEFAULTS, PLAIN)),
    "plain, resumed with defaults": Case((PLAIN, DEFAULTS)),
}


def differs(training: Training, name: str) -> list[str]:
    """In what a case of a training is not as plain."""
    case = CASES[name]
    legs = case.legs(training)
    as_plain = tuple((PLAIN, epochs) for _, epochs in legs)
    as_mixed = None if case.is_exact else mixed(training, as_plain)
    formats = [] if case.is_exact else [moved(training, as_plain, ROUNDED), *([as_mixed] if as_mixed else [])]
    actual, expected, noise = run(training, legs), plain(training, as_plain), [moved(training, as_plain, NUDGED[0])]
    found = differences(training, actual, expected, noise, formats, as_mixed)
    if found:
        # Where a last bit, or the order of formats, decides how far a training leads, one run of a kind is no measure.
        noise += [moved(training, as_plain, variant) for variant in NUDGED[1:]]
        in_turns = [mixed(training, as_plain, variant) for variant in IN_TURNS] if case.switches and as_mixed else []
        found = differences(training, actual, expected, noise, [*formats, *filter(None, in_turns)], as_mixed)
    return found
