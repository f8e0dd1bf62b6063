"""CUDA graphs of the repeated blocks: a replay launches the kernels of a whole pass at once, without Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import Self, override

from lightning_accel.core.blocks import find_blocks
from lightning_accel.core.compiled import is_inside_compiled
from lightning_accel.core.host import Host
from lightning_accel.core.patch import MethodPatch, Patch, PatchSet
from lightning_accel.core.trial import Trial, Variant
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.techniques.base import BuildContext, Refusal, Technique
from lightning_accel.techniques.cuda_capture import capture_on_cuda
from lightning_accel.techniques.first_calls import tried_at_first_calls
from lightning_accel.techniques.graphed_block import Capture, Forward, GraphedBlock, NotCapturedError
from lightning_accel.techniques.notes import Notes, Verdict, Verdicts
from lightning_accel.techniques.registry import register


class GraphPatch(MethodPatch):
    """Has a block's forward replay what was captured of it; the block's, not that of a copy."""

    def __init__(self, site: str, block: nn.Module, capture: Capture, notes: Notes) -> None:
        super().__init__(site, "forward → CUDA graph", block, "forward", self._graphed)
        self.block, self.graphed = block, GraphedBlock(block, capture)
        self._notes = notes

    def _graphed(self, original: Forward) -> Forward:
        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if block is self.block:
                try:
                    return self.graphed.call(lambda *a, **k: original(block, *a, **k), args, kwargs)
                except NotCapturedError as error:
                    self.graphed.pause(True)
                    self._notes.refuse(self.site, str(error))
            return original(block, *args, **kwargs)

        return forward

    @override
    def _undo(self) -> None:
        super()._undo()
        self.graphed.pause(True)


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

    trial_step: ClassVar[Literal[0, 1]] = 1
    remembers: ClassVar[bool] = False  # to capture is to find out
    why_not_sharded: ClassVar[str] = "parameters are gathered at other addresses in every step"

    def __init__(
        self, mode: Literal["on", "auto"] = "on", *, verify: bool = True, capture: Capture = capture_on_cuda
    ) -> None:
        self._mode, self._verify, self._capture = mode, verify, capture
        self._patches: list[GraphPatch] = []

    @classmethod
    @override
    def from_settings(cls, settings: Literal["auto", "on", "off"], context: BuildContext) -> Self:
        assert settings != "off"
        return cls(settings, verify=context.verify)

    @classmethod
    @override
    def check(cls, settings: Literal["auto", "on", "off"], all_settings: Mapping[str, Any], verify: bool) -> None:
        if all_settings["compile"] != "off":
            raise ValueError(
                f"compile.graphs={settings!r} with compile={all_settings['compile']!r}: a compiler has CUDA graphs"
                " of its own. Give compile='auto' or 'reduce-overhead' and compile.graphs='off', or compile='off'."
            )

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind == "cuda":
            return None
        return f"CUDA graphs are for NVIDIA GPUs, and this is {host.device_name}. Use compile.graphs='off'"

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterator[Patch | Refusal]:
        blocks = find_blocks(model)
        if not blocks:
            yield Refusal("", f"{type(model).__name__} has no repeated blocks")
        for site, block in blocks.items():
            if isinstance(block, torch.jit.ScriptModule) or is_inside_compiled(model, site):
                yield Refusal(site, "compiled by you: compile with mode='reduce-overhead' there")
                continue
            patch = GraphPatch(site, block, self._capture, self.notes)
            self._patches.append(patch)
            yield patch

    @override
    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        if not self._verify:
            return super().trial(patches)
        return tried_at_first_calls(
            [patch for patch in patches if isinstance(patch, GraphPatch)],
            lambda patch: patch.block,
            lambda patch, args, kwargs: _tried(patch.block, patch.graphed, args, kwargs),
            unseen="not called with gradients on the second step, so not tried",
            when=lambda patch: torch.is_grad_enabled(),
        )

    @override
    def arms(self) -> Iterator[Arm]:
        if self._mode == "auto" and any(patch.is_applied for patch in self._patches):
            # Off, the memory is given back, and on again the blocks are captured anew: the next step, and one more.
            yield Arm(self.name, ("on",), self._set_choice, settle=2)

    def _set_choice(self, choice: str) -> None:
        for patch in self._patches:
            patch.graphed.pause(choice == OFF or not patch.is_applied)

    @override
    def close(self) -> None:
        for patch in self._patches:
            patch.graphed.pause(True)
        self._patches = []


def _tried(block: nn.Module, graphed: GraphedBlock, args: Any, kwargs: dict[str, Any]) -> Verdict:
    try:
        graphed.capture(args, kwargs)
    except NotCapturedError as error:
        return Verdict("refused", str(error))
    trial = Trial(block, args, kwargs, samples=None, has_dropout=True)
    found = trial.numbers(Variant(block.forward), Variant(lambda *a, **k: graphed.replay(a, k)))
    if found.failure:
        graphed.pause(True)
        return Verdict(found.kind, found.failure, measured=found.measured())
    return Verdict("kept", f"deviates by {found.error:.1e}", measured=found.measured())
