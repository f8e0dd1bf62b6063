"""The number of threads that one operation may use on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from torch import nn
from typing_extensions import override

from lightning_accel.core.host import Host
from lightning_accel.core.options import Rule
from lightning_accel.core.patch import SwitchPatch
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site, Variant
from lightning_accel.techniques.technique_context import Forecast
from lightning_accel.techniques.technique_events import Event, Switched


def in_words(count: int) -> str:
    """What that number means."""
    return f"{count} {'thread' if count == 1 else 'threads'} an operation"


def _variant(count: int) -> Variant:
    switch = SwitchPatch(torch.get_num_threads, torch.set_num_threads, count)
    return Variant(str(count), switch.apply, switch.undo)


# Before a compiler, whose kernels are made for the threads that there are.
@register(
    "threads",
    options=Literal["auto", "off"] | Annotated[int, Rule("a number from 1 on", lambda name, value: value >= 1)],
    default="off",
    doc=(
        '``"off"`` leaves them as they are; a number from 1 on; or ``"auto"``: half as many, a quarter and so '
        "on are tried on the run's own steps, and the fastest stays. ``lightning-accel tune`` finds it before "
        "a run."
    ),
    before="compile",
    exactness="rounding",
)
class Threads(Technique):
    """Has torch use as many threads as it is told, while the run lasts. Sums may be rounded in another order."""

    traits = Traits(
        applied_before_trial=True,
        trial_step=None,
        remembers=False,
        not_on={"xla": "XLA computes with threads of its own, of which torch's setting says nothing"},
    )

    def __init__(self, settings: Literal["auto", "off"] | int, context: BuildContext) -> None:
        # Fewer than there are: all of them is what the run has without this.
        fewer = [torch.get_num_threads() >> halved for halved in range(1, torch.get_num_threads().bit_length())]
        self._counts = [settings] if isinstance(settings, int) else fewer
        if settings == "auto":
            self.run.live = Live(starts_off=True, asked_alone=True)
            self.run.forecast = Forecast(True, "tried", "fewer are tried")
        else:
            self.run.forecast = Forecast(True, "yes", in_words(self._counts[0]))

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterator[Site]:
        if not self._counts:
            yield Site("", why_not="torch uses one thread already: there are no fewer to try")
            return
        change = in_words(self._counts[0])
        if self.run.live is not None:
            change = f"{', '.join(map(str, self._counts))} on trial"
            self.run.status = f"all {torch.get_num_threads()} threads, until live trials find fewer to be faster"
        yield Site("", [_variant(count) for count in self._counts], change)

    @override
    def on(self, event: Event) -> None:
        if isinstance(event, Switched):
            self.run.status = in_words(torch.get_num_threads())
