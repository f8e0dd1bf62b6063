"""Compilation of the repeated blocks with ``torch.compile``, each by itself, after every other edit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.compiler.config
from torch import nn
from typing_extensions import override

from lightning_accel.core import kernel_cache
from lightning_accel.core.blocks import find_blocks
from lightning_accel.core.compiled import CompiledKind, is_compiled, is_gathered_by_hooks
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.techniques.arms import Arm
from lightning_accel.techniques.base import BuildContext, Refusal, Technique
from lightning_accel.techniques.compile_setup import CompileSetup
from lightning_accel.techniques.compiled_blocks import CompilePatch, Prepare, alike, tried
from lightning_accel.techniques.compiled_graphs import GRAPHS, SETTLE, ReplayedPatch
from lightning_accel.techniques.cuda_capture import capture_on_cuda
from lightning_accel.techniques.first_calls import tried_at_first_calls
from lightning_accel.techniques.graphed_block import Capture
from lightning_accel.techniques.notes import Verdict, Verdicts
from lightning_accel.techniques.registry import register

CompileSetting = Literal[
    "off", "on", "auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]


_MOST_ANEW = 8  # times that a kind of block may be compiled anew, as torch has it


@register(
    "compile",
    options=CompileSetting,
    default="off",
    after="gradient_checkpointing",
    exactness="rounding",
)
class Compilation(Technique):
    """Compiles every repeated block; each is tried, forward and backward, on its first input after the other trials.

    A block that fails to compile, or computes other numbers than the original, is given back, and so is one that is
    compiled anew again and again. A deterministic run, where clocks decide nothing, does not do ``"auto"`` at all. To
    ``prepare`` is to edit a captured graph, in place, before the compiler gets it.
    """

    trial_step: ClassVar[Literal[0, 1] | None] = 1
    trial_steps: ClassVar[float] = 150.0  # nearly all of them the compiler's
    not_on: ClassVar[Mapping[str, str]] = {
        "xla": "XLA compiles every step itself, and TorchInductor builds no kernels for it. Use compile='off'",
        "mps": "TorchInductor's part for Apple GPUs calls itself an early prototype, and was not measured here. Use"
        " compile='off', or module.compile() on blocks of your choice",
    }

    def __init__(self, setting: CompileSetting, *, verify: bool = True, prepare: Prepare = lambda graph: None) -> None:
        self._prepare = prepare
        self._mode = "default" if setting in ("on", "auto") else str(setting)
        self._verify = verify
        self._make_patch: Callable[..., CompilePatch] = CompilePatch
        self._patches: list[CompilePatch] = []
        self._kinds: dict[Hashable, CompiledKind] = {}
        self._first_graphs: dict[CompiledKind, int] = {}  # once its blocks were tried
        self._is_settled = False
        self._settings = ExitStack()  # torch's own, as they were before
        self._why_not_kept = ""

    @classmethod
    @override
    def from_settings(cls, settings: CompileSetting, context: BuildContext) -> Compilation:
        # What is compiled is captured anew, past the places where attention is sent to its kernels.
        make = CompilationOnTrial if settings == "auto" else Compilation
        return make(settings, verify=context.verify, prepare=context.edit_captured)

    @classmethod
    @override
    def check(cls, settings: CompileSetting, all_settings: Mapping[str, Any], verify: bool) -> None:
        if settings == "auto" and not verify:
            raise ValueError(
                "compile='auto' keeps what a trial showed to be faster, and trust='unchecked' forbids trials:"
                " give compile='on' or 'off', or trust='checked'."
            )

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind in self.not_on or host.compiler is not None:
            return super().unavailable(host)
        of_cpu = "a C++ compiler (Debian, Ubuntu: apt-get install g++)"
        needed = of_cpu if host.kind == "cpu" else "Triton and a C compiler"
        return f"nothing to build kernels with on {host.device_name}: install {needed}"

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterator[Patch | Refusal]:
        blocks = find_blocks(model)
        if not blocks:
            yield Refusal(
                "", f"{type(model).__name__} has no repeated blocks, and whole training steps are not compiled"
            )
        for site, block in blocks.items():
            if isinstance(block, torch.jit.ScriptModule) or any(is_compiled(part) for part in block.modules()):
                yield Refusal(site, "already compiled")
            else:
                patch = self._make_patch(site, block, self._mode, self._prepare, kind_of=self._kind_of)
                self._patches.append(patch)
                yield patch
        # After a graph break the compiler begins anew in the block's own code, which blocks of a class share, and with
        # it one allowance of compiled versions. Past it torch runs a block eagerly and only logs it.
        limit = max(torch.compiler.config.recompile_limit, 8 + 4 * len(blocks))
        self._settings.enter_context(torch.compiler.config.patch(recompile_limit=limit))  # type: ignore[attr-defined]
        if self._patches:
            self._why_not_kept = self._settings.enter_context(kernel_cache.kept())

    @override
    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        if not self._verify:
            return super().trial(patches)
        return tried_at_first_calls(
            [patch for patch in patches if isinstance(patch, CompilePatch)],
            lambda patch: patch.block,
            self._judge,
            unseen="not called with gradients on the second step, so not tried",
        )

    def _judge(self, patch: CompilePatch, args: Any, kwargs: dict[str, Any]) -> Verdict:
        patch.kind = self._kind_of(patch, args, kwargs)
        return tried(patch, args, kwargs)

    def _kind_of(self, patch: CompilePatch, args: Any, kwargs: dict[str, Any]) -> CompiledKind:
        may_share = patch.may_share and not is_gathered_by_hooks(patch.block)
        key = alike(patch.block, args, kwargs) if may_share else patch.site
        return self._kinds.setdefault(key, CompiledKind(self._count))

    @override
    def settled(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._first_graphs = {kind: kind.graphs for kind in self._compiled_kinds()}
            self._tell()

    def _compiled_kinds(self) -> set[CompiledKind]:
        return {patch.kind for patch in self._patches if patch.kind is not None and patch.kind.graphs}

    def _count(self, kind: CompiledKind) -> None:
        """Says what was compiled, and gives blocks back that are compiled anew again and again."""
        self._tell()
        first = self._first_graphs.get(kind, 0)  # none where an earlier run has tried the blocks
        anew = kind.graphs - first
        if self._is_settled and anew > _MOST_ANEW * (first or _MOST_ANEW):
            for patch in self._patches:
                if patch.kind is kind and patch.is_applied:
                    self.notes.refuse(
                        patch.site,
                        f"given back: {anew} graphs were compiled anew, in {kind.seconds:.1f} s with the first: what it"
                        " is called with keeps changing (shapes, layouts, Python numbers). Pad batches to a few sizes",
                    )

    def _tell(self) -> None:
        kinds = self._compiled_kinds()
        graphs = sum(kind.graphs for kind in kinds)
        anew = sum(kind.graphs - self._first_graphs.get(kind, 1) for kind in kinds) if self._is_settled else 0
        seconds = sum(kind.seconds for kind in kinds)
        self.notes.details = (
            f"{graphs} {'graph' if graphs == 1 else 'graphs'} compiled, {anew} of them anew, in {seconds:.1f} s without"
            " their backward passes"
        )
        if self._why_not_kept:
            self.notes.details += f"\na later run may have to compile again: {self._why_not_kept}"

    @override
    def close(self) -> None:
        for patch in self._patches:
            if patch.kind is not None:
                patch.kind.forget()
        self._patches, self._kinds = [], {}
        self._settings.close()


class CompilationOnTrial(Compilation):
    """Compiles where live trials find that the run's own steps are faster for it, and the run can afford to try.

    No step compiles before they ask: then the blocks are compiled and tried in one that is not counted. On a GPU of
    NVIDIA's, they are asked twice: whether to compile, and whether CUDA graphs are to replay what was compiled.
    """

    trial_step: ClassVar[None] = None

    def __init__(self, setting: CompileSetting, *, capture: Capture = capture_on_cuda, **others: Any) -> None:
        super().__init__(setting, **others)
        self._capture = capture
        self._setup = CompileSetup(self.notes, self._count)

    @override
    def unavailable(self, host: Host) -> str | None:
        if torch.are_deterministic_algorithms_enabled():
            return "compile='auto' decides by time, which a deterministic run must not; set compile='on' to compile"
        return super().unavailable(host)

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterator[Patch | Refusal]:
        if host.kind == "cuda":
            self._make_patch = partial(ReplayedPatch, capture=self._capture, notes=self.notes)
        for claim in super().patches(model, host):
            if isinstance(claim, CompilePatch):
                claim.is_wanted = False
                self._setup.patches.append(claim)
            yield claim
        if self._patches:
            self.notes.status = "waits for live trials, which ask for it after all else"

    @override
    def decided(self, verdicts: Verdicts) -> None:
        self._setup.known = dict(verdicts)

    @override
    def settled(self) -> None:
        if self._setup.is_over:
            super().settled()

    @override
    def arms(self) -> Iterator[Arm]:
        self._setup.agree = self.agree
        if self._setup.possible:
            may_replay = any(isinstance(patch, ReplayedPatch) for patch in self._patches)
            yield Arm(
                self.name,
                ("on", GRAPHS) if may_replay else ("on",),
                self._set_choice,
                settle_of={GRAPHS: SETTLE},
                has=lambda choice: choice != GRAPHS or self._setup.has_graphs,
                setup=self._setup,
            )

    def _set_choice(self, choice: str) -> None:
        for patch in self._patches:
            patch.set_choice(choice)

    @override
    def close(self) -> None:
        self._setup.close()
        super().close()
