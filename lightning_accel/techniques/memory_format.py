"""Memory format: convolution weights and image batches in channels_last, where that is not slower for this model.

https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_accel.core.checks import SettingError
from lightning_accel.core.compiled import eager_where_compiled, is_compiled, is_inside_compiled
from lightning_accel.core.device import device_of
from lightning_accel.core.host import Host
from lightning_accel.core.layout import (
    FORMAT_NAMES,
    FORMATS,
    OptimizerLayouts,
    WeightLayout,
    is_aliased,
    is_channels_last,
    is_part,
    reads_by_layout,
)
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.ranks import has_ranks
from lightning_accel.techniques.arms import Live
from lightning_accel.techniques.base import BuildContext, Technique, Traits
from lightning_accel.techniques.layout_modes import LayoutDraws, LayoutDrawsInOrder, LayoutRescue, LayoutShown
from lightning_accel.techniques.layout_trial import BREAKS_THE_HEAP, LayoutTrial, breaks_the_heap
from lightning_accel.techniques.registry import register
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import Verdict, Verdicts
from lightning_accel.techniques.technique_events import Decided, Event, Settled, Switched

MemoryFormatSetting = Literal["auto", "off", "channels_last", "channels_last_3d"]

_CONVOLUTIONS = {4: (nn.Conv2d, nn.ConvTranspose2d), 5: (nn.Conv3d, nn.ConvTranspose3d)}

_ALIASED = "something else has the memory of its weight or gradient: a kept state_dict or .data, a larger buffer"

# What it takes to compare the numbers of all convolutions. Those of one kind and shape are compared once.
_STEPS_OF_ALL_KINDS = 6.0


def convert_weights(model: nn.Module, dims: Iterable[int] = (4, 5), *, on_cpu: bool = False) -> list[Patch]:
    """The edits that put the convolutions of ``model`` into channels_last (4-D weights) and channels_last_3d (5-D)."""
    unsafe = [site for site, module in model.named_modules() if on_cpu and _breaks_the_heap(module)]
    claims: list[Patch] = []
    candidates = ((name, p) for name, p in model.named_parameters() if is_channels_last(p) and p.dim() in FORMATS)
    laid_out = [name for name, p in candidates if p.is_contiguous(memory_format=FORMATS[p.dim()])]  # not if transposed
    is_unmade = any(is_lazy(parameter) for parameter in model.parameters())
    for site, module in model.named_modules():
        dim = next((dim for dim in dims if isinstance(module, _CONVOLUTIONS[dim])), None)
        if dim is None:
            continue
        if unsafe:
            claims.append(Site(site, why_not=f"{unsafe[0]}: {BREAKS_THE_HEAP}"))
            continue
        if laid_out:
            claims.append(Site(site, why_not=f"{laid_out[0]} is in channels_last already: the layout is the user's"))
            continue
        unmade = "the model has lazy parameters: run it once before, and they will be there"
        reason = unmade if is_unmade else _why_not(module)
        if is_inside_compiled(model, site):
            reason = "inside a compiled module: the compiler chooses layouts itself"
        claims.append(Site(site, why_not=reason) if reason else WeightLayout(site, module, dim))
    return claims


def _why_not(convolution: nn.Module) -> str | None:
    if is_parametrized(convolution) or "weight" not in dict(convolution.named_parameters(recurse=False)):
        return "its weight is computed by a parametrization, which may count on the layout of what it computes from"
    for parameter in convolution.parameters():
        kind = type(parameter.data).__name__
        if kind != "Tensor":
            return f"its weight is a {kind}, whose layout is not ours to change"
        if parameter.device.type == "cpu" and parameter.is_shared():  # type: ignore[no-untyped-call]
            return "its weight is shared with other processes"
        if parameter.dim() in FORMAT_NAMES and (is_part(parameter) or is_aliased(parameter)):
            return _ALIASED
    if has_ranks() and type(convolution).forward not in (nn.Conv2d.forward, nn.Conv3d.forward):
        return "on several ranks its layout could not be taken back in mid-run"
    return None


def _kind(convolution: Any) -> tuple[Any, ...]:
    """What convolutions that are compared once have in common, as far as it is known before they are called."""
    return type(convolution), convolution.weight.shape, convolution.stride, convolution.padding, convolution.dilation


def _breaks_the_heap(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d | nn.Conv3d):
        return False
    return breaks_the_heap(module.kernel_size, module.stride, module.in_channels // module.groups)


@register(
    "memory_format",
    options=MemoryFormatSetting,
    default="auto",
    doc=(
        '``"auto"`` moves models with convolutions to channels_last where that is not slower; a named format '
        'is used wherever the numbers agree; ``"off"`` leaves every layout alone.'
    ),
    after="inplace_activations",
    exactness="rounding",
)
class MemoryFormat(Technique):
    """Channels_last for models with convolutions, and for their batches.

    The first step runs in the user's layout, and beside it every convolution, norm and pooling in the other: with
    other numbers, or (with ``"auto"``) if they take longer, nothing is changed. What is changed is taken back when the
    user's code calls ``.view()`` where the new layout does not allow it, or looks at layouts itself.
    """

    traits = Traits(
        trial_steps=_STEPS_OF_ALL_KINDS,
        not_on={"xla": "XLA lays tensors out itself, whatever their strides say. Use techniques.memory_format='off'"},
        why_not_sharded="FSDP keeps weights row by row, in their ordinary layout",
    )

    def __init__(self, settings: MemoryFormatSetting, context: BuildContext) -> None:
        self._dims = {"channels_last": (4,), "channels_last_3d": (5,)}.get(settings, (4, 5))
        self._is_auto = settings == "auto"
        self._weights: list[WeightLayout] = []
        self._optimizers: OptimizerLayouts | None = None
        self._model = context.model
        self._is_laid = False  # whether the weights of all applied edits are
        self._kinds: dict[str, set[str]] = {}  # what has drawn random numbers in the first step of a stage
        self._silent_stages: set[str] = set()  # whose first step has drawn none
        self._is_decided = False
        self._refused_before_trial = ""
        # DistributedDataParallel lays its buckets out by what it finds: see WeightLayout.hold.
        self.traits = replace(self.traits, applied_before_trial=has_ranks())

    @override
    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        self._model, self._is_decided = model, not self.run.verify
        # Where DistributedDataParallel has laid out its buckets, weights cannot change their layout any more.
        if self._is_auto and not has_ranks():
            self.run.live = Live()
        self.run.at_end.callback(self._close)
        claims = convert_weights(model, self._dims, on_cpu=host.kind == "cpu")
        self._weights = [claim for claim in claims if isinstance(claim, WeightLayout)]
        if self._weights:
            kinds = {_kind(weight.convolution) for weight in self._weights}
            self.traits = replace(self.traits, trial_steps=_STEPS_OF_ALL_KINDS * len(kinds) / len(self._weights))
            self._optimizers = OptimizerLayouts(p for p in model.parameters() if p.dim() in self._dims)
        return claims

    @override
    def optimizer_sites(self, optimizers: Mapping[str, Optimizer]) -> Iterable[Patch]:
        if self._optimizers is not None:
            for optimizer in optimizers.values():
                if self._optimizers.watch(optimizer):
                    self._consider(optimizer)
        return ()

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        if not self._is_in_force():
            return nullcontext()
        self.lay()
        for weight in self._weights:
            weight.lays_input = self._is_decided
        if stage not in self._kinds:
            return self._rescued(stage)
        return self._silent(stage) if stage in self._silent_stages else self._drawing(stage)

    @contextmanager
    def _rescued(self, stage: str) -> Iterator[None]:
        draws = LayoutDraws(device_of(self._model))
        with eager_where_compiled(self._model), LayoutRescue(draws) as rescue:
            yield
        if self._is_decided:
            self._kinds[stage] = draws.kinds
            if not draws.has_drawn:
                self._silent_stages.add(stage)
        # Even if the numbers are mended: in a plain step, the user's own tensor may lie that way, too.
        self.run.spoilt = draws.place or rescue.written
        if place := draws.place or rescue.place or rescue.written:
            self._object(place)

    @contextmanager
    def _silent(self, stage: str) -> Iterator[None]:
        """Around a step of a stage whose first one has drawn nothing: what is drawn now, nobody has looked at."""
        draws = LayoutDraws(device_of(self._model))
        yield
        if draws.have_moved():
            self._silent_stages.discard(stage)
            self.run.spoilt = "a step draws random numbers, perhaps in the order of memory, and none did before"
            self._object(self.run.spoilt)

    @contextmanager
    def _drawing(self, stage: str) -> Iterator[None]:
        """Around a step of a stage that draws, though not, in its first step, for what lies otherwise."""
        draws = LayoutDraws(device_of(self._model))
        is_traced = any(map(is_compiled, self._model.modules()))  # what is compiled would be compiled anew for the mode
        with nullcontext() if is_traced else LayoutDrawsInOrder(draws):
            yield
        # What has not drawn before may draw for a tensor that is contiguous only in this layout.
        if place := draws.place or next(
            (f"{kind} for the first time" for kind in draws.kinds - self._kinds[stage]), ""
        ):
            self.run.spoilt = place
            self._object(place)

    def shown(self) -> AbstractContextManager[Any]:
        """Around code of the user's between two steps, which sees weights, gradients and states as they are plain."""
        return nullcontext() if self.is_shown or has_ranks() else LayoutShown(self.show)

    @property
    def is_shown(self) -> bool:
        """Whether all weights are as the user knows them."""
        return not any(weight.strides for weight in self._weights)

    def show(self) -> None:
        """Has weights, gradients and states be as they are plain until the next step."""
        if not (self.is_shown or has_ranks()):
            self._is_laid = False
            for weight in self._weights:
                weight.show()
            self._match_optimizers()

    def lay(self) -> None:
        """Has them be laid out, at the beginning of a step, before anything of ours references their memory.

        Where anything of the user's does, it would not follow, so that the layout stays as it is.
        """
        if self._is_laid or has_ranks():
            return
        applied = [weight for weight in self._weights if weight.is_applied]
        if any(weight.has_aliases() for weight in applied):
            if not torch.is_grad_enabled():
                return  # callbacks put averages in place of weights for an evaluation, and take them back
            gc.collect()  # what only a cycle refers to is nobody's
        self._is_laid = True
        for weight in applied:
            if weight.has_aliases():
                self.run.refuse(weight.site, _ALIASED)
            else:
                weight.lay()
        self._match_optimizers()

    def _object(self, reason: str) -> None:
        for weight in self._weights:
            self.run.refuse(weight.site, reason)

    def _consider(self, optimizer: Optimizer) -> None:
        """Takes the layout back before the first step of an optimizer that may not be right on it."""
        reason = reads_by_layout(optimizer)
        if reason is None or (self._is_decided and not self._is_in_force()):
            return
        if has_ranks():
            # Too late to give the layout back: DDP has laid its buckets out by it.
            if isinstance(optimizer, LBFGS):
                raise SettingError(f"{reason}: on several ranks give techniques.memory_format='off'.")
            return
        if not isinstance(optimizer, LBFGS):
            if not self._is_auto:
                return
            reason = f"{reason}; techniques.memory_format='channels_last' trusts it not to"
        self._refused_before_trial = reason
        self._object(reason)
        for weight in reversed(self._weights):
            weight.undo()

    @override
    @contextmanager
    def trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        if self._refused_before_trial:
            yield {patch.site: Verdict("refused", self._refused_before_trial) for patch in patches}
            return
        verdicts: Verdicts = {}
        with LayoutTrial(
            self._dims,
            LayoutDraws(device_of(self._model), foresees=True),
            by_clock=self._is_auto and self.run.decides_by_clock,
            is_judged_live=self.run.live is not None,
            purse=self.run.purse,
        ) as trial:
            yield verdicts
        verdict = trial.verdict()
        verdicts.update({patch.site: verdict for patch in patches})

    @override
    def on(self, event: Event) -> None:
        if isinstance(event, Decided):
            self._is_decided = True
        elif isinstance(event, Settled) and has_ranks():
            for weight in self._weights:
                if not weight.is_applied:
                    weight.hold()
                    self.run.watches_on = True  # checkpoints are to have the user's layout
        if isinstance(event, Settled | Switched):
            self._is_laid = False
            self._match_optimizers()

    @property
    def has_weights(self) -> bool:
        """Whether there is something to lay out."""
        return bool(self._weights)

    def acts(self) -> bool:
        """Whether images may lie otherwise in a step than the user's would; the step of the trial runs as theirs."""
        return self._is_decided and self._is_in_force()

    def _is_in_force(self) -> bool:
        return any(weight.is_applied for weight in self._weights)

    def strides(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """For every weight in another layout than the user's: the strides that the user's has."""
        return {p: stride for weight in self._weights for p, stride in weight.strides.items()}

    def _close(self) -> None:
        for weight in reversed(self._weights):
            weight.release()
        self._match_optimizers()
        if self._optimizers is not None:
            self._optimizers.close()
            self._optimizers = None

    def _match_optimizers(self) -> None:
        if self._optimizers is not None:
            self._optimizers.match()
