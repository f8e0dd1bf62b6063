"""Memory format: convolution weights and image batches in channels_last, where that is not slower for this model.

https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_accel.compiled import eager_where_compiled, is_inside_compiled
from lightning_accel.host import Host
from lightning_accel.layout import FORMAT_NAMES, OptimizerLayouts, WeightLayout, reads_by_layout, to_channels_last
from lightning_accel.patch import MethodPatch, Patch, PatchSet
from lightning_accel.plan import MemoryFormatSetting
from lightning_accel.techniques.base import Refusal, Technique, Verdict, Verdicts
from lightning_accel.tree import map_tensors, tensors_in
from lightning_accel.trial import NOT_SLOWER, Comparison, Contender, Trial

# A 1x1 convolution with a stride, in channels_last and bfloat16, on two threads: its backward pass leaves a kernel in
# oneDNN's cache whose destruction crashes the interpreter as it ends (torch 2.13, and nothing of ours in between).
_LONE_SAMPLE = "batches of one sample: oneDNN's bfloat16 kernels for them crash when the program ends"

Forward = Callable[..., Any]
Compare = Callable[[nn.Module, Forward, Any, Any], Comparison]

_CONVOLUTIONS = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}


def convert_weights(model: nn.Module, dims: Iterable[int] = (4, 5)) -> list[WeightLayout | Refusal]:
    """The edits that put the convolutions of ``model`` into channels_last (4-D weights) and channels_last_3d (5-D)."""
    claims: list[WeightLayout | Refusal] = []
    is_unmade = any(is_lazy(parameter) for parameter in model.parameters())
    for site, module in model.named_modules():
        dim = next((dim for dim in dims if isinstance(module, _CONVOLUTIONS[dim])), None)
        if dim is None:
            continue
        unmade = "the model has lazy parameters: run it once before, and they will be there"
        reason = unmade if is_unmade else _why_not(module)
        if is_inside_compiled(model, site):
            reason = "inside a compiled module: the compiler chooses layouts itself"
        claims.append(Refusal(site, reason) if reason else WeightLayout(site, module, dim))
    return claims


def _why_not(convolution: nn.Module) -> str | None:
    for parameter in convolution.parameters():
        kind = type(parameter.data).__name__
        if kind != "Tensor":
            return f"its weight is a {kind}, whose layout is not ours to change"
        if parameter.device.type == "cpu" and parameter.is_shared():  # type: ignore[no-untyped-call]
            return "its weight is shared with other processes"
        if parameter.dim() in FORMAT_NAMES and parameter.untyped_storage().nbytes() != parameter.nbytes:
            return "its weight is a part of a larger buffer"
    if _has_buckets() and type(convolution).forward not in (nn.Conv2d.forward, nn.Conv3d.forward):
        return "on several ranks its layout could not be taken back in mid-run"
    return None


def _has_buckets() -> bool:
    """Whether gradients may be reduced in DistributedDataParallel's buckets: see :meth:`WeightLayout.hold`."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class ViewRescue(TorchFunctionMode):
    """Turns a ``tensor.view()`` that the layout makes impossible into a ``reshape``, and remembers where it was.

    ``x.view(x.size(0), -1)`` on a channels_last tensor raises. While this is active the step succeeds, so that the
    layout can be taken back instead of the run breaking.
    """

    def __init__(self) -> None:
        self.places: list[str] = []

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not Tensor.view and func is not Tensor.view_as:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if args[0].dim() not in FORMAT_NAMES or args[0].is_contiguous():
                raise
            frame = sys._getframe(1)
            self.places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return (
                args[0].reshape_as(*args[1:], **kwargs)
                if func is Tensor.view_as
                else args[0].reshape(*args[1:], **kwargs)
            )


class MemoryFormat(Technique):
    """Channels_last for models with convolutions, and for their batches.

    Weights are converted before the run starts. On the first step each part of the model that holds convolutions is
    run both ways on its real input: other numbers, or (with ``"auto"``) a slower pass, and all is taken back. So it
    is when the user's code calls ``.view()`` where the new layout does not allow it.

    Args:
        setting: As in the plan; not ``"preserve"``.
        verify: Whether to try.
        during_trial: Entered around the trial's extra forward passes.
    """

    name: ClassVar[str] = "memory_format"
    applied_before_trial: ClassVar[bool] = True
    on_by_default = True
    why_not_sharded: ClassVar[str] = "FSDP keeps weights row by row, in their ordinary layout"

    def __init__(
        self,
        setting: MemoryFormatSetting,
        *,
        verify: bool = True,
        during_trial: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._dims = {"channels_last": (4,), "channels_last_3d": (5,)}.get(setting, (4, 5))
        self._is_auto = setting == "auto"
        self.explicit = not self._is_auto
        self._verify = verify
        self._during_trial = during_trial
        self._weights: list[WeightLayout] = []
        self._optimizers: OptimizerLayouts | None = None
        self._model = nn.Module()
        self._rescued_stages: set[str] = set()
        self._is_trying = False
        self._is_timed = False
        self._is_timed_at_once = False

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind == "xla":
            return "XLA lays tensors out itself, whatever their strides say. Use memory_format='preserve'"
        return None

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterable[Patch | Refusal]:
        self._model = model
        claims = convert_weights(model, self._dims)
        self._weights = [claim for claim in claims if isinstance(claim, WeightLayout)]
        if self._weights:
            parameters = (p for p in model.parameters() if p.dim() in self._dims)
            self._optimizers = OptimizerLayouts(parameters, self._before_first_step)
        return claims

    @override
    def batch(self, batch: Any, stage: str) -> Any:
        if not self._is_in_force():
            return batch
        return map_tensors(lambda tensor: to_channels_last(tensor, self._dims), batch)

    @override
    def predictions(self, outputs: Any) -> Any:
        # Out of the run's sight, where nobody expects them in another layout and .view() would raise.
        return _contiguous(outputs) if self._is_in_force() else outputs

    @override
    def step(self, stage: str) -> AbstractContextManager[Any]:
        return nullcontext() if stage in self._rescued_stages or not self._is_in_force() else self._rescued(stage)

    @contextmanager
    def _rescued(self, stage: str) -> Iterator[None]:
        with eager_where_compiled(self._model), ViewRescue() as rescue:
            yield
        self._rescued_stages.add(stage)
        if rescue.places:
            self._object(
                f"{rescue.places[0]} calls .view() on a tensor that channels_last lays out otherwise;"
                " .reshape() or .flatten() there would allow it"
            )

    def _object(self, reason: str) -> None:
        self.objections = {weight.site: reason for weight in self._weights}

    def _before_first_step(self, optimizer: Optimizer) -> None:
        reason = reads_by_layout(optimizer)
        if reason is None or not self._is_in_force():
            return
        if _has_buckets():
            # Too late to give the layout back: DDP has laid its buckets out by it.
            if isinstance(optimizer, LBFGS):
                raise ValueError(f"{reason}: on several ranks give memory_format='preserve'.")
            return
        if isinstance(optimizer, LBFGS):
            self._object(reason)
        elif self._is_auto:
            self._object(f"{reason}; memory_format='channels_last' trusts it not to")
        if self.objections:
            self._take_back()

    @override
    def trial(self, patches: PatchSet) -> AbstractContextManager[Verdicts]:
        return self._trial(patches) if self._verify else super().trial(patches)

    @contextmanager
    def _trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        if self.objections:  # an optimizer that steps with a closure was met before its first forward pass
            yield {site: Verdict(keep=False, reason=reason) for site, reason in self.objections.items()}
            return
        for patch in patches:
            patch.apply()  # a first step that raised may have left them taken back, before they were judged
        verdicts: Verdicts = {}
        found: list[Comparison] = []
        with ExitStack() as stack:
            for weight in self._weights:
                stack.enter_context(self._at_first_call(weight.convolution, found, self._compare_convolution))
            roots = _roots(self._model, self._weights)
            self._is_timed_at_once = len(roots) == 1
            # Entered last, so that a root that is itself a convolution is timed as well as compared.
            for root in roots:
                stack.enter_context(self._at_first_call(root, found, self._compare_root))
            yield verdicts
        verdict = self._verdict(found)
        verdicts.update({patch.site: verdict for patch in patches})

    @contextmanager
    def _at_first_call(self, module: nn.Module, found: list[Comparison], compare: Compare) -> Iterator[None]:
        technique = self
        is_due = True

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                nonlocal is_due
                if self is module and is_due and not technique._is_trying:
                    is_due, technique._is_trying = False, True
                    try:
                        found.append(compare(module, functools.partial(original, module), args, kwargs))
                    finally:
                        technique._is_trying = False
                    if found[-1].failure or (technique._is_timed_at_once and not technique._verdict(found).keep):
                        # Nothing more is to be measured: let this step be the original's, to the last bit.
                        technique._take_back()
                        technique._hold()
                if not technique._is_in_force():
                    args, kwargs = _contiguous((args, kwargs))
                return original(self, *args, **kwargs)

            return forward

        probe = MethodPatch("", "trial", module, "forward", wrap)
        probe.apply()
        try:
            yield
        finally:
            probe.undo()

    def _compare_convolution(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Comparison:
        if not self._is_in_force():
            return Comparison()
        if _is_lone_bfloat16(args, kwargs):
            return Comparison(failure=_LONE_SAMPLE)
        # Few samples tell all: a convolution treats each alike. Its gradients too: it has no kinks that rounding
        # could fall on either side of, as a whole network has.
        trial = Trial(module, args, kwargs, with_gradients=torch.is_grad_enabled(), samples=2)
        original, candidate = Contender(_on_contiguous(forward), state=self._taken_back), Contender(forward)
        found = trial.numbers(original, candidate)
        # Some models are entered by another method than forward (`model.forward_features(x)`): no root was timed then.
        return found if found.failure or self._is_timed or not self._may_time() else trial.time(original, candidate)

    def _compare_root(self, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> Comparison:
        original, candidate = Contender(_on_contiguous(forward), state=self._taken_back), Contender(forward)
        with self._during_trial():
            self._is_timed = True
            if _is_lone_bfloat16(args, kwargs):
                return Comparison(failure=_LONE_SAMPLE)
            found = Trial(module, args, kwargs, with_gradients=False).numbers(original, candidate)
            if found.failure or not self._may_time():
                return found
            return Trial(module, args, kwargs, with_gradients=torch.is_grad_enabled()).time(original, candidate)

    def _may_time(self) -> bool:
        # A deterministic run decides nothing by the clock.
        return self._is_auto and not torch.are_deterministic_algorithms_enabled()

    @contextmanager
    def _taken_back(self) -> Iterator[None]:
        applied = self._take_back()
        try:
            yield
        finally:
            for weight in applied:
                weight.apply()

    def _take_back(self) -> list[WeightLayout]:
        applied = [weight for weight in self._weights if weight.is_applied]
        for weight in reversed(applied):
            weight.undo()
        return applied

    def _hold(self) -> None:
        for weight in self._weights:
            if _has_buckets() and not weight.is_applied:
                weight.hold()

    @staticmethod
    def _verdict(found: list[Comparison]) -> Verdict:
        if not found:
            return Verdict(keep=False, reason="no convolution ran on the first step, so nothing was tried")
        failure = next((comparison.failure for comparison in found if comparison.failure), "")
        if failure:
            return Verdict(keep=False, reason=failure)
        original_ms = sum(comparison.original_ms or 0.0 for comparison in found)
        candidate_ms = sum(comparison.candidate_ms or 0.0 for comparison in found)
        if not candidate_ms:  # untimed
            return Verdict(keep=True)
        measured = (
            f"{original_ms / candidate_ms:.2f}x the speed here ({original_ms:.1f} → {candidate_ms:.1f} ms a pass)"
        )
        return Verdict(keep=candidate_ms <= NOT_SLOWER * original_ms, reason=measured)

    def _is_in_force(self) -> bool:
        return any(weight.is_applied for weight in self._weights)

    def wants(self, dim: int) -> bool:
        """Whether batches of tensors of ``dim`` dimensions are to be in channels_last."""
        return dim in self._dims and self._is_in_force()

    def strides(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """For every weight in another layout than the user's: the strides that the user's has."""
        return {p: stride for weight in self._weights for p, stride in weight.strides.items()}

    @override
    def settled(self) -> None:
        self._hold()
        if self._optimizers is not None:
            self._optimizers.match()

    @override
    def close(self) -> None:
        for weight in reversed(self._weights):
            weight.release()
        if self._optimizers is not None:
            self._optimizers.match()
            self._optimizers.close()
            self._optimizers = None


def _is_lone_bfloat16(args: Any, kwargs: Any) -> bool:
    images = [t for t in tensors_in((args, kwargs)) if t.dim() in FORMAT_NAMES]
    return (
        any(image.shape[0] == 1 and image.device.type == "cpu" for image in images)
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
    )


def _contiguous(data: Any) -> Any:
    return map_tensors(lambda t: t.contiguous() if t.layout == torch.strided else t, data)


def _on_contiguous(forward: Forward) -> Forward:
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _contiguous((args, kwargs))
        return forward(*args, **kwargs)

    return call


def _roots(model: nn.Module, weights: Iterable[WeightLayout]) -> list[nn.Module]:
    """The outermost modules that are called and hold convolutions: a trial of each covers all that happens between.

    ``model`` itself is one only if it holds convolutions directly; then those count too, in case its training step
    calls them without its ``forward``.
    """
    sites = [weight.site for weight in weights]
    roots = [model] if any("." not in site for site in sites) else []
    parts = [model]
    while parts:
        part = parts.pop()
        for child in part.children():
            if not any(isinstance(m, _CONVOLUTIONS[4] + _CONVOLUTIONS[5]) for m in child.modules()):
                continue
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                parts.append(child)
            else:
                roots.append(child)
    return list(dict.fromkeys(roots))


def wants_channels_last(techniques: Sequence[Technique]) -> Callable[[], bool]:
    """Tells, whenever it is asked, whether the model is in channels_last just then."""
    memory_format = next((technique for technique in techniques if isinstance(technique, MemoryFormat)), None)
    return lambda: memory_format is not None and memory_format.wants(4)
