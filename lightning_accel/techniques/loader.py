"""Workers of the training's loader, chosen by how long the training waits for it."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import override

from lightning_accel.data.tuned_loader import LoaderTuning, TunedLoader, why_left
from lightning_accel.techniques.base import BuildContext, LoaderTerms, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.technique_context import Forecast, Verdict

_SITE = "train_dataloader"
_ONE_EPOCH = (
    "it is changed between two epochs, and this run has one; `lightning-accel tune` finds its workers before a run"
)


# Off by default: data may hang on what no look from outside shows (globals, a C library's handles), and workers that
# are forked from a process with locks held can only be given up.
@register("loader", options=Literal["auto", "off"], default="off", after="preprocess", exactness="exact")
class Loader(Technique):
    """Puts a :class:`~lightning_accel.data.tuned_loader.TunedLoader` in the place of the training's loader."""

    traits = Traits(trial_step=None, remembers=False, alters_steps=False)

    def __init__(self, settings: Literal["auto", "off"], context: BuildContext) -> None:
        self.run.watches_on = True
        self.run.forecast = Forecast(
            True, "tried", "more workers are tried, an epoch each, where the first has waited for data"
        )
        self._device = context.device
        self.run.status = "no loader of a Trainer to change; in a loop of your own, set num_workers where it is made"

    @override
    def loader(self, loader: Any, terms: LoaderTerms) -> Any:
        if why := (_ONE_EPOCH if terms.has_one_epoch else terms.why_not) or why_left(loader):
            self._tell(f"left: {why}", False)
            return loader
        self.run.status = "waiting for data is measured in the first epoch"
        tuning = LoaderTuning(
            loader,
            self._device,
            self._tell,
            objection=terms.objection,
            processes=terms.processes,
            pins=terms.pins and self._device.type == "cuda",
        )
        tuned = TunedLoader(tuning)
        self.run.at_end.callback(tuned.close)
        return tuned

    def _tell(self, line: str, is_changed: bool) -> None:
        self.run.status = line
        self.run.revise(_SITE, Verdict("kept" if is_changed else "refused", line))
