"""The technique: activations and dropouts overwrite their input at every call where nobody else can read it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from torch import nn
from typing_extensions import Self, override

from lightning_accel.core.compiled import is_inside_compiled
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.inplace_activations.kinds import kind_of, unfit
from lightning_accel.techniques.inplace_activations.ownership import SMALLEST, Activation
from lightning_accel.techniques.inplace_activations.refcount_calibration import calibration
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import PausedPatch, Site
from lightning_accel.techniques.technique_events import Added, Event


@register(
    "inplace_activations",
    options=Literal["auto", "off"],
    default="auto",
    doc=(
        '``"auto"`` lets activation and dropout modules overwrite their input at every call where nobody else '
        'can read it, as counts of who holds it show; ``"off"``.'
    ),
    after="flash_attention",
    exactness="exact",
)
class InplaceActivations(Technique):
    """Lets activation and dropout modules overwrite their input where nobody else can ever read it.

    Who holds the input is counted at every call (see ``ownership.py``). A site that cannot work in place at any of its
    first calls goes back to what it was, with the reason. Sites below the
    prefixes that ``skip`` gives, each with why, are left alone.
    """

    traits = Traits(
        applied_before_trial=True,
        trial_step=None,
        trial_steps=0.2,  # to calibrate, once for a process
        remembers=False,
        not_on={
            "xla": "XLA turns what is done in place into new values and plans memory itself: there is nothing to gain"
        },
    )

    def __init__(self, *, skip: Callable[[], Mapping[str, str]] = dict, smallest: int = SMALLEST) -> None:
        self._skip = skip
        self._smallest = smallest
        self.activations: dict[str, Activation] = {}
        self.run.live = Live(saves_memory=True, loses_little=True)

    @classmethod
    @override
    def from_settings(cls, settings: Literal["auto", "off"], context: BuildContext) -> Self:
        return cls(skip=context.protected)

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        names: dict[nn.Module, set[str]] = defaultdict(set)
        for site, module in model.named_modules(remove_duplicate=False):
            names[module].add(site.rpartition(".")[2])
        skip = self._skip()
        for site, module in model.named_modules():
            kind = kind_of(module)
            if kind is None:
                continue
            counts = calibration(anew=not self.activations)
            reason = _skipped(site, skip) or unfit(module, host) or (counts if isinstance(counts, str) else None)
            if reason is None and is_inside_compiled(model, site):
                reason = "inside a compiled module: the compiler plans memory itself"
            if reason is not None:
                yield Site(site, why_not=reason)
                continue
            step_aside = functools.partial(self.run.refuse, site)
            owner = Activation(kind, frozenset(names[module]), calibration, self._smallest, step_aside)
            self.activations[site] = owner
            change = "overwrites its input where nobody else can read it"
            change += f", without gradients only ({kind.not_in_training})" if kind.not_in_training else ""
            yield PausedPatch(site, change, module, owner)

    @override
    def on(self, event: Event) -> None:
        protected = event.protects if isinstance(event, Added) else {}
        for site in self.activations:
            if (why := _skipped(site, protected)) is not None:
                self.run.refuse(site, why)


def _skipped(site: str, skip: Mapping[str, str]) -> str | None:
    return next((why for prefix, why in skip.items() if not prefix or f"{site}.".startswith(f"{prefix}.")), None)
