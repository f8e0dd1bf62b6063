"""Blocks that are compiled in mid-run, at a pause between two counted steps, as far as the run can afford it.

Not in a thread beside the training: TorchDynamo saves the random streams of the process when it begins to capture, and
puts them back when it is done, so that whatever the training has drawn meanwhile is drawn again. It also takes the
interpreter's lock for nearly all of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.compiled import CompiledKind, is_gathered_by_hooks
from lightning_accel.techniques.arms import ArmSetup
from lightning_accel.techniques.compiled_blocks import CompilePatch, alike, tried
from lightning_accel.techniques.compiled_graphs import ReplayedPatch
from lightning_accel.techniques.technique_context import (
    SiteTrial,
    TechniqueContext,
    Verdict,
    Verdicts,
    tried_at_first_calls,
)

FIRST_S = 10.0
"""What a kind of block is taken to cost before any was compiled: code generation, and a C++ or Triton compiler."""

_SHARDED = "sharded, which cannot be switched between steps: compile='on' compiles it"
_NOT_CALLED = "not called with gradients in the step that compiled"


class CompileSetup(ArmSetup):
    """The setup of the arm. Whenever a graph was compiled, ``told`` is called with its kind."""

    def __init__(
        self,
        run: TechniqueContext,
        patches: list[CompilePatch],  # of the blocks that may be compiled
        kinds: dict[Hashable, CompiledKind],
        told: Callable[[CompiledKind], None],
    ) -> None:
        super().__init__(run)
        self.known: Verdicts = {}  # what an earlier run's trial has found, or this one's
        self.is_over = False  # whether what can be compiled is
        self.has_graphs = True  # whether there may be, or are, compiled blocks that CUDA graphs replay
        self._patches, self._kinds, self._told = patches, kinds, told
        self._trial = ExitStack()
        self._found: Verdicts = {}
        self._may_take_s = self._taken_s = self._longest_s = 0.0

    @property
    def possible(self) -> list[CompilePatch]:
        """Those that nothing is known against."""
        return [patch for patch in self._patches if self.known.get(patch.site, Verdict("kept")).keep]

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
        decided = self._found if self._run.agree is None else self._run.agree(self._found)
        replayed = [patch for patch in self.possible if isinstance(patch, ReplayedPatch)]
        if replayed:
            has_graphs = not all(patch.why_not_replayed for patch in replayed)
            self.has_graphs = has_graphs if self._run.agree is None else self._run.agree(has_graphs)
        for patch in self.possible:
            found, of_rank_0 = self._found[patch.site], decided[patch.site]
            self._conclude(patch, found if of_rank_0.keep else of_rank_0)
        if not any(verdict.keep for verdict in decided.values()):
            self._run.status = ""
            return None
        compiled = sum(patch.is_applied for patch in self._patches)
        self._run.status = (
            f"{compiled} {'block' if compiled == 1 else 'blocks'} of {len(self._kinds)}"
            f" {'kind' if len(self._kinds) == 1 else 'kinds'}, compiled and tried in {self._taken_s:.1f} s"
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
        if key not in self._kinds:
            if self._taken_s + self._longest_s > self._may_take_s:
                return Verdict(
                    "refused",
                    f"not compiled: those before it took {self._taken_s:.1f} s, and trials may cost this run"
                    f" {self._may_take_s:.1f} s",
                )
            self._kinds[key] = CompiledKind(self._told)
        patch.kind = self._kinds[key]
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
