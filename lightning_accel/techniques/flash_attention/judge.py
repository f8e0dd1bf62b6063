"""Judges the calls of a model's sites: what is tried, by the clock or not, and what a site that is alike has shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_accel.core.trial import TIMED_S, one_line
from lightning_accel.techniques.flash_attention.rehearsal import ORIGINAL, Judgement, Rehearsal, WatchedBackend
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward

_LATER_TIMED_S = 0.25  # for a class of shapes that turns up in mid-run


@dataclass
class Judge:
    """What the sites of one model share."""

    backends: dict[str, WatchedBackend]  # in order of preference
    verify: bool  # or the first is taken untried
    may_time: bool  # whether the clock decides between them
    untimed: tuple[str, ...] = ()  # names of sites at which it never does
    is_trial_step: bool = False  # in which sites are tried for the first time
    _timed: dict[tuple[Any, ...], Judgement] = field(default_factory=dict)

    def goes_by_clock(self, site: AttentionSite) -> bool:
        """Whether a backend has to be faster than the original at this site."""
        if not self.may_time or site.is_named(self.untimed):
            return False
        # A deterministic run decides nothing by the clock; nor, in mid-run, does one rank of several.
        is_alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        return not torch.are_deterministic_algorithms_enabled() and (is_alone or self.is_trial_step)

    def judge(
        self, site: AttentionSite, shapes: str, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Judgement, Any]:
        """Computes a call of a class of shapes and tries backends on it. Of sites that are alike the first is timed."""
        by_clock = self.goes_by_clock(site)
        alike = (type(site.module), shapes, *(tuple(parameter.shape) for parameter in site.module.parameters()))
        timed = self._timed.get(alike) if by_clock else None
        backends = list(self.backends.values())
        if timed is not None:
            backends = [self.backends.get(timed.choice, backends[0])]
        timed_s = TIMED_S if self.is_trial_step else _LATER_TIMED_S
        rehearsal = Rehearsal(backends, by_clock=by_clock and timed is None, timed_s=timed_s)
        try:
            outputs = site.rehearsed(rehearsal, original, args, kwargs)
        except Exception as error:
            if is_checkpoint_signal(error):
                raise
            # An error of the user's own code comes out of the original, as it always did.
            outputs = original(site.module, *args, **kwargs)
            return Judgement(ORIGINAL, f"failed in its trial: {one_line(error)}", is_wrong=True), outputs
        found = rehearsal.judgement(site.nothing_found())
        if timed is not None:
            return (found if found.choice == ORIGINAL else timed), outputs
        if by_clock and not found.is_wrong:
            self._timed[alike] = found
        return found, outputs


def is_checkpoint_signal(error: Exception) -> bool:
    """Whether gradient checkpointing ends a recomputation by this exception."""
    return type(error).__module__ == "torch.utils.checkpoint"
