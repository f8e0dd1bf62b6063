"""The trial of edits at the first call of their modules in a step, on what the user's own code calls them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_accel.core.patch import MethodPatch, PatchSet, applied
from lightning_accel.techniques.technique_context import SiteTrial, Verdict, Verdicts


@contextmanager
def tried_at_first_calls(trials: Mapping[str, SiteTrial]) -> Iterator[Verdicts]:
    """Entered around the forward pass of a step; yields the verdicts, which are complete once it is left."""
    verdicts: Verdicts = {site: Verdict("untried", trial.unseen) for site, trial in trials.items() if trial.unseen}
    with applied(PatchSet(_probe(site, trial, verdicts) for site, trial in trials.items())):
        yield verdicts


def _probe(site: str, trial: SiteTrial, verdicts: Verdicts) -> MethodPatch:
    """Intercepts one call of the module, not of its copies, then undoes itself. The trial leaves what runs after it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not trial.module or not patch.is_applied or not trial.when():
                return original(self, *args, **kwargs)
            patch.undo()
            verdicts[site] = trial.judge(args, kwargs)
            return self.forward(*args, **kwargs)

        return forward

    patch = MethodPatch(site, "trial", trial.module, "forward", wrap)
    return patch
