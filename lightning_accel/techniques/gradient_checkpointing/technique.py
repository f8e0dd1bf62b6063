"""Gradient checkpointing: blocks forget their activations and compute them again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from typing_extensions import Self, override

from lightning_accel.core.blocks import find_blocks, units
from lightning_accel.core.compiled import is_inside_compiled
from lightning_accel.core.dropout import DROPOUTS
from lightning_accel.core.host import Host
from lightning_accel.core.measured import Measurement
from lightning_accel.core.options import Options
from lightning_accel.core.patch import MethodPatch, Patch, PatchSet
from lightning_accel.core.tree import changeable_argument
from lightning_accel.experiment.trial import Trial
from lightning_accel.experiment.trial_runs import ORACLE_SAMPLES, TrialSide
from lightning_accel.memory.costs import kept_bytes, kind_of
from lightning_accel.memory.recompute import NORMS, Recomputation, keeps_statistics, recomputed, trained_patch
from lightning_accel.techniques.base import BuildContext, OomFallback, Technique, Traits
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import SiteTrial, Verdict, Verdicts, tried_at_first_calls
from lightning_accel.techniques.technique_events import Added, Event

CheckpointingMode = Literal["off", "full", "selective"]


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckpointingOptions(Options, owner="memory.checkpoint"):
    """What ``MemoryOptions(checkpoint=, blocks=)`` comes to."""

    mode: CheckpointingMode = "off"
    blocks: tuple[str, ...] = ()


def _oom_fallbacks(settings: CheckpointingOptions, context: BuildContext) -> Iterator[OomFallback]:
    model = context.model
    if context.settings["memory_budget"].budget != "off":
        return  # whose plan has it already
    is_compiled = context.settings["compile"] != "off"
    only_anew = "the blocks are compiled as they are" if is_compiled else ""
    # By the formula of docs/planning.md for a decoder's block: of 64 bytes a value that it keeps in float32, 44 are
    # left, or 4 and one block's work.
    blocks = find_blocks(model, settings.blocks)
    if settings.mode == "off" and (settings.blocks or units(model)):
        yield OomFallback(CheckpointingOptions(mode="selective", blocks=settings.blocks), 0.12, 0.7, only_anew)
    if settings.mode != "full" and blocks:
        keeps = min(1.0, 4 / 64 + 1 / len(blocks))
        yield OomFallback(CheckpointingOptions(mode="full", blocks=settings.blocks), 0.33, keeps, only_anew)


@register("gradient_checkpointing", options=CheckpointingOptions, after="activation_offloading", exactness="exact")
class GradientCheckpointing(Technique):
    """Checkpoints the repeated blocks of a model, or those that are named.

    Every block is tried on its first real input: its outputs and gradients must be those of the original, and it
    must leave nothing behind that a second run of its forward would leave twice.
    """

    traits = Traits(
        applied_before_trial=True,
        trial_steps=4.0,
        not_on={
            # https://github.com/pytorch/xla/issues/3455
            "xla": "XLA finds that a block is computed twice and computes it once: nothing would be saved. Wrap blocks"
            " in torch_xla.utils.checkpoint.checkpoint, which keeps the two apart"
        },
        oom_fallbacks=_oom_fallbacks,
    )

    def __init__(self, mode: Recomputation, names: Sequence[str] = ()) -> None:
        self._mode = mode
        self._asked: tuple[str, Any] = "checkpoint", mode  # the switch and its value, as errors say them
        self._names = names
        self._blocks: dict[str, nn.Module] = {}
        self._untried: list[str] = []  # sites that nothing has called yet
        self._kept: dict[Hashable, tuple[int, int]] = {}  # by kind of call
        self._is_late = False  # where there was no memory for the step itself, there is little for a trial

    @classmethod
    @override
    def from_settings(cls, settings: Any, context: BuildContext) -> Self:
        one = cls(settings.mode, settings.blocks)
        why = "inside a checkpointed block, whose activations do not last anyway"
        one.run.protects = dict.fromkeys(one._find_blocks(context.model), why)
        return one

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        self._blocks = self._find_blocks(model)
        if not self._blocks:
            switch, value = self._asked
            raise ValueError(
                f"memory.{switch}={value!r}: {type(model).__name__} has no repeated blocks to checkpoint. Name some:"
                f" memory=MemoryOptions({switch}={value!r}, blocks=['MyBlock', 'encoder.mid'])."
            )
        for site, block in self._blocks.items():
            if isinstance(block, torch.jit.ScriptModule):
                yield Site(site, why_not="a TorchScript module: its forward cannot be rebound")
            elif hasattr(vars(block).get("forward"), "is_checkpointed"):
                yield Site(site, why_not="already checkpointed")
            elif any(is_lazy(parameter) for parameter in block.parameters()):
                yield Site(site, why_not="has lazy parameters: run the model once before, and they will be there")
            elif keeps_statistics(block) and is_inside_compiled(model, site):
                # Only backends that plan the backward pass themselves (Inductor) know not to repeat a statistic.
                yield Site(
                    site, why_not="compiled by you, with running statistics that some compilers would move twice"
                )
            elif host.kind == "mps" and _draws(block):
                # https://github.com/pytorch/pytorch/issues/127676
                yield Site(
                    site, why_not="has dropout, which torch recomputes with other random numbers on an Apple GPU"
                )
            else:
                patch = self._edit(site, block)
                judge = functools.partial(self._judge_and_undo, patch)
                self.run.trials[site] = SiteTrial(block, judge, when=torch.is_grad_enabled)
                yield patch

    def _find_blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        # Recomputing all of a part that occurs once costs its time and, as it is recomputed in one go, may save
        # nothing: only what is selective takes such parts too.
        return find_blocks(model, self._names) if self._names or self._mode == "full" else units(model)

    def _edit(self, site: str, block: nn.Module) -> MethodPatch:
        """The edit that makes one block recompute itself: non-reentrant, with the random state of the first time."""
        has_statistics = keeps_statistics(block)

        def run(block: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return recomputed(block, original, self._mode, args, kwargs, has_statistics=has_statistics)

        return trained_patch(site, f"forward → checkpointed ({self._mode})", block, run)

    def _judge(self, patch: MethodPatch, args: Any, kwargs: Any) -> Verdict:
        verdict = self._try(patch, args, kwargs)
        if not verdict.keep or self._is_late:
            return verdict
        try:
            original, candidate = self._count_kept(patch, args, kwargs)
        except Exception:  # of modules and tensors of any kind: a report lacks a figure, and the verdict holds
            return verdict
        measured = replace(verdict.measured or Measurement(), original_bytes=original, candidate_bytes=candidate)
        return replace(verdict, measured=measured)

    def _try(self, patch: MethodPatch, args: Any, kwargs: Any) -> Verdict:
        """Whether the checkpointed call gives the original's numbers, and nothing stays twice."""
        strange = changeable_argument(args, kwargs)
        if strange is not None:
            return Verdict("refused", f"takes a {strange}, which may not be the same when the block is recomputed")
        block = self._blocks[patch.site]
        trial = Trial(block, args, kwargs, samples=ORACLE_SAMPLES if self._is_late else None)
        original = TrialSide(functools.partial(patch.original, block))
        found = trial.numbers(original, TrialSide(patch.value), in_other_orders=False)
        if found.failure:
            return Verdict(found.kind, found.failure, measured=found.measured())
        norms = {n: m for n, m in block.named_modules() if isinstance(m, NORMS)}
        changed = [name for name in found.left_behind if name.rpartition(".")[0] not in norms]
        if changed:
            return Verdict("refused", f"its forward changes {changed[0]!r}, which recomputing would change again")
        return Verdict("kept", measured=found.measured())

    def _count_kept(self, patch: MethodPatch, args: Any, kwargs: Any) -> tuple[int, int]:
        """What a call keeps for its backward pass, as it is and recomputed; counted once for calls of a kind."""
        block = self._blocks[patch.site]
        kind = kind_of(block, args, kwargs)
        if kind not in self._kept:
            calls = functools.partial(patch.original, block), patch.value
            original, candidate = (kept_bytes(block, call, args, kwargs) for call in calls)
            self._kept[kind] = original, candidate
        return self._kept[kind]

    def _judge_and_undo(self, patch: MethodPatch, args: Any, kwargs: dict[str, Any]) -> Verdict:
        verdict = self._judge(patch, args, kwargs)
        if not verdict.keep:
            patch.undo()
        return verdict

    @override
    @contextmanager
    def trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        with super().trial(patches) as verdicts:
            yield verdicts
        self._untried = [patch.site for patch in patches if patch.site not in verdicts]
        verdicts.update(dict.fromkeys(self._untried, Verdict("kept", "not called on the first step: tried when it is")))

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        return self._late_trial() if self._untried else nullcontext()

    @override
    def on(self, event: Event) -> None:
        if isinstance(event, Added) and event.name == self.name:
            self._is_late = True
            self._untried = [patch.site for patch in event.untried] if self.run.verify else []

    @contextmanager
    def _late_trial(self) -> Iterator[None]:
        verdicts: Verdicts = {}
        try:
            with tried_at_first_calls({site: self.run.trials[site] for site in self._untried}) as verdicts:
                yield
        finally:  # what was found holds, though the step raises later
            self._untried = [site for site in self._untried if site not in verdicts]
            for site, verdict in verdicts.items():
                if not verdict.keep:
                    self.run.refuse(site, verdict.reason, verdict.measured, verdict.kind)


def _draws(block: nn.Module) -> bool:
    """Whether modules of ``block`` draw random numbers in training; what its own code draws, its trial shows."""
    return any(
        (isinstance(m, DROPOUTS) and m.p > 0)
        or (isinstance(m, nn.MultiheadAttention) and m.dropout > 0)
        or isinstance(m, nn.RReLU)
        for m in block.modules()
    )
