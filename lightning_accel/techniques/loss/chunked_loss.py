"""A linear layer and the cross-entropy of its output, so that the logits are never there but for a few rows at a time.

Gradients are computed on the way, as Liger Kernel does (Hsu et al., 2024, https://arxiv.org/abs/2410.10989): three
products of matrices in all, like the plain way; to compute logits again in the backward pass would make it four. What
the gradient is scaled by (the upstream gradient, the number of targets) is multiplied in at the backward pass, so that
float16 under a gradient scaler does not underflow, and weights' gradients are added up in float32.

Torch's own ``F.linear_cross_entropy`` (2.13) does the like and is not used: it has no label smoothing, ``mean`` is
divided by before float16 is rounded, and a second backward pass raises. With its own choice of pieces it takes several
times as long as the plain way on a CPU; with larger ones it is as fast as this, in two to five times the memory
(``benchmarks/linear_cross_entropy.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function
from typing_extensions import override

_SHARE = 16  # of the rows that are computed at a time
_FEWEST_ROWS = {"cpu": 128, "cuda": 1024}  # of fewer, adding up the weight's gradient takes longer than its products
_CACHE_BYTES = 2 << 20  # of the rows whose softmax is taken at a time on a CPU
_PRODUCT_BYTES = {"cpu": 8 << 20, "cuda": 32 << 20}  # of the part of the weight's gradient that a product is added to
_BOOST = 2.0**10  # on float16 probabilities, of which one in 100,000 classes is below what float16 has digits for

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class LossForm:
    """How logits and loss are computed; the first three as in :func:`torch.nn.functional.cross_entropy`."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    logits_dtype: torch.dtype = torch.float32  # in which the product is computed: under autocast not the weight's
    loss_dtype: torch.dtype = torch.float32  # of the result; its softmax is taken in float32 at least

    @property
    def wide(self) -> torch.dtype:
        """In which probabilities are computed and gradients added up."""
        return torch.promote_types(torch.promote_types(self.loss_dtype, self.logits_dtype), torch.float32)

    def cross_entropy(self, logits: Tensor, target: Tensor, class_weight: Tensor | None) -> Tensor:
        """Torch's own, of logits that are there, in their dtype."""
        return F.cross_entropy(
            logits,
            target,
            None if class_weight is None else class_weight.to(logits.dtype),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


@dataclass(frozen=True)
class LossProblem:
    """One cross-entropy of one linear layer.

    Where it ``computes_twice``, the backward pass computes the logits again; else gradients as large as the layer wait
    for it, and are there as often as there are losses. ``reduction="none"`` always does.
    """

    rows: Tensor  # what the layer is given, (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    target: Tensor  # classes, (N,), int64
    class_weight: Tensor | None  # as `weight` of the cross-entropy, (V,); it gets no gradient
    form: LossForm
    rows_at_once: int | None = None  # None: a sixteenth, and more where these are too few to be fast
    computes_twice: bool = False


def linear_cross_entropy(problem: LossProblem) -> Tensor:
    """``F.cross_entropy(F.linear(rows, weight, bias), target, …)`` without the logits: a scalar, or (N,) unreduced.

    Gradients flow to rows, weight and bias, through a second backward pass and through one of higher order, too;
    these compute anew, the last one with all logits.
    """
    p = problem
    return _LinearCrossEntropy.apply(p.rows, p.weight, p.bias, p, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]


def plain_cross_entropy(problem: LossProblem) -> Tensor:
    """The same, with the logits, as it would be written."""
    p, form = problem, problem.form
    rows, weight = (t.to(form.logits_dtype) for t in (p.rows, p.weight))
    bias = None if p.bias is None else p.bias.to(form.logits_dtype)
    return form.cross_entropy(F.linear(rows, weight, bias).to(form.loss_dtype), p.target, p.class_weight)


class _LinearCrossEntropy(Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, problem: LossProblem, with_gradients: bool
    ) -> Tensor:
        form = problem.form
        ctx.wanted = tuple(with_gradients and needed for needed in ctx.needs_input_grad[:3])
        ctx.save_for_backward(rows, weight, bias, problem.target, problem.class_weight)
        ctx.form, ctx.rows_at_once = form, problem.rows_at_once
        if form.reduction == "none":
            losses, _ = _in_pieces(problem, (False, False, False))
            return losses.to(form.loss_dtype)
        wanted = (False, False, False) if problem.computes_twice else ctx.wanted
        losses, gradients = _in_pieces(problem, wanted)
        ctx.gradients = None if problem.computes_twice else gradients
        total, ctx.share = losses.sum(), losses.new_full((), 1 / _boost(form))
        if form.reduction == "mean":
            number = _counts(problem).sum()
            total = total / number
            # Where nothing counts, the mean is 0 / 0, and its gradient 0.
            ctx.share = torch.where(problem.target.ne(form.ignore_index).any(), ctx.share / number, 0.0)
        return total.to(form.loss_dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        upstream: Tensor = gradients[0]
        # In a second pass, torch says where ``retain_graph=True`` was not given.
        is_computed_anew = torch.is_grad_enabled() or ctx.form.reduction == "none" or ctx.gradients is None
        saved: Any = ctx.saved_tensors if is_computed_anew else (None,) * 5
        rows, weight, bias, target, class_weight = saved
        problem = LossProblem(rows, weight, bias, target, class_weight, ctx.form, ctx.rows_at_once)
        if torch.is_grad_enabled():  # by create_graph=True
            return (*_differentiable(problem, ctx.wanted, upstream), None, None)
        if ctx.form.reduction == "none":
            _, found = _in_pieces(problem, ctx.wanted, upstream)
            share = upstream.new_full((), 1 / _boost(ctx.form), dtype=ctx.form.wide)
        else:
            found, ctx.gradients = ctx.gradients, None
            if found is None:
                _, found = _in_pieces(problem, ctx.wanted)
            share = ctx.share * upstream
        return (*(None if gradient is None else _scaled(gradient, share) for gradient in found), None, None)


def _scaled(gradient: Tensor, share: Tensor) -> Tensor:
    # In float32: a scale may be more than float16 holds. Autograd itself then casts to the dtype of what was given.
    return gradient.mul_(share) if gradient.dtype == share.dtype else gradient.to(share.dtype).mul_(share)


def _differentiable(problem: LossProblem, wanted: Sequence[bool], upstream: Tensor) -> list[Tensor | None]:
    inputs = [t for t, needed in zip((problem.rows, problem.weight, problem.bias), wanted, strict=True) if needed]
    loss = plain_cross_entropy(problem)
    found = iter(torch.autograd.grad(loss, [t for t in inputs if t is not None], upstream, create_graph=True))
    return [next(found) if needed else None for needed in wanted]


def _boost(form: LossForm) -> float:
    return _BOOST if form.logits_dtype == torch.float16 else 1.0


def _counts(problem: LossProblem) -> Tensor:
    """For every row how much it counts: its class's weight, or 1; 0 where it is ignored.

    Shape: (N,).
    """
    kept = problem.target.ne(problem.form.ignore_index)
    if problem.class_weight is None:
        return kept.to(problem.form.wide)
    weights = problem.class_weight.to(problem.form.wide)[problem.target.where(kept, 0)]
    return weights.where(kept, 0.0)


def _in_pieces(
    problem: LossProblem, wanted: Sequence[bool], upstream: Tensor | None = None
) -> tuple[Tensor, Gradients]:
    with torch.autocast(problem.rows.device.type, enabled=False):  # which dtype each part has is settled here
        return _computed(problem, wanted, upstream)


def _computed(problem: LossProblem, wanted: Sequence[bool], upstream: Tensor | None) -> tuple[Tensor, Gradients]:
    """The losses, (N,), and the gradients of their sum, or of their product with ``upstream``, (N,), times the boost.

    With p the probabilities, y the targets, e the smoothing and w the weights of the V classes, the loss of a row is
    ``-(1 - e) w[y] log p[y] - e / V sum(w log p)``, and its gradient by the logits
    ``((1 - e) w[y] + e / V sum(w)) p - (1 - e) w[y] onehot(y) - e / V w``.
    """
    form, wide = problem.form, problem.form.wide
    rows, weight = (t.detach().to(form.logits_dtype) for t in (problem.rows, problem.weight))
    bias = None if problem.bias is None else problem.bias.detach().to(form.logits_dtype)
    num_rows, num_classes = len(rows), len(weight)
    kept = problem.target.ne(form.ignore_index)
    target = problem.target.where(kept, 0).unsqueeze(1)
    counts, hard, soft = _counts(problem), 1 - form.label_smoothing, form.label_smoothing / num_classes
    class_weight = None if problem.class_weight is None else problem.class_weight.detach().to(wide)
    # With smoothing and weights all classes differ; else a row's gradient is that of plain targets, times a factor.
    is_weighted = soft > 0 and class_weight is not None
    factors = kept.to(wide) if is_weighted else counts
    if upstream is not None:
        factors = (factors * upstream.to(wide)).where(kept, 0.0)

    losses = rows.new_empty(num_rows, dtype=wide)
    by_rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if wanted[0] else None
    by_weight = torch.zeros_like(weight, dtype=wide, memory_format=torch.contiguous_format) if wanted[1] else None
    by_bias = torch.zeros(num_classes, 1, dtype=wide, device=rows.device) if wanted[2] else None
    at_once = problem.rows_at_once or _rows_at_once(num_rows, rows.device)
    within = _rows_in_cache(at_once, num_classes, wide, rows.device)
    buffer = rows.new_empty(min(at_once, num_rows), num_classes)
    scratch = rows.new_empty(min(within, num_rows), num_classes, dtype=wide)
    for start in range(0, num_rows, at_once):
        piece = slice(start, start + at_once)
        some = rows[piece]
        logits = buffer[: len(some)]
        if bias is None:
            torch.mm(some, weight.t(), out=logits)
        else:
            torch.addmm(bias, some, weight.t(), out=logits)
        for first in range(0, len(some), within):
            part = slice(start + first, min(start + first + within, start + len(some)))
            block = logits[first : first + within]
            log_p = torch.log_softmax(block, 1, dtype=wide, out=scratch[: len(block)])
            log_p_target = log_p.gather(1, target[part]).squeeze(1)
            losses[part] = (-hard * counts[part] * log_p_target).where(kept[part], 0.0)  # where log_p may be NaN
            if soft:
                all_classes = log_p.sum(1) if class_weight is None else log_p @ class_weight
                losses[part] -= soft * all_classes.where(kept[part], 0.0)
            if not any(wanted):
                continue
            # In float32 up to the rounding of the difference, which is small where a model is sure.
            by_logits = torch.exp(log_p, out=block if block.dtype == wide else log_p)
            if is_weighted:
                assert class_weight is not None
                by_logits.mul_((hard * counts[part] + soft * class_weight.sum()).unsqueeze(1)).sub_(soft * class_weight)
            elif soft:
                by_logits.sub_(soft)
            of_target = (hard * (counts[part] if is_weighted else torch.ones_like(counts[part]))).unsqueeze(1)
            by_logits.scatter_(1, target[part], by_logits.gather(1, target[part]) - of_target)
            if by_logits is not block:
                block.copy_(by_logits.mul_(_boost(form)))
        factor = factors[piece].unsqueeze(1).to(rows.dtype)
        if by_rows is not None:
            torch.mm(logits, weight, out=by_rows[piece]).mul_(factor)
        if by_weight is not None:
            _add_product(by_weight, logits, some * factor)
        if by_bias is not None:
            _add_product(by_bias, logits, factor)
    return losses, (by_rows, by_weight, None if by_bias is None else by_bias.squeeze(1))


def _rows_at_once(num_rows: int, device: torch.device) -> int:
    wanted = max(-(-num_rows // _SHARE), _FEWEST_ROWS.get(device.type, 128))
    pieces = max(1, num_rows // wanted)
    return max(1, -(-num_rows // pieces))  # of equal size


def _rows_in_cache(at_once: int, num_classes: int, dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cpu":
        return max(1, min(at_once, _CACHE_BYTES // (num_classes * dtype.itemsize)))
    return max(1, at_once // 4)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds ``left.T @ right`` to ``total``, which may be wider than they are."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
        return
    part_bytes = _PRODUCT_BYTES.get(total.device.type, 8 << 20)
    at_once = max(1, part_bytes // (total.shape[1] * total.element_size()))
    for start in range(0, len(total), at_once):
        part = slice(start, start + at_once)
        some = left[:, part].t()
        # The sum within a product of halves is in float32 everywhere; that it comes out so, only CUDA has.
        comes_out_wide = left.is_cuda and torch.version.hip is None and total.dtype == torch.float32
        if left.dtype == torch.float16 and not comes_out_wide:  # which does not hold a sum over many rows of one class
            total[part].addmm_(some.to(total.dtype), right.to(total.dtype))
        else:
            total[part] += torch.mm(some, right, out_dtype=total.dtype) if comes_out_wide else torch.mm(some, right)
