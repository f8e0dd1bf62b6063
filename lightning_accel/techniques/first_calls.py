"""The trial of edits at the first call of their modules in a step, on what the user's own code calls them with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from lightning_accel.core.first_call import at_first_call
from lightning_accel.core.patch import Patch, PatchSet, applied
from lightning_accel.techniques.notes import Verdict, Verdicts

P = TypeVar("P", bound=Patch)


@contextmanager
def tried_at_first_calls(
    patches: Iterable[P],
    module: Callable[[P], nn.Module],
    judge: Callable[[P, Any, Any], Verdict],
    *,
    unseen: str = "",
    when: Callable[[P], bool] = lambda patch: True,
) -> Iterator[Verdicts]:
    """Entered around the forward pass of a step; yields the verdicts, which are complete once it is left.

    An edit is tried by ``judge`` at the first call of its ``module`` for which ``when`` holds. One whose module is not
    called is refused as ``unseen``; where that is empty, it gets no verdict.
    """

    def probe(patch: P) -> Patch:
        def meet(args: Any, kwargs: Any) -> None:
            verdicts[patch.site] = judge(patch, args, kwargs)

        return at_first_call(patch.site, module(patch), meet, when=lambda: when(patch))

    patches = list(patches)
    verdicts: Verdicts = {patch.site: Verdict("untried", unseen) for patch in patches if unseen}
    with applied(PatchSet(map(probe, patches))):
        yield verdicts
