"""Compilation of the repeated blocks with ``torch.compile``, each by itself, after every other edit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.compiler.config
from torch import nn
from torch.fx import GraphModule
from typing_extensions import Self, override

from lightning_accel.core.blocks import find_blocks
from lightning_accel.core.compiled import compile_call, eager_call, is_compiled, is_gathered_by_hooks, undo_compile
from lightning_accel.core.first_call import at_first_call
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.torch_private import compiled_call, inductor_options, set_compiled_call
from lightning_accel.core.tree import changeable_argument
from lightning_accel.core.trial import NOT_SLOWER, Contender, Trial
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.techniques.base import Refusal, Surroundings, Technique
from lightning_accel.techniques.notes import Verdict, Verdicts
from lightning_accel.techniques.registry import register

CompileSetting = Literal[
    "off", "on", "auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]

Prepare = Callable[[GraphModule], None]


@dataclass(frozen=True, kw_only=True)
class CompilePlan:
    """How blocks are compiled.

    Attributes:
        mode: ``"off"``; ``"on"`` compiles the repeated blocks; ``"auto"`` does so where a trial is faster; or a mode of
            :func:`torch.compile`.
    """

    mode: CompileSetting = "on"


class CompilePatch(Patch):
    """Compiles a module's call in place: no wrapper, so names and ``state_dict`` keys stay."""

    def __init__(self, site: str, block: nn.Module, mode: str, prepare: Prepare, *, eager_random: bool) -> None:
        super().__init__(site, "call → compiled" + (f" ({mode})" if mode != "default" else ""))
        self.block = block
        self.eager_random = eager_random
        self._prepare = prepare
        self._options = inductor_options(mode)
        self._paused: Any = None
        if eager_random:
            # Dropout draws what it would draw eagerly, so that a compiled run has the numbers of a plain one. On a
            # GPU the compiler's own generator is most of what compiling a dropout gains.
            self._options["fallback_random"] = True

    @override
    def _apply(self) -> None:
        compile_call(self.block, self._options, self._prepare)

    @override
    def _undo(self) -> None:
        undo_compile(self.block)

    def have(self, choice: str) -> None:
        """Runs the block eagerly while the choice is ``"off"``; what was compiled waits."""
        if choice == OFF:
            self._paused = compiled_call(self.block)
            set_compiled_call(self.block, None)
        elif self._paused is not None:
            set_compiled_call(self.block, self._paused)


@register(
    "compile",
    settings=CompilePlan,
    default="off",
    on="on",
    after="gradient_checkpointing",
    exactness="rounding",
    shown=("on",),
)
class Compilation(Technique):
    """Compiles every repeated block; each is tried, forward and backward, on its first input after the other trials.

    A block that fails to compile, or computes other numbers than the original, is given back. With ``"auto"`` so is
    one that is not faster, and a deterministic run, where clocks decide nothing, does not compile at all.

    Args:
        setting: As in the plan; not ``"off"``.
        verify: Whether to try.
        prepare: Edits a captured graph, in place, before the compiler gets it.
    """

    trial_step: ClassVar[Literal[0, 1]] = 1

    def __init__(self, setting: CompileSetting, *, verify: bool = True, prepare: Prepare = lambda graph: None) -> None:
        self._prepare = prepare
        self._must_be_faster = setting == "auto"
        self._mode = "default" if setting in ("on", "auto") else str(setting)
        self._verify = verify
        self._patches: list[CompilePatch] = []
        self._settings = ExitStack()  # torch's own, as they were before

    @classmethod
    @override
    def planned(cls, settings: CompilePlan, surroundings: Surroundings) -> Self:
        # What is compiled is captured anew, past the places where attention is sent to its kernels.
        return cls(settings.mode, verify=surroundings.verify, prepare=surroundings.edit_captured)

    @classmethod
    @override
    def check(cls, settings: CompilePlan, all_settings: Mapping[str, Any], verify: bool) -> None:
        if settings.mode == "auto" and not verify:
            raise ValueError(
                "compile='auto' keeps what a trial showed to be faster, and verify=False forbids trials:"
                " give compile='on' or 'off', or verify=True."
            )

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind == "xla":
            return "XLA compiles every step itself, and TorchInductor builds no kernels for it. Use compile='off'"
        if host.kind == "mps":
            return (
                "TorchInductor's part for Apple GPUs calls itself an early prototype, and was not measured here. Use"
                " compile='off', or module.compile() on blocks of your choice"
            )
        if host.compiler is None:
            needed = (
                "a C++ compiler (Debian, Ubuntu: apt-get install g++)"
                if host.kind == "cpu"
                else "Triton and a C compiler"
            )
            return f"nothing to build kernels with on {host.device_name}: install {needed}"
        if self._must_be_faster and torch.are_deterministic_algorithms_enabled():
            return "compile='auto' decides by time, which a deterministic run must not; set compile='on' to compile"
        return None

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterable[Patch | Refusal]:
        blocks = find_blocks(model)
        if not blocks:
            yield Refusal(
                "", f"{type(model).__name__} has no repeated blocks, and whole training steps are not compiled"
            )
        for site, block in blocks.items():
            if isinstance(block, torch.jit.ScriptModule) or any(is_compiled(part) for part in block.modules()):
                yield Refusal(site, "already compiled")
            else:
                patch = CompilePatch(site, block, self._mode, self._prepare, eager_random=host.kind == "cpu")
                self._patches.append(patch)
                yield patch
        # After a graph break the compiler begins anew in the block's own code, which blocks of a class share, and with
        # it one allowance of compiled versions. Past it torch runs a block eagerly and only logs it.
        limit = max(torch.compiler.config.recompile_limit, 8 + 4 * len(blocks))
        self._settings.enter_context(torch.compiler.config.patch(recompile_limit=limit))  # type: ignore[attr-defined]

    @override
    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        return self._trial(patches) if self._verify else super().trial(patches)

    @contextmanager
    def _trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        verdicts: Verdicts = {
            patch.site: Verdict(keep=False, reason="not called with gradients on the second step, so not tried")
            for patch in patches
        }
        probes = PatchSet(self._probe(patch, verdicts) for patch in patches)
        probes.apply()
        try:
            yield verdicts
        finally:
            probes.undo()

    def _probe(self, patch: Patch, verdicts: Verdicts) -> Patch:
        assert isinstance(patch, CompilePatch)

        def meet(args: Any, kwargs: dict[str, Any]) -> None:
            verdicts[patch.site] = self._try(patch, args, kwargs)

        return at_first_call(patch.site, patch.block, meet)

    @override
    def arms(self) -> Iterable[Arm]:
        compiled = [patch for patch in self._patches if patch.is_applied]
        # Of sharded blocks the forward is compiled, within the hooks that gather them: that is not switched.
        if self._must_be_faster and compiled and not any(is_gathered_by_hooks(patch.block) for patch in compiled):
            yield Arm(self.name, ("on",), functools.partial(self._have, compiled))

    def _have(self, compiled: Sequence[CompilePatch], choice: str) -> None:
        for patch in compiled:
            patch.have(choice)

    @override
    def close(self) -> None:
        self._settings.close()

    def _try(self, patch: CompilePatch, args: Any, kwargs: dict[str, Any]) -> Verdict:
        block = patch.block
        if (strange := changeable_argument(args, kwargs)) is not None:
            return Verdict(keep=False, reason=f"takes a {strange}, which its trial would change")
        # All samples: another batch size would have the block compiled a second time, for any size, and slower.
        trial = Trial(
            block,
            args,
            kwargs,
            with_gradients=torch.is_grad_enabled(),
            samples=None,
            # Off, the block would be compiled a second time; with the same random numbers on both sides it can stay on.
            dropout="on" if patch.eager_random else "off in modules",
        )
        eager, compiled = Contender(eager_call(block)), Contender(_call(block), state=lambda: _applied(patch))
        found = trial.numbers(eager, compiled)
        if found.failure:
            return Verdict(keep=False, reason=found.failure)
        if not self._must_be_faster:
            return Verdict(keep=True)
        found = trial.time(eager, compiled)
        if found.failure:
            return Verdict(keep=False, reason=found.failure)
        assert found.original_ms is not None
        assert found.candidate_ms is not None
        before, after = found.original_ms, found.candidate_ms
        speed = f"{before / after:.2f}x the speed here ({before:.2f} → {after:.2f} ms)"
        return Verdict(keep=after * NOT_SLOWER < before, reason=speed)


def _call(block: nn.Module) -> Callable[..., Any]:
    return (lambda *args, **kwargs: block.forward(*args, **kwargs)) if is_gathered_by_hooks(block) else block.__call__


@contextmanager
def _applied(patch: Patch) -> Iterator[None]:
    patch.apply()
    try:
        yield
    finally:
        patch.undo()
