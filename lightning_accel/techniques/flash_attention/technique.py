"""Flash attention as a technique: finds the sites, tries them, keeps what is right and fast, says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn
from torch.fx import GraphModule
from typing_extensions import override

from lightning_accel.core.checks import nearest
from lightning_accel.core.compiled import compiled_anew
from lightning_accel.core.host import Host
from lightning_accel.core.patch import AttributePatch, Patch, PatchSet, applied
from lightning_accel.core.torch_private.compilation import compiling_ms
from lightning_accel.experiment.python_pace import python_pace
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.flash_attention.backend_trial import WatchedBackend
from lightning_accel.techniques.flash_attention.backends import BACKENDS, installed_backends
from lightning_accel.techniques.flash_attention.dispatch import Dispatch, Judge
from lightning_accel.techniques.flash_attention.finder import find_sites
from lightning_accel.techniques.flash_attention.hand_written import HandWrittenSite
from lightning_accel.techniques.flash_attention.rewrite import fuse_attention
from lightning_accel.techniques.flash_attention.settings import FlashAttentionOptions
from lightning_accel.techniques.flash_attention.sites import model_switches
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import Forecast, Verdict, Verdicts
from lightning_accel.techniques.technique_events import Decided, Event, Paused, Settled, Switched

_CAPTURES = 64  # of one site: training and evaluation, with and without gradients, fixed and varying sizes
_FIRST_CAPTURE_S, _CAPTURE_S = 0.4, 0.08  # what Dynamo takes at a pace of 1, in a process and for every function
_LATE = "not called on the first step, or only by a compiler, to which the original is left: tried when it is called"


@register("flash_attention", options=FlashAttentionOptions, after="precision", exactness="rounding")
class FlashAttention(Technique):
    """Attention by fused kernels, wherever and however a model computes it.

    Every site is tried on its first real call, and again on the first call of every other class of shapes. Where
    nothing is tried, every site that is found is fused by the first backend there is.
    """

    traits = Traits(
        applied_before_trial=True,
        trial_steps=1.5,
        not_on={
            "xla": "XLA compiles attention itself, and torch's fused kernels are not for it. For long sequences call"
            " the kernel that torch_xla brings: torch_xla.experimental.custom_kernel.flash_attention"
        },
    )

    def __init__(self, settings: FlashAttentionOptions, context: BuildContext) -> None:
        self._plan = plan = settings
        context.graph_edits.append(self._edit_captured)
        if plan.backend != "auto" and context.host.kind != "xla":
            reason = BACKENDS[plan.backend].unavailable(context.host)
            words = reason or "used wherever the numbers agree"
            self.run.forecast = Forecast(reason is None, "no" if reason else "yes", words)
        elif context.host.kind != "xla":
            self.run.forecast = Forecast(True, ", ".join(self._names(context.host)), "")
        self.run.live = Live() if plan.backend == "auto" else None
        self._model = context.model
        self._judge = Judge(self.run, may_time=plan.backend == "auto", untimed=plan.force)
        self._dispatches: dict[str, Dispatch] = {}
        self._agreed: Verdicts = {}
        self._switches = PatchSet()

    @override
    def unavailable(self, host: Host) -> str | None:
        reason = None if self._plan.backend == "auto" else BACKENDS[self._plan.backend].unavailable(host)
        if host.kind in self.traits.not_on or reason is None:
            return super().unavailable(host)
        names = ", ".join(backend.name for backend in installed_backends(host))
        return f"backend {self._plan.backend!r}: {reason}. Here there are: {names}"

    def _names(self, host: Host) -> list[str]:
        """Of the backends between which a trial chooses."""
        if self._plan.backend != "auto":
            return [self._plan.backend]
        if host.kind == "cpu":  # where torch's own choice is the flash kernel whenever that can
            return ["sdpa"]
        return [backend.name for backend in installed_backends(host)]

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        _check_names(model, self._plan)
        self._model = model
        for name in self._names(host):
            self._judge.backends[name] = WatchedBackend(BACKENDS[name], self._complain)
        for claim in find_sites(model):
            if hasattr(vars(model.get_submodule(claim.site)).get("forward"), "is_fused"):
                yield Site(claim.site, why_not="already fused")
            elif isinstance(claim, Site):
                yield claim
            elif claim.is_named(self._plan.skip):
                yield Site(claim.site, why_not="left alone, as flash_attention.skip says")
            else:
                dispatch = self._dispatches[claim.site] = Dispatch(claim, self._judge)
                yield dispatch
        self.run.watches_on = bool(self._dispatches)  # for other shapes
        self.run.at_end.callback(self._close)
        if self._dispatches:
            self.run.at_end.enter_context(compiled_anew(_CAPTURES))
        found = (dispatch.attention for dispatch in self._dispatches.values())
        forwards = {type(site.module).forward for site in found if isinstance(site, HandWrittenSite)}
        if forwards:
            first_s = 0.0 if compiling_ms() else _FIRST_CAPTURE_S
            self.run.setup_s = python_pace() * (first_s + _CAPTURE_S * len(forwards))

    def _complain(self, lack: str) -> None:
        if self._plan.backend != "auto":
            self.run.warn(f"flash_attention: {lack}: torch's own choice computes it")

    def _edit_captured(self, graph: GraphModule) -> None:
        # Only where attention is fused elsewhere too.
        if any(dispatch.is_used for dispatch in self._dispatches.values()):
            fuse_attention(graph)

    @override
    @contextmanager
    def trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        self._judge.found = {patch.site: Verdict("kept", _LATE) for patch in patches}
        with applied(AttributePatch("", "the trial step", self._judge, "is_trial_step", True)):
            yield self._judge.found

    @override
    def on(self, event: Event) -> None:
        if isinstance(event, Decided):
            # In force from the next step on: where a backward pass recomputes this step, it must find what that found.
            self._agreed = dict(event.verdicts)
        elif isinstance(event, Settled):
            # Sites that are right but not faster at their first shapes are asked again for others.
            for site, verdict in self._agreed.items():
                if verdict.choices and site in self._dispatches:
                    self._dispatches[site].is_refused = False
            self._switches.undo()
        elif isinstance(event, Paused):
            for dispatch in self._dispatches.values():
                dispatch.is_paused = event.is_paused
        if isinstance(event, Paused | Switched):
            self._switch_models()

    @override
    def step(self, stage: str) -> AbstractContextManager[None]:
        for dispatch in self._dispatches.values():
            dispatch.adopt_tried()
        if self._agreed:
            agreed, self._agreed = self._agreed, {}
            for site, verdict in agreed.items():
                if site in self._dispatches:
                    self._dispatches[site].open(verdict.choices)
            self._switch_models()
        return nullcontext()

    def _switch_models(self) -> None:
        """Has transformers build masks for fused attention, or none, where all modules of a config take them."""
        kept = {site for site, dispatch in self._dispatches.items() if dispatch.is_used}
        self._switches.undo()
        self._switches = PatchSet(model_switches(self._model, kept))
        self._switches.apply()

    def _close(self) -> None:
        self._switches.undo()
        for dispatch in reversed(self._dispatches.values()):
            dispatch.remove()
        self._dispatches = {}


def _check_names(model: nn.Module, plan: FlashAttentionOptions) -> None:
    known = {name for name, _ in model.named_modules()} | {type(m).__name__ for m in model.modules()}
    for setting, names in (("skip", plan.skip), ("force", plan.force)):
        for name in names:
            if name not in known:
                raise ValueError(
                    f"flash_attention.{setting}: {type(model).__name__} has no module or class"
                    f" {name!r}{nearest(name, sorted(known)) or '.'}"
                )
