"""Compilation of blocks with ``torch.compile``, each by itself, after every other edit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from lightning_accel.core.blocks import repeated_blocks, units
from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.compiled import CompiledKind, compiled_anew, is_compiled, is_gathered_by_hooks
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch
from lightning_accel.techniques import kernel_cache
from lightning_accel.techniques.arms import ArmSetup, Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.compiled_blocks import (
    GRAPHS,
    SETTLE,
    CompilePatch,
    Prepare,
    ReplayedPatch,
    alike,
    tried,
)
from lightning_accel.techniques.cuda_capture import capture_on_cuda
from lightning_accel.techniques.graphed_block import Capture
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import SiteTrial, Verdict, Verdicts, tried_at_first_calls
from lightning_accel.techniques.technique_events import Decided, Event, Settled

CompileSetting = Literal[
    "off", "on", "auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]


FIRST_S = 10.0
"""What a kind of block is taken to cost before any was compiled: code generation, and a C++ or Triton compiler."""

_SHARDED = "sharded, which cannot be switched between steps: compile='on' compiles it"
_NOT_CALLED = "not called with gradients in the step that compiled"
_MOST_ANEW = 8  # times that a kind of block may be compiled anew, as torch has it


def _conflicts(settings: CompileSetting, all_settings: Mapping[str, Any], verify: bool) -> None:
    if settings == "auto" and not verify:
        raise ValueError(
            "compile='auto' keeps what a trial showed to be faster, and trust='unchecked' forbids trials:"
            " give compile='on' or 'off', or trust='checked'."
        )


@register("compile", options=CompileSetting, default="off", after="gradient_checkpointing", exactness="rounding")
class Compilation(Technique):
    """Compiles every repeated block; each is tried, forward and backward, on its first input after the other trials.

    Where no block is repeated, as in a multilayer perceptron, the modules of several layers are compiled.

    A block that fails to compile, or computes other numbers than the original, is given back, and so is one that is
    compiled anew again and again. A deterministic run, where clocks decide nothing, does not do ``"auto"`` at all. To
    ``prepare`` is to edit a captured graph, in place, before the compiler gets it.
    """

    traits = Traits(
        trial_step=1,
        trial_steps=150.0,  # nearly all of them the compiler's
        not_on={
            "xla": "XLA compiles every step itself, and TorchInductor builds no kernels for it. Use compile='off'",
            "mps": "TorchInductor's part for Apple GPUs calls itself an early prototype, and was not measured here. Use"
            " compile='off', or module.compile() on blocks of your choice",
        },
        conflicts=_conflicts,
    )

    def __init__(
        self, setting: CompileSetting, *, prepare: Prepare = lambda graph: None, eager: Mapping[str, str] | None = None
    ) -> None:
        self._prepare, self._eager = prepare, {} if eager is None else eager
        self._mode = "default" if setting in ("on", "auto") else str(setting)
        self._make_patch: Callable[..., CompilePatch] = CompilePatch
        self.patches: list[CompilePatch] = []
        self.kinds: dict[Hashable, CompiledKind] = {}
        self._first_graphs: dict[CompiledKind, int] = {}  # once its blocks were tried
        self._is_settled = False
        self._why_not_kept = ""
        self.run.at_end.callback(self._close)

    @classmethod
    @override
    def from_settings(cls, settings: CompileSetting, context: BuildContext) -> Compilation:
        # What is compiled is captured anew, past the places where attention is sent to its kernels.
        make = CompilationOnTrial if settings == "auto" else Compilation
        return make(settings, prepare=context.edit_captured, eager=context.eager)

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind in self.traits.not_on or host.compiler is not None:
            return super().unavailable(host)
        of_cpu = "a C++ compiler (Debian, Ubuntu: apt-get install g++)"
        needed = of_cpu if host.kind == "cpu" else "Triton and a C compiler"
        return f"nothing to build kernels with on {host.device_name}: install {needed}"

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterator[Patch]:
        # Not a LightningModule with a forward of its own: strategies put training_step in its place.
        own = {site: unit for site, unit in units(model).items() if not hasattr(unit, "training_step")}
        blocks = repeated_blocks(model) or own
        if not blocks:
            why_not = (
                f"{type(model).__name__} has no module of several layers, and whole training steps are not compiled"
            )
            yield Site("", why_not=why_not)
        for site, block in blocks.items():
            inner = next((one for one in self._eager if one.startswith(f"{site}." if site else "")), None)
            if inner is not None:
                yield Site(site, why_not=f"holds {inner}, {self._eager[inner]}")
            elif isinstance(block, torch.jit.ScriptModule) or any(is_compiled(part) for part in block.modules()):
                yield Site(site, why_not="already compiled")
            else:
                patch = self._make_patch(site, block, self._mode, self._prepare, kind_of=self.kind_of)
                self.patches.append(patch)
                self.run.trials[site] = SiteTrial(
                    block,
                    partial(self._judge, patch),
                    unseen="not called with gradients on the second step, so not tried",
                )
                yield patch
        # After a graph break the compiler begins anew in the block's own code, which blocks of a class share, and with
        # it one allowance of compiled versions. Past it torch runs a block eagerly and only logs it.
        self.run.at_end.enter_context(compiled_anew(8 + 4 * len(blocks)))
        if self.patches:
            self._why_not_kept = self.run.at_end.enter_context(kernel_cache.kept())

    def _judge(self, patch: CompilePatch, args: Any, kwargs: dict[str, Any]) -> Verdict:
        patch.kind = self.kind_of(patch, args, kwargs)
        return tried(patch, args, kwargs)

    def kind_of(self, patch: CompilePatch, args: Any, kwargs: dict[str, Any]) -> CompiledKind:
        """What a block shares with those that are like it, called so."""
        may_share = patch.may_share and not is_gathered_by_hooks(patch.block)
        key = alike(patch.block, args, kwargs) if may_share else patch.site
        return self.kinds.setdefault(key, CompiledKind(self._count))

    @override
    def on(self, event: Event) -> None:
        if isinstance(event, Settled) and not self._is_settled:
            self._is_settled = True
            self._first_graphs = {kind: kind.graphs for kind in self._compiled_kinds()}
            self._tell()

    def _compiled_kinds(self) -> set[CompiledKind]:
        return {patch.kind for patch in self.patches if patch.kind is not None and patch.kind.graphs}

    def _count(self, kind: CompiledKind) -> None:
        """Says what was compiled, and gives blocks back that are compiled anew again and again."""
        self._tell()
        first = self._first_graphs.get(kind, 0)  # none where an earlier run has tried the blocks
        anew = kind.graphs - first
        if self._is_settled and anew > _MOST_ANEW * (first or _MOST_ANEW):
            for patch in self.patches:
                if patch.kind is kind and patch.is_applied:
                    self.run.refuse(
                        patch.site,
                        f"given back: {anew} graphs were compiled anew, in {kind.seconds:.1f} s with the first: what it"
                        " is called with keeps changing (shapes, layouts, Python numbers). Pad batches to a few sizes",
                    )

    def _tell(self) -> None:
        kinds = self._compiled_kinds()
        graphs = sum(kind.graphs for kind in kinds)
        anew = sum(kind.graphs - self._first_graphs.get(kind, 1) for kind in kinds) if self._is_settled else 0
        seconds = sum(kind.seconds for kind in kinds)
        self.run.details = (
            f"{graphs} {'graph' if graphs == 1 else 'graphs'} compiled, {anew} of them anew, in {seconds:.1f} s without"
            " their backward passes"
        )
        if self._why_not_kept:
            self.run.details += f"\na later run may have to compile again: {self._why_not_kept}"

    def _close(self) -> None:
        for patch in self.patches:
            if patch.kind is not None:
                patch.kind.forget()
        self.patches, self.kinds = [], {}


class CompileSetup(ArmSetup):
    """Compiles blocks in mid-run, at a pause between two counted steps, as far as the run can afford it.

    Not in a thread beside the training: TorchDynamo saves the random streams of the process when it begins to capture,
    and puts them back when it is done, so that whatever the training has drawn meanwhile is drawn again. It also takes
    the interpreter's lock for nearly all of the time.
    """

    def __init__(self, technique: Compilation) -> None:
        super().__init__(technique.run)
        self.known: Verdicts = {}  # what an earlier run's trial has found, or this one's
        self.is_over = False  # whether what can be compiled is
        self.has_graphs = True  # whether there may be, or are, compiled blocks that CUDA graphs replay
        self._technique = technique
        self._trial = ExitStack()
        self._found: Verdicts = {}
        self._may_take_s = self._taken_s = self._longest_s = 0.0

    @property
    def possible(self) -> list[CompilePatch]:
        """Those that nothing is known against."""
        return [patch for patch in self._technique.patches if self.known.get(patch.site, Verdict("kept")).keep]

    @override
    def expected_s(self) -> float:
        return FIRST_S * len({alike(patch.block, (), {}) for patch in self.possible})

    @override
    def begin(self, may_take_s: float) -> None:
        self._may_take_s, self._taken_s, self._longest_s = may_take_s, 0.0, 0.0
        for patch in self.possible:
            patch.undo()  # applied where an earlier run has tried it; the compiler must not meet the probes
        trials = {
            patch.site: SiteTrial(patch.block, partial(self._tried, patch), torch.is_grad_enabled, _NOT_CALLED)
            for patch in self.possible
        }
        self._found = self._trial.enter_context(tried_at_first_calls(trials))
        self._run.at_end.callback(self._trial.close)

    @override
    def end(self) -> float | None:
        self._trial.close()
        self.is_over = True
        # Rank 0's hold: what it keeps, and another rank could not compile, runs eagerly there.
        agree = self._run.agree or (lambda value: value)
        decided = agree(self._found)
        replayed = [patch for patch in self.possible if isinstance(patch, ReplayedPatch)]
        if replayed:
            self.has_graphs = agree(not all(patch.why_not_replayed for patch in replayed))
        for patch in self.possible:
            found, of_rank_0 = self._found[patch.site], decided[patch.site]
            self._conclude(patch, found if of_rank_0.keep else of_rank_0)
        if not any(verdict.keep for verdict in decided.values()):
            self._run.status = ""
            return None
        blocks, kinds = sum(patch.is_applied for patch in self._technique.patches), len(self._technique.kinds)
        self._run.status = (
            f"{blocks} {'block' if blocks == 1 else 'blocks'} of {kinds} {'kind' if kinds == 1 else 'kinds'},"
            f" compiled and tried in {self._taken_s:.1f} s"
        )
        return self._taken_s

    def _conclude(self, patch: CompilePatch, verdict: Verdict) -> None:
        self.known[patch.site] = verdict
        if verdict.keep:
            patch.apply()
            in_force = patch.remark if isinstance(patch, ReplayedPatch) else patch.change
            self._run.revise(patch.site, replace(verdict, reason=verdict.reason or in_force))
        else:
            self._run.refuse(patch.site, verdict.reason, verdict.measured, verdict.kind)

    def _tried(self, patch: CompilePatch, args: Any, kwargs: dict[str, Any]) -> Verdict:
        if is_gathered_by_hooks(patch.block):
            return Verdict("refused", _SHARDED)
        key = alike(patch.block, args, kwargs) if patch.may_share else patch.site
        if key not in self._technique.kinds and self._taken_s + self._longest_s > self._may_take_s:
            return Verdict(
                "refused",
                f"not compiled: those before it took {self._taken_s:.1f} s, and trials may cost this run"
                f" {self._may_take_s:.1f} s",
            )
        patch.kind = self._technique.kind_of(patch, args, kwargs)
        stopwatch = Stopwatch()
        known = self.known.get(patch.site)
        verdict = tried(patch, args, kwargs, for_numbers=known is None)
        if known is not None:
            verdict = replace(verdict, measured=known.measured)
        if verdict.keep and isinstance(patch, ReplayedPatch):
            patch.try_replay(args, kwargs)
        took_s = stopwatch.seconds()
        self._taken_s, self._longest_s = self._taken_s + took_s, max(self._longest_s, took_s)
        return verdict


class CompilationOnTrial(Compilation):
    """Compiles where live trials find that the run's own steps are faster for it, and the run can afford to try.

    No step compiles before they ask: then the blocks are compiled and tried in one that is not counted. On a GPU of
    NVIDIA's, they are asked twice: whether to compile, and whether CUDA graphs are to replay what was compiled.
    """

    traits = replace(Compilation.traits, trial_step=None)

    def __init__(self, setting: CompileSetting, *, capture: Capture = capture_on_cuda, **others: Any) -> None:
        super().__init__(setting, **others)
        self._capture = capture
        self._setup = setup = CompileSetup(self)
        self.run.live = Live(
            settle_of={GRAPHS: SETTLE}, has=lambda variant: variant != GRAPHS or setup.has_graphs, setup=setup
        )

    @override
    def unavailable(self, host: Host) -> str | None:
        if torch.are_deterministic_algorithms_enabled():
            return "compile='auto' decides by time, which a deterministic run must not; set compile='on' to compile"
        return super().unavailable(host)

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterator[Patch]:
        if host.kind == "cuda":
            self._make_patch = partial(ReplayedPatch, capture=self._capture, run=self.run)
        for claim in super().sites(model, host):
            if isinstance(claim, CompilePatch):
                claim.is_wanted = False
            yield claim
        if self.patches:
            self.run.status = "waits for live trials, which ask for it after all else"

    @override
    def on(self, event: Event) -> None:
        if isinstance(event, Decided):
            self._setup.known = dict(event.verdicts)
        elif self._setup.is_over:
            super().on(event)
