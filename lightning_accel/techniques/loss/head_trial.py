"""The trial of a loss: in pieces and plain, on a few rows of the run's own and the first classes of its own weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.experiment.trial import NumbersComparison, Trial
from lightning_accel.experiment.trial_runs import TrialSide
from lightning_accel.techniques.loss.chunked_loss import LossProblem, linear_cross_entropy

ROWS, CLASSES, AT_ONCE = 48, 4096, 16  # three pieces; a copy of the weight in float64 is small beside the logits


def compared(problem: LossProblem, with_gradients: bool) -> NumbersComparison:
    """Whether the numbers differ from the plain way's by more than its own spread.

    What is in float64 is tried in float32: there is no wider yardstick, and the few orders in which a small problem can
    be summed show less of its rounding than the many of pieces.
    """
    if problem.form.wide == torch.float64:
        problem = _in_float32(problem)
    some = problem.rows.detach()[:ROWS]
    target = _targets(problem)
    plain = _Plain(problem)
    rows = some.clone().requires_grad_(with_gradients and problem.rows.requires_grad)

    def in_pieces(rows: Tensor, target: Tensor) -> Tensor:
        small = replace(
            problem,
            rows=rows,
            weight=plain.weight,
            bias=plain.bias,
            target=target,
            class_weight=plain.class_weight,
            rows_at_once=AT_ONCE,
        )
        return linear_cross_entropy(small)

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
        self._form = problem.form
        self.weight = _part(problem.weight)
        self.bias = None if problem.bias is None else _part(problem.bias)
        weight = problem.class_weight
        self.class_weight: Tensor | None
        self.register_buffer("class_weight", None if weight is None else weight.detach()[:CLASSES].clone())

    @override
    def forward(self, rows: Tensor, target: Tensor) -> Any:
        form = self._form
        logits = F.linear(rows, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, form.loss_dtype))
        return form.cross_entropy(logits, target, self.class_weight)


def _in_float32(problem: LossProblem) -> LossProblem:
    def cast(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.detach().float().requires_grad_(tensor.requires_grad)

    return replace(
        problem,
        rows=cast(problem.rows[:ROWS]),
        weight=cast(problem.weight[:CLASSES]),
        bias=None if problem.bias is None else cast(problem.bias[:CLASSES]),
        class_weight=None if problem.class_weight is None else cast(problem.class_weight[:CLASSES]),
        form=replace(problem.form, logits_dtype=torch.float32, loss_dtype=torch.float32),
    )


def _part(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach()[:CLASSES].clone(), parameter.requires_grad)
