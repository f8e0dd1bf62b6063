"""The trial of edits at the first call of their modules in a step, on what the user's own code calls them with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_accel.core.first_call import at_first_call
from lightning_accel.core.patch import Patch, PatchSet, applied
from lightning_accel.techniques.technique_context import SiteTrial, Verdict, Verdicts


@contextmanager
def tried_at_first_calls(trials: Mapping[str, SiteTrial]) -> Iterator[Verdicts]:
    """Entered around the forward pass of a step; yields the verdicts, which are complete once it is left."""

    def probe(site: str, trial: SiteTrial) -> Patch:
        def meet(args: Any, kwargs: Any) -> None:
            verdicts[site] = trial.judge(args, kwargs)

        return at_first_call(site, trial.module, meet, when=trial.when)

    verdicts: Verdicts = {site: Verdict("untried", trial.unseen) for site, trial in trials.items() if trial.unseen}
    with applied(PatchSet(probe(site, trial) for site, trial in trials.items())):
        yield verdicts
