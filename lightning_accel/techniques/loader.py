"""Workers of the training's loader, chosen by how long the training waits for it."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Literal

from typing_extensions import Self, override

from lightning_accel.core.host import Host
from lightning_accel.data.tuned_loader import TunedLoader, why_left
from lightning_accel.techniques.base import BuildContext, Forecast, LoaderTerms, Technique
from lightning_accel.techniques.notes import Verdict
from lightning_accel.techniques.registry import register

_SITE = "train_dataloader"
_ONE_EPOCH = (
    "it is changed between two epochs, and this run has one; `lightning-accel tune` finds its workers before a run"
)


# Off by default: data may hang on what no look from outside shows (globals, a C library's handles), and workers that
# are forked from a process with locks held can only be given up.
@register(
    "loader",
    options=Literal["auto", "off"],
    default="off",
    after="preprocess",
    exactness="exact",
)
class Loader(Technique):
    """Puts a :class:`~lightning_accel.data.tuned_loader.TunedLoader` in the place of the training's loader."""

    trial_step: ClassVar[None] = None
    remembers = False
    watches_on = True

    def __init__(self, context: BuildContext) -> None:
        self._device = context.device
        self._loaders: weakref.WeakSet[TunedLoader] = weakref.WeakSet()
        self.notes.status = "no loader of a Trainer to change; in a loop of your own, set num_workers where it is made"

    @classmethod
    @override
    def from_settings(cls, settings: Literal["auto", "off"], context: BuildContext) -> Self:
        return cls(context)

    @override
    def loader(self, loader: Any, terms: LoaderTerms) -> Any:
        if why := (_ONE_EPOCH if terms.has_one_epoch else terms.why_not) or why_left(loader):
            self._tell(f"left: {why}", False)
            return loader
        self.notes.status = "waiting for data is measured in the first epoch"
        tuned = TunedLoader(
            loader,
            self._device,
            self._tell,
            objection=terms.objection,
            processes=terms.processes,
            pins=terms.pins and self._device.type == "cuda",
        )
        self._loaders.add(tuned)
        return tuned

    @override
    def close(self) -> None:
        for tuned in self._loaders:
            tuned.close()

    @override
    def forecast(self, host: Host) -> Forecast:
        return Forecast(True, "tried", "more workers are tried, an epoch each, where the first has waited for data")

    def _tell(self, line: str, is_changed: bool) -> None:
        self.notes.status = line
        self.notes.revise(_SITE, Verdict("kept" if is_changed else "refused", line))
