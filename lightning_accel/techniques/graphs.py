"""CUDA graphs of the repeated blocks: a replay launches the kernels of a whole pass at once, without Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from lightning_accel.core.blocks import find_blocks
from lightning_accel.core.compiled import is_inside_compiled
from lightning_accel.core.host import Host
from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.techniques.arms import OFF, Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.cuda_capture import capture_on_cuda
from lightning_accel.techniques.graphed_block import Capture, Forward, GraphedBlock
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import SiteTrial, TechniqueContext, Verdict


class GraphPatch(MethodPatch):
    """Has a block's forward replay what was captured of it; the block's, not that of a copy."""

    settle = 2  # off, the memory is given back, and on again the blocks are captured anew: the next step, and one more

    def __init__(self, site: str, block: nn.Module, capture: Capture, run: TechniqueContext) -> None:
        super().__init__(site, "forward → CUDA graph", block, "forward", self._graphed)
        self.block = block
        self.graphed = GraphedBlock(block, capture, partial(run.refuse, site))

    def _graphed(self, original: Forward) -> Forward:
        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if block is not self.block:
                return original(block, *args, **kwargs)
            return self.graphed.call(partial(original, block), args, kwargs)

        return forward

    @override
    def switch(self, variant: str) -> None:
        self.graphed.pause(variant == OFF or not self.is_applied)

    @override
    def _undo(self) -> None:
        super()._undo()
        self.graphed.pause(True)


def _conflicts(settings: Literal["auto", "on", "off"], all_settings: Mapping[str, Any], verify: bool) -> None:
    if all_settings["compile"] != "off":
        raise ValueError(
            f"compile.graphs={settings!r} with compile={all_settings['compile']!r}: a compiler has CUDA graphs"
            " of its own. Give compile='auto' or 'reduce-overhead' and compile.graphs='off', or compile='off'."
        )


@register(
    "graphs",
    options=Literal["auto", "on", "off"],
    default="off",
    after="gradient_checkpointing",
    before="compile",
    exactness="rounding",
)
class Graphs(Technique):
    """Captures every repeated block at its first call after the other trials, and replays it ever after."""

    traits = Traits(
        trial_step=1,
        remembers=False,  # to capture is to find out
        why_not_sharded="parameters are gathered at other addresses in every step",
        conflicts=_conflicts,
    )

    def __init__(
        self,
        mode: Literal["on", "auto"] = "on",
        context: BuildContext | None = None,
        *,
        capture: Capture = capture_on_cuda,
    ) -> None:
        self._capture = capture
        self.run.live = Live() if mode == "auto" else None

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind == "cuda":
            return None
        return f"CUDA graphs are for NVIDIA GPUs, and this is {host.device_name}. Use compile.graphs='off'"

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterator[Patch]:
        blocks = find_blocks(model)
        if not blocks:
            yield Site("", why_not=f"{type(model).__name__} has no repeated blocks")
        for site, block in blocks.items():
            if isinstance(block, torch.jit.ScriptModule) or is_inside_compiled(model, site):
                yield Site(site, why_not="compiled by you: compile with mode='reduce-overhead' there")
                continue
            patch = GraphPatch(site, block, self._capture, self.run)
            self.run.at_end.callback(patch.graphed.pause, True)
            self.run.trials[site] = SiteTrial(
                block,
                partial(_tried, block, patch.graphed),
                when=torch.is_grad_enabled,
                unseen="not called with gradients on the second step, so not tried",
            )
            yield patch


def _tried(block: nn.Module, graphed: GraphedBlock, args: Any, kwargs: dict[str, Any]) -> Verdict:
    found = graphed.tried(block.forward, args, kwargs)
    measured = None if found.spread is None else found.measured()
    return Verdict(found.kind, found.failure or f"deviates by {found.error:.1e}", measured=measured)
