"""Flash attention as a technique: finds the sites, tries them, keeps what is right and fast, says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import ClassVar

import torch.compiler.config
from torch import nn
from torch.fx import GraphModule
from typing_extensions import Self, override

from lightning_accel.core.checks import nearest
from lightning_accel.core.host import Host
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.torch_private.compilation import compiling_ms
from lightning_accel.techniques.arms import OFF, Arm
from lightning_accel.techniques.base import BuildContext, Forecast, Refusal, Technique
from lightning_accel.techniques.flash_attention.backend_trial import WatchedBackend
from lightning_accel.techniques.flash_attention.backends import BACKENDS, installed_backends
from lightning_accel.techniques.flash_attention.dispatch import Dispatch, Judge
from lightning_accel.techniques.flash_attention.finder import find_sites
from lightning_accel.techniques.flash_attention.hand_written import HandWrittenSite
from lightning_accel.techniques.flash_attention.huggingface import model_switches
from lightning_accel.techniques.flash_attention.rewrite import fuse_attention
from lightning_accel.techniques.flash_attention.settings import FlashAttentionOptions
from lightning_accel.techniques.notes import Verdict, Verdicts
from lightning_accel.techniques.registry import register

_CAPTURES = 64  # of one site: training and evaluation, with and without gradients, fixed and varying sizes
_FIRST_CAPTURE_S, _CAPTURE_S = 0.5, 0.1  # what Dynamo takes, in a process and for every function
_LATE = "not called on the first step, or only by a compiler, to which the original is left: tried when it is called"


@register(
    "flash_attention",
    options=FlashAttentionOptions,
    after="precision",
    exactness="rounding",
)
class FlashAttention(Technique):
    """Attention by fused kernels, wherever and however a model computes it.

    Every site is tried on its first real call, and again on the first call of every other class of shapes. Not to
    ``verify`` is to fuse every site that is found, by the first backend there is.
    """

    applied_before_trial = True
    trial_steps: ClassVar[float] = 1.5
    not_on: ClassVar[Mapping[str, str]] = {
        "xla": "XLA compiles attention itself, and torch's fused kernels are not for it. For long sequences call the"
        " kernel that torch_xla brings: torch_xla.experimental.custom_kernel.flash_attention"
    }

    def __init__(self, plan: FlashAttentionOptions, *, verify: bool = True) -> None:
        self._plan = plan
        self._verify = verify
        self._model = nn.Module()
        self._judge = Judge({}, verify, may_time=plan.backend == "auto", untimed=plan.force)
        self._dispatches: dict[str, Dispatch] = {}
        self._found: Verdicts = {}  # in the trial step
        self._agreed: Verdicts = {}
        self._switches = PatchSet()
        self._settings = ExitStack()  # torch's own, as they were before

    @classmethod
    @override
    def from_settings(cls, settings: FlashAttentionOptions, context: BuildContext) -> Self:
        return cls(settings, verify=context.verify)

    @override
    def unavailable(self, host: Host) -> str | None:
        reason = None if self._plan.backend == "auto" else BACKENDS[self._plan.backend].unavailable(host)
        if host.kind in self.not_on or reason is None:
            return super().unavailable(host)
        names = ", ".join(backend.name for backend in installed_backends(host))
        return f"backend {self._plan.backend!r}: {reason}. Here there are: {names}"

    @override
    def forecast(self, host: Host) -> Forecast | None:
        if self._plan.backend == "auto" or host.kind == "xla":
            return None
        reason = BACKENDS[self._plan.backend].unavailable(host)
        words = reason or "used wherever the numbers agree"
        return Forecast(acts=reason is None, brief="no" if reason else "yes", words=words)

    @override
    def alternatives(self, host: Host) -> list[str]:
        if self._plan.backend != "auto":
            return [self._plan.backend]
        if host.kind == "cpu":  # where torch's own choice is the flash kernel whenever that can
            return ["sdpa"]
        return [backend.name for backend in installed_backends(host)]

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterable[Patch | Refusal]:
        _check_names(model, self._plan)
        self._model = model
        self._judge.may_time &= self.timed
        for name in self.alternatives(host):
            self._judge.backends[name] = WatchedBackend(BACKENDS[name], self._complain)
        for claim in find_sites(model):
            if hasattr(vars(model.get_submodule(claim.site)).get("forward"), "is_fused"):
                yield Refusal(claim.site, "already fused")
            elif isinstance(claim, Refusal):
                yield claim
            elif claim.is_named(self._plan.skip):
                yield Refusal(claim.site, "left alone, as flash_attention.skip says")
            else:
                dispatch = self._dispatches[claim.site] = Dispatch(claim, self._judge, self._revise)
                yield dispatch
        self.watches_on = bool(self._dispatches)  # for other shapes
        if self._dispatches:
            limit = max(torch.compiler.config.recompile_limit, _CAPTURES)
            self._settings.enter_context(torch.compiler.config.patch(recompile_limit=limit))  # type: ignore[attr-defined]

    @property
    @override
    def setup_s(self) -> float:
        sites = (dispatch.attention for dispatch in self._dispatches.values())
        forwards = {type(site.module).forward for site in sites if isinstance(site, HandWrittenSite)}
        return _CAPTURE_S * len(forwards) + (_FIRST_CAPTURE_S if forwards and not compiling_ms() else 0.0)

    def _complain(self, lack: str) -> None:
        if self._plan.backend != "auto":
            self.notes.warn(f"flash_attention: {lack}: torch's own choice computes it")

    def _revise(self, site: str, verdict: Verdict) -> None:
        if self._judge.is_trial_step:
            self._found[site] = verdict
        else:
            self.notes.revise(site, verdict)

    @override
    def edit_captured(self, graph: GraphModule) -> None:
        # Only where attention is fused elsewhere too.
        if any(dispatch.is_fusing for dispatch in self._dispatches.values()):
            fuse_attention(graph)

    @override
    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        return self._trial(patches) if self._verify else super().trial(patches)

    @contextmanager
    def _trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        self._found = {patch.site: Verdict("kept", _LATE) for patch in patches}
        self._judge.is_trial_step = True
        try:
            yield self._found
        finally:
            self._judge.is_trial_step = False

    @override
    def decided(self, verdicts: Verdicts) -> None:
        # In force from the next step on: a backward pass that recomputes this step's forward must find what it found.
        self._agreed = dict(verdicts)

    @override
    def step(self, stage: str) -> AbstractContextManager[None]:
        self._judge.purse = self.purse
        for dispatch in self._dispatches.values():
            if dispatch.tried:
                dispatch.adopt_tried()
        if self._agreed:
            agreed, self._agreed = self._agreed, {}
            for site, verdict in agreed.items():
                if site in self._dispatches:
                    self._dispatches[site].choose(verdict.choices)
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
    def arms(self) -> Iterable[Arm]:
        if self._plan.backend == "auto" and any(dispatch.is_fusing for dispatch in self._dispatches.values()):
            yield Arm(self.name, ("on",), self._set_choice)

    def _set_choice(self, choice: str) -> None:
        for dispatch in self._dispatches.values():
            dispatch.is_paused = choice == OFF
        self._switch_models()

    @override
    def close(self) -> None:
        self._switches.undo()
        for dispatch in reversed(self._dispatches.values()):
            dispatch.remove()
        self._dispatches = {}
        self._settings.close()


def _check_names(model: nn.Module, plan: FlashAttentionOptions) -> None:
    known = {name for name, _ in model.named_modules()} | {type(m).__name__ for m in model.modules()}
    for setting, names in (("skip", plan.skip), ("force", plan.force)):
        for name in names:
            if name not in known:
                raise ValueError(
                    f"flash_attention.{setting}: {type(model).__name__} has no module or class"
                    f" {name!r}{nearest(name, sorted(known)) or '.'}"
                )
