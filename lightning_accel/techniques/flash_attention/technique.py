"""Flash attention as a technique: finds the sites, tries them, keeps what is right and fast, says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch._dynamo.config
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule
from typing_extensions import override

from lightning_accel.core.checks import nearest
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.trial import TIMED_S, one_line
from lightning_accel.settings import FlashAttentionPlan
from lightning_accel.techniques.base import Refusal, Technique, Verdict, Verdicts
from lightning_accel.techniques.flash_attention.backends import BACKENDS, installed_backends
from lightning_accel.techniques.flash_attention.dispatch import (
    MAX_CLASSES,
    Dispatch,
    DispatchPatch,
    nearest_choice,
)
from lightning_accel.techniques.flash_attention.finder import find_sites
from lightning_accel.techniques.flash_attention.huggingface import model_switches
from lightning_accel.techniques.flash_attention.rehearsal import (
    ORIGINAL,
    Judgement,
    Rehearsal,
    WatchedBackend,
)
from lightning_accel.techniques.flash_attention.rewrite import fuse_attention
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward

_LATER_TIMED_S = 0.25  # for a class of shapes that turns up in mid-run
_CAPTURES = 64  # of one site: training and evaluation, with and without gradients, fixed and varying sizes
_LATE = "not called on the first step, or only by a compiler, to which the original is left: tried when it is called"


class FlashAttention(Technique):
    """Attention by fused kernels, wherever and however a model computes it.

    Every site is tried on its first real call, and again on the first call of every other class of shapes.

    Args:
        plan: The settings.
        verify: Whether to try; otherwise every site that is found is fused by the first backend there is.
    """

    name: ClassVar[str] = "flash_attention"
    applied_before_trial = True

    def __init__(self, plan: FlashAttentionPlan, *, verify: bool = True) -> None:
        self._plan = plan
        self._verify = verify
        self.explicit = plan.backend != "auto"
        self.on_by_default = plan == FlashAttentionPlan()
        self._dispatches: dict[str, Dispatch] = {}
        self._backends: dict[str, WatchedBackend] = {}
        self._timed: dict[tuple[Any, ...], Judgement] = {}  # shared by sites of one kind
        self._found: Verdicts = {}
        self._agreed: Verdicts = {}
        self._pending: dict[tuple[str, str], str] = {}  # site and class of shapes → what was chosen in this step
        self._is_trial_step = False
        self._recompile_limit: int | None = None
        self._said: list[str] = []
        self._model = nn.Module()
        self._switches = PatchSet()

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind == "xla":
            return (
                "XLA compiles attention itself, and torch's fused kernels are not for it. For long sequences call the"
                " kernel that torch_xla brings: torch_xla.experimental.custom_kernel.flash_attention"
            )
        if self._plan.backend == "auto":
            return None
        reason = BACKENDS[self._plan.backend].unavailable(host)
        if reason is None:
            return None
        names = ", ".join(backend.name for backend in installed_backends(host))
        return f"backend {self._plan.backend!r}: {reason}. Here there are: {names}"

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterable[Patch | Refusal]:
        self._model = model
        self._backends = {name: WatchedBackend(BACKENDS[name]) for name in self.candidates(host)}
        self._check_names(model)
        for claim in find_sites(model):
            if hasattr(vars(model.get_submodule(claim.site)).get("forward"), "is_fused"):
                yield Refusal(claim.site, "already fused")
            elif isinstance(claim, Refusal):
                yield claim
            elif self._is_named(claim, self._plan.skip):
                yield Refusal(claim.site, "left alone, as flash_attention.skip says")
            else:
                dispatch = self._dispatches[claim.site] = Dispatch(claim, self._meet, self._run)
                yield DispatchPatch(dispatch)
        self.watches_on = bool(self._dispatches)  # for other shapes
        if self._dispatches:
            self._recompile_limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(self._recompile_limit, _CAPTURES)

    def fuse_captured(self, graph: GraphModule) -> None:
        """Fuses the attention in a graph that was captured for a compiler, if attention is fused elsewhere too."""
        if any(dispatch.is_fusing for dispatch in self._dispatches.values()):
            fuse_attention(graph)

    # -- the trial ---------------------------------------------------------------------------------------------

    @override
    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        return self._trial(patches) if self._verify else super().trial(patches)

    @contextmanager
    def _trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        verdicts: Verdicts = {}
        self._is_trial_step, self._found = True, {}
        try:
            yield verdicts
        finally:
            self._is_trial_step = False
            self._complain()
        for patch in patches:
            verdicts[patch.site] = self._found.get(patch.site, Verdict(keep=True, reason=_LATE))

    @override
    def decided(self, verdicts: Verdicts) -> None:
        # In force from the next step on: a backward pass that recomputes this step's forward must find what it found.
        self._agreed = dict(verdicts)

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        if self._pending:
            # Not within the step that tried them: its backward pass may recompute its forward.
            pending, self._pending = self._pending, {}
            for (site, key), choice in pending.items():
                if site in self._dispatches and self._dispatches[site].is_open:
                    self._dispatches[site].choices[key] = choice
        for site, verdict in self._agreed.items():
            dispatch = self._dispatches.get(site)
            if dispatch is not None and dispatch.is_differentiated_twice:
                self._refuse(dispatch, "gradients through it are differentiated again, which fused kernels cannot")
            elif dispatch is not None:
                dispatch.choose(verdict.choices)
        if self._agreed:
            self._agreed = {}
            self._switch_models()
        return nullcontext()

    @override
    def settled(self) -> None:
        # Sites that are right but not faster at their first shapes are asked again for others.
        for site, dispatch in self._dispatches.items():
            verdict = self._agreed.get(site)
            if verdict is not None and verdict.choices:
                dispatch.is_refused = False
        self._switches.undo()

    def _switch_models(self) -> None:
        """Has transformers build masks for fused attention, or none, where all modules of a config take them."""
        kept = {site for site, dispatch in self._dispatches.items() if dispatch.is_fusing}
        self._switches.undo()
        self._switches = PatchSet(model_switches(self._model, kept))
        self._switches.apply()

    @override
    def close(self) -> None:
        self._switches.undo()
        for dispatch in reversed(self._dispatches.values()):
            dispatch.remove()
        self._dispatches = {}
        if self._recompile_limit is not None:
            torch._dynamo.config.recompile_limit = self._recompile_limit
            self._recompile_limit = None

    # -- a call ------------------------------------------------------------------------------------------------

    def _run(
        self, dispatch: Dispatch, name: str, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        site = dispatch.attention
        backend = self._backends.get(name)
        if backend is None:  # a decision from a machine that had it
            return original(site.module, *args, **kwargs)
        try:
            result = site.fused(backend, original, args, kwargs)
        except Exception as error:
            if _is_checkpoint_signal(error):
                raise
            # An error of the user's own code comes out of the original, as it always did.
            result = original(site.module, *args, **kwargs)
            self._refuse(dispatch, f"failed in mid-run: {one_line(error)}")
            return result
        self._complain()
        given_up = site.given_up()
        if given_up is not None:
            self._refuse(dispatch, given_up)
        return result

    def _refuse(self, dispatch: Dispatch, reason: str) -> None:
        dispatch.is_refused = True
        self.revisions = {**self.revisions, dispatch.attention.site: Verdict(keep=False, reason=reason)}

    def _complain(self) -> None:
        """Says, once, what a backend that was asked for by name could not do."""
        if self.explicit:
            lacks = [lack for backend in self._backends.values() for lack in backend.lacking if lack not in self._said]
            self._said += lacks
            self.complaints += tuple(f"flash_attention: {lack}: torch's own choice computes it" for lack in lacks)

    def _meet(
        self, dispatch: Dispatch, key: str, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Computes the first call of a class of shapes, and decides where later ones go."""
        site = dispatch.attention
        if (site.site, key) in self._pending:  # perhaps the recomputation of the call that was tried
            return original(site.module, *args, **kwargs)
        if self._is_trial_step and site.site not in self._found:
            judgement, outputs = self._judge(site, key, original, args, kwargs, TIMED_S)
            self._pending[site.site, key] = judgement.choice
            choices = {} if judgement.is_wrong else {key: judgement.choice}
            keep = judgement.choice != ORIGINAL
            self._found[site.site] = Verdict(keep=keep, reason=judgement.reason, choices=choices)
            return outputs
        if self._is_trial_step or not dispatch.is_open:
            return original(site.module, *args, **kwargs)
        choice = self._known_choice(dispatch, key)
        if choice is None:
            return self._meet_late(dispatch, key, original, args, kwargs)
        dispatch.choices[key] = choice
        if choice == ORIGINAL:
            return original(site.module, *args, **kwargs)
        return self._run(dispatch, choice, original, args, kwargs)

    def _known_choice(self, dispatch: Dispatch, key: str) -> str | None:
        if not self._verify:
            return next(iter(self._backends))
        known = nearest_choice(key, dispatch.choices)
        is_full = len(dispatch.choices) >= MAX_CLASSES
        if is_full or (known == ORIGINAL and not self._goes_by_clock(dispatch.attention)):
            return known
        return None

    def _meet_late(
        self, dispatch: Dispatch, key: str, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        known = nearest_choice(key, dispatch.choices)
        judgement, outputs = self._judge(dispatch.attention, key, original, args, kwargs, _LATER_TIMED_S)
        self._pending[dispatch.attention.site, key] = judgement.choice
        if judgement.is_wrong:
            self._refuse(dispatch, judgement.reason)
        elif known is None or (judgement.choice != ORIGINAL and known == ORIGINAL):
            keep = judgement.choice != ORIGINAL
            reason = f"{dispatch.change}: {judgement.reason}" if keep else judgement.reason
            verdict = Verdict(keep=keep, reason=reason, choices={**dispatch.choices, key: judgement.choice})
            self.revisions = {**self.revisions, dispatch.attention.site: verdict}
        return outputs

    def _judge(
        self,
        site: AttentionSite,
        key: str,
        original: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timed_s: float,
    ) -> tuple[Judgement, Any]:
        """Computes a call and tries backends on it. Of sites that are alike only the first is timed."""
        by_clock = self._goes_by_clock(site)
        kind = (type(site.module), key, *(tuple(parameter.shape) for parameter in site.module.parameters()))
        timed = self._timed.get(kind) if by_clock else None
        if timed is None:
            backends = list(self._backends.values())
        else:
            backends = [self._backends[timed.choice if timed.choice != ORIGINAL else next(iter(self._backends))]]
        rehearsal = Rehearsal(backends, by_clock=by_clock and timed is None, timed_s=timed_s)
        try:
            outputs = site.rehearsed(rehearsal, original, args, kwargs)
        except Exception as error:
            if _is_checkpoint_signal(error):
                raise
            # An error of the user's own code comes out of the original, as it always did.
            outputs = original(site.module, *args, **kwargs)
            return Judgement(ORIGINAL, f"failed in its trial: {one_line(error)}", is_wrong=True), outputs
        found = rehearsal.judgement(site.nothing_found())
        if timed is None:
            if by_clock and not found.is_wrong:
                self._timed[kind] = found
            return found, outputs
        return (found if found.choice == ORIGINAL else timed), outputs

    def _goes_by_clock(self, site: AttentionSite) -> bool:
        if self._plan.backend != "auto" or self._is_named(site, self._plan.force):
            return False
        # A deterministic run decides nothing by the clock; nor, in mid-run, does one rank of several.
        is_alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        return not torch.are_deterministic_algorithms_enabled() and (is_alone or self._is_trial_step)

    def candidates(self, host: Host) -> list[str]:
        """The names of the backends that are tried on ``host``, in order of preference."""
        if self._plan.backend != "auto":
            return [self._plan.backend]
        if host.kind == "cpu":  # where torch's own choice is the flash kernel whenever that can
            return ["sdpa"]
        return [backend.name for backend in installed_backends(host)]

    # -- names -------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_named(site: AttentionSite, names: Iterable[str]) -> bool:
        return any(
            name == type(site.module).__name__ or site.site == name or site.site.startswith(f"{name}.")
            for name in names
        )

    def _check_names(self, model: nn.Module) -> None:
        known = {name for name, _ in model.named_modules()} | {type(m).__name__ for m in model.modules()}
        for setting, names in (("skip", self._plan.skip), ("force", self._plan.force)):
            for name in names:
                if name not in known:
                    raise ValueError(
                        f"flash_attention.{setting}: {type(model).__name__} has no module or class"
                        f" {name!r}{nearest(name, sorted(known)) or '.'}"
                    )


def _is_checkpoint_signal(error: Exception) -> bool:
    """Whether gradient checkpointing ends a recomputation by this exception."""
    return type(error).__module__ == "torch.utils.checkpoint"
