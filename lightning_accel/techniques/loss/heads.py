"""One linear head in a run: when it leaves its logits out, how often somebody wanted them after all, and its trial."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.core.isolation import is_trial
from lightning_accel.core.measured import together
from lightning_accel.core.torch_private.autograd import is_transformed
from lightning_accel.experiment.trial import NumbersComparison, Trial
from lightning_accel.experiment.trial_runs import TrialSide
from lightning_accel.techniques.loss.chunked_loss import LossForm, LossProblem, linear_cross_entropy
from lightning_accel.techniques.loss.deferred import DeferredLogits, Family, is_checkpointing
from lightning_accel.techniques.technique_context import TechniqueContext, Verdict

SMALLEST_BYTES = 16 << 20
"""Of logits: fewer fit in caches, and computing them in pieces gains nothing."""

PATIENCE = 2
"""Steps running in which logits are read, after which a head computes them at once: now and then it may be."""

ROWS, CLASSES, AT_ONCE = 48, 4096, 16  # three pieces; a copy of the weight in float64 is small beside the logits

_DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
}


class Head:
    """A linear layer whose logits are left out where their cross-entropy is all that is asked of them."""

    def __init__(
        self,
        site: str,
        module: nn.Linear,
        *,
        always: bool,  # whether also where that takes longer: reduction="none"
        smallest: int,  # bytes of logits, below which it computes them at once
        run: TechniqueContext,  # told where it is not to act any more, and of the first loss of each form
    ) -> None:
        self.site, self.module = site, module
        self.stage: str | None = None  # of the step under way
        self.num_fused = 0
        self.is_paused = False
        self._always, self._smallest, self._run = always, smallest, run
        self._families: list[weakref.ref[Family]] = []
        self._reader = ""  # in the step under way
        self._num_waiting = 0  # losses of this step whose gradients are kept for a backward pass
        self._reads: Counter[str] = Counter()  # by stage: steps running
        self._plain_in: set[str] = set()
        self._tried: set[Any] = set()

    @property
    def is_used(self) -> bool:
        """Whether a loss was computed in pieces."""
        return self.num_fused > 0

    def rebound(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The layer's forward."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # First of all, or a compiler would look at what follows.
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            if self.stage is None or module is not self.module or len(args) != 1 or kwargs:
                return original(module, *args, **kwargs)
            dtype = self._dtype_of_logits(args[0])
            return original(module, *args) if dtype is None else self._defer(args[0], dtype)

        return forward

    def begin(self, stage: str) -> None:
        """A step begins."""
        self.stage, self._reader = None if stage in self._plain_in else stage, ""
        self._num_waiting = 0

    def end(self, *, is_whole: bool) -> None:
        """It is over. Logits that somebody still holds are computed now, while weights are what they were."""
        stage, self.stage = self.stage, None
        if stage is None:
            return
        if is_whole:
            self._read_held("somebody who holds them after the step")
        self._families = []
        if not is_whole:
            return
        self._reads[stage] = self._reads[stage] + 1 if self._reader else 0
        if self._reads[stage] >= PATIENCE:
            self._give_up(stage, f"its logits are read, by {self._reader}")

    def before_weights_change(self) -> None:
        """Computes what is held, in the middle of a step."""
        self._read_held("somebody who holds them while weights change")

    def _read_held(self, who: str) -> None:
        for ref in self._families:
            if (family := ref()) is not None and family.living:
                family.read_by(who)

    def _give_up(self, stage: str, why: str) -> None:
        self._plain_in.add(stage)
        if stage == "train":
            self._run.refuse(self.site, why)
        else:
            self._run.revise(self.site, Verdict("kept", f"in pieces while training; in {stage} {why}"))

    def _defer(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        module = self.module
        if not (torch.is_grad_enabled() and module.weight.requires_grad):
            # The layer would save nothing of its input, which may then be written to: a copy, small beside logits.
            rows = rows.clone()
        family = Family(rows, module.weight, module.bias, dtype, self._fuse, self._read)
        self._families.append(weakref.ref(family))
        return DeferredLogits.of_call(family)

    def _read(self, who: str) -> None:
        self._reader = who

    def _dtype_of_logits(self, x: Any) -> torch.dtype | None:
        """Of this call; None where it is none to be put off."""
        module = self.module
        weight, bias = module.weight, module.bias
        given = (x, weight) if bias is None else (x, weight, bias)
        # Sharded, quantised and whatever else is a kind of its own computes by its own rules.
        if any(type(t) not in (Tensor, nn.Parameter) for t in given) or x.dim() == 0:
            return None
        device = x.device.type
        dtype: torch.dtype = x.dtype
        if torch.is_autocast_enabled(device) and dtype.is_floating_point and torch.float64 not in (dtype, weight.dtype):
            dtype = torch.get_autocast_dtype(device)
        elif any(t.dtype != dtype for t in given):
            return None
        if dtype not in _DTYPES.get(device, ()) or weight.device != x.device:
            return None
        if x.numel() // x.shape[-1] * len(weight) * dtype.itemsize < self._smallest:
            return None
        # Without gradients in training: inside an autograd.Function perhaps, which makes it a part of its graph.
        if is_checkpointing() or (self.stage == "train" and not torch.is_grad_enabled()):
            return None
        is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        if is_traced or is_transformed() or is_trial():
            return None
        return dtype

    def _fuse(self, problem: LossProblem) -> Tensor | str:
        form = problem.form
        needs_gradients = torch.is_grad_enabled() and (problem.rows.requires_grad or problem.weight.requires_grad)
        # A gradient as large as the weight waits for each loss: of few rows the logits are less than that.
        is_small = self._num_waiting > 0 and len(problem.rows) < problem.rows.shape[1]
        computes_twice = form.reduction == "none" or is_small
        if needs_gradients and computes_twice and not self._always:
            which = "one of several losses of few rows" if is_small else "a loss of every token by itself"
            return f"{which}, whose products would be computed twice (techniques.loss='on' has them so)"
        if self._run.verify and (why := self._failure(problem, needs_gradients)):
            self._give_up(self.stage or "train", why)
            return why
        self.num_fused += 1
        loss = linear_cross_entropy(replace(problem, computes_twice=computes_twice))
        if loss.grad_fn is not None:
            self._num_waiting += not computes_twice
            loss.grad_fn.register_prehook(functools.partial(self._goes_backward, is_waiting=not computes_twice))
        return loss

    def _goes_backward(self, _: Any, *, is_waiting: bool) -> None:
        self._num_waiting = max(0, self._num_waiting - is_waiting)
        self.before_weights_change()

    def _failure(self, problem: LossProblem, with_gradients: bool) -> str:
        """What is wrong with the numbers of the first loss of its form; empty: nothing."""
        form: LossForm = problem.form
        # Smoothing that is annealed is another number at every step, in the same operations.
        form = replace(form, label_smoothing=float(form.label_smoothing > 0))
        autocast = torch.is_autocast_enabled(problem.rows.device.type)
        kind = (form, problem.class_weight is None, with_gradients, autocast)
        if kind in self._tried:
            return ""
        found = compared(problem, with_gradients)
        self._run.measured = together(filter(None, [self._run.measured, found.measured()]))
        if not found.failure:
            self._tried.add(kind)
        return found.failure


# -- its trial: in pieces and plain, on a few rows of the run's own and the first classes of its own weight -----------


def compared(problem: LossProblem, with_gradients: bool) -> NumbersComparison:
    """Whether the numbers differ from the plain way's by more than its own spread.

    What is in float64 is tried in float32: there is no wider yardstick, and the few orders in which a small problem can
    be summed show less of its rounding than the many of pieces.
    """
    form, plain = problem.form, _Plain(problem)
    rows, target = problem.rows.detach()[:ROWS].clone(), _targets(problem)
    if form.wide == torch.float64:
        form = plain.form = replace(form, logits_dtype=torch.float32, loss_dtype=torch.float32)
        plain, rows = plain.float(), rows.float()
    rows.requires_grad_(with_gradients and problem.rows.requires_grad)

    def in_pieces(rows: Tensor, target: Tensor) -> Tensor:
        small = replace(problem, rows=rows, weight=plain.weight, bias=plain.bias, target=target)
        return linear_cross_entropy(replace(small, class_weight=plain.class_weight, form=form, rows_at_once=AT_ONCE))

    trial = Trial(plain, (rows, target), with_gradients=with_gradients, samples=None)
    return trial.numbers(TrialSide(plain), TrialSide(in_pieces))


def _targets(problem: LossProblem) -> Tensor:
    """Of the first rows, among the classes that are tried. Where more than a sixth are ignored, others are made up."""
    target = problem.target[:ROWS]
    numbers = torch.arange(len(target), device=target.device)
    made_up = torch.where(numbers % 6 == 0, problem.form.ignore_index, numbers)
    target = torch.where(target == problem.form.ignore_index, made_up, target)
    return torch.where(target == problem.form.ignore_index, target, target % min(CLASSES, len(problem.weight)))


class _Plain(nn.Module):
    """The plain way, in whatever dtype its parameters are."""

    def __init__(self, problem: LossProblem) -> None:
        super().__init__()
        self.form = problem.form
        self.weight = _part(problem.weight)
        self.bias = None if problem.bias is None else _part(problem.bias)
        weight = problem.class_weight
        self.class_weight: Tensor | None
        self.register_buffer("class_weight", None if weight is None else weight.detach()[:CLASSES].clone())

    @override
    def forward(self, rows: Tensor, target: Tensor) -> Any:
        form = self.form
        logits = F.linear(rows, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, form.loss_dtype))
        return form.cross_entropy(logits, target, self.class_weight)


def _part(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach()[:CLASSES].clone(), parameter.requires_grad)
