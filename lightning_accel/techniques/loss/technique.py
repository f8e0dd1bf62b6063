"""The technique: heads leave their logits out where a cross-entropy is all that is asked of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from lightning_accel.core.blocks import repeated_blocks, units
from lightning_accel.core.compiled import is_inside_compiled
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch
from lightning_accel.core.vocabulary import why_unlucky
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.loss.heads import SMALLEST_BYTES, Head
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import PausedPatch, Site
from lightning_accel.techniques.technique_context import Forecast

FEWEST_CLASSES = 4096
"""Of a layer that is taken for a head: of fewer the logits are no large part of a step's memory."""


@register(
    "loss",
    options=Literal["auto", "on", "off"],
    default="auto",
    doc=(
        '``"auto"`` computes the loss of large vocabularies in pieces, without the logits, where they are '
        'asked for nothing else and that is not slower; ``"on"`` even where it is slower; ``"off"``.'
    ),
    after="inplace_activations",
    before="compile",
    exactness="rounding",
)
class Loss(Technique):
    """Has linear heads return logits that are not there, until somebody reads them or takes their cross-entropy.

    A loss is tried, on a few rows, at the first of each form. A head whose logits are read in two steps running, or are
    held after a step, goes back to what it was, with the reason. Ranks need not agree: gradients are autograd's.
    """

    traits = Traits(
        applied_before_trial=True,
        trial_step=None,
        remembers=False,
        trial_steps=0.5,
        not_on={
            kind: f"the loss in pieces is made for CPUs and for NVIDIA and AMD GPUs, and not tried on {kind}"
            for kind in ("xla", "mps")
        },
        why_not_sharded="a head's weight is whole only while the head is called, before its loss is computed",
    )

    def __init__(self, settings: Literal["auto", "on", "off"], context: BuildContext) -> None:
        self._always = settings == "on"
        self._eager = context.eager
        self._compiles = context.settings.get("compile", "off") not in ("off", "auto")
        self.heads: dict[str, Head] = {}
        self.run.live = None if self._always else Live(saves_memory=True)
        words = f"in pieces for {FEWEST_CLASSES:,} classes or more, where nobody reads the logits"
        self.run.forecast = Forecast(True, "tried", words)

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        wide = {site: module for site, module in model.named_modules() if isinstance(module, nn.Linear)}
        wide = {site: module for site, module in wide.items() if module.out_features >= FEWEST_CLASSES}
        blocks = repeated_blocks(model) if wide else ()
        # Within a block it is a layer among others, whose output the next one reads.
        heads = {site: head for site, head in wide.items() if not any(site.startswith(f"{block}.") for block in blocks)}
        advice = {site: why_unlucky(head.out_features, host) for site, head in heads.items()}
        self.run.details = "\n".join(f"{site} has {why}" for site, why in advice.items() if why)
        # What is asked for by name comes first; of two that are on trial, the loss.
        compiled = units(model) if heads and self._compiles and not self._always else ()
        for site, module in heads.items():
            reason = _unfit(model, site, module)
            if any(site.startswith(f"{unit}." if unit else "") for unit in compiled):
                reason = "inside a module that is compiled by name: loss='on' leaves that module uncompiled"
            if reason is not None:
                yield Site(site, why_not=reason)
                continue
            head = Head(site, module, always=self._always, smallest=SMALLEST_BYTES, run=self.run)
            self.heads[site] = head
            self._eager[site] = "whose loss may be computed in pieces, which a compiler would undo"
            change = "its cross-entropy is computed in pieces, without the logits"
            yield PausedPatch(site, change, module, head)

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        if stage == "predict":  # in which nobody asks for a loss
            return nullcontext()
        heads = [head for head in self.heads.values() if "forward" in vars(head.module) and not head.is_paused]
        return _step(heads, stage) if heads else nullcontext()


@contextmanager
def _step(heads: list[Head], stage: str) -> Iterator[None]:
    """Around a step: what heads leave out is computed before a weight changes, for whoever still holds it."""

    def before_weights_change(*_: Any) -> None:
        for head in heads:
            head.before_weights_change()

    for head in heads:
        head.begin(stage)
    hook = register_optimizer_step_pre_hook(before_weights_change)
    is_whole = False
    try:
        yield
        is_whole = True
    finally:
        hook.remove()
        for head in heads:
            head.end(is_whole=is_whole)


def _unfit(model: nn.Module, site: str, module: nn.Linear) -> str | None:
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}, which may compute otherwise than nn.Linear"
    if "forward" in vars(module):
        return "its forward is not the one of its class"
    if is_inside_compiled(model, site):
        return "inside a compiled module"
    return None
