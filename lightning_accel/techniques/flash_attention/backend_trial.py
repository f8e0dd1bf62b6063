"""Tries backends on one call of a site: same numbers? which is the fastest?

Nothing of the user's runs an extra time for that. A site computes its call once, as ever, and at the place where its
attention stands it hands the original and the fused form to a :class:`Rehearsal`, which tries them on the very tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.core.dropout import is_dropout_off
from lightning_accel.core.measured import Measurement, together
from lightning_accel.core.purse import Purse
from lightning_accel.experiment.screening import fastest, screen
from lightning_accel.experiment.tolerance import Spread
from lightning_accel.experiment.trial import NumbersComparison, Trial
from lightning_accel.experiment.trial_runs import TrialSide
from lightning_accel.techniques.flash_attention.backends import Backend
from lightning_accel.techniques.flash_attention.call import AttentionCall, sdpa
from lightning_accel.techniques.technique_context import Verdict

ORIGINAL = "original"


class WatchedBackend(Backend):
    """A backend that says what it was asked for and could not do, once each; torch's own choice takes its place."""

    def __init__(self, backend: Backend, complain: Callable[[str], None] = lambda lack: None) -> None:
        self.name = backend.name
        self.lacking: list[str] = []
        self._backend, self._complain = backend, complain

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        if is_dropout_off():  # which the kernels of other packages cannot know
            call = replace(call, dropout_p=0.0)
        lack = self._backend.lacks(call)
        if lack is None:
            return self._backend(call)
        if lack not in self.lacking:
            self.lacking.append(lack)
            self._complain(lack)
        return sdpa(call)


@dataclass(eq=False)
class Rehearsal:
    """One call of a site, at whose attentions backends are tried beside the original, which computes the call.

    By the clock the fastest is taken, the original among them; otherwise the first, by preference, that agrees.
    """

    backends: Sequence[WatchedBackend]
    _: KW_ONLY
    by_clock: bool
    purse: Purse | None = None  # what pays
    # What its attentions, by their place in the call, may be off by, as far as sites that are alike have measured it;
    # what this call measures is added.
    spreads: dict[int, Spread] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._failures: dict[str, NumbersComparison] = {}
        self._measured: dict[str, list[Measurement]] = defaultdict(list)
        self._num_attentions = 0

    def rehearse(
        self,
        original: Callable[..., Any],  # the attention as the site computes it, by torch's own operations
        fused: Callable[[Backend], Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        module: nn.Module | None = None,  # whose parameters take part; None: nothing but the arguments does
        judged: Callable[[Any], Any] = lambda outputs: outputs,  # what is to be compared of what both return
        keeps_strides: bool = True,  # whether that has to lie alike in memory
    ) -> None:
        """Tries every backend on one attention. Its results go nowhere."""
        self._num_attentions += 1
        trial = Trial(
            nn.Module() if module is None else module,
            args,
            kwargs or {},
            with_gradients=torch.is_grad_enabled(),
            judged=judged,
            keeps_strides=keeps_strides,
            wide=original if module is None else None,
            purse=self.purse,
            alike=self.spreads.get(self._num_attentions, Spread()),
            formulas=[TrialSide(fused(ByRows()))],
        )
        for backend in self.backends:
            if backend.name not in self._failures:
                found = self._tried(trial, TrialSide(original), TrialSide(fused(backend)), backend)
                if found.failure:
                    self._failures[backend.name] = found

    def _tried(
        self, trial: Trial, original: TrialSide, candidate: TrialSide, backend: WatchedBackend
    ) -> NumbersComparison:
        """Whether a backend may compute this attention, and what it takes."""
        found = trial.numbers(original, candidate)
        if found.spread is not None and found.spread.num_orders:
            trial.alike = self.spreads[self._num_attentions] = found.spread
        self._measured[backend.name].append(found.measured())
        if found.failure:
            return found
        if backend.lacking and len(self.backends) > 1:
            return NumbersComparison(failure=backend.lacking[-1])
        if self.by_clock:
            found = trial.time(original, candidate)
            self._measured[backend.name].append(found.measured())
        return found

    def verdict(self, shapes: str, nothing_found: str | None) -> Verdict:
        """What came out for a class of shapes; no choice for it if none of the backends may be tried there again.

        ``nothing_found`` is what the site says of a call in which there was nothing to fuse.
        """
        original = {shapes: ORIGINAL}
        if nothing_found is not None and not self._failures:
            return Verdict("refused", nothing_found, original)
        if not self._num_attentions:
            return Verdict("refused", "its forward ran no attention that can be fused", original)
        agreeing = [backend.name for backend in self.backends if backend.name not in self._failures]
        if not agreeing:
            is_one = len(self.backends) == 1
            reasons = [one.failure if is_one else f"{name}: {one.failure}" for name, one in self._failures.items()]
            # One backend that was not tried to the end, or failed, leaves it open whether all of them are wrong.
            kind = max((one.kind for one in self._failures.values()), key=("refused", "failed", "too_dear").index)
            return Verdict(kind, "; ".join(reasons), measured=self._figures(*self._failures))
        if not self.by_clock:
            return Verdict("kept", f"by {agreeing[0]}", {shapes: agreeing[0]}, self._figures(agreeing[0]))
        figures: dict[str, Any] = {name: self._figures(name) for name in agreeing}
        best = fastest({name: [one.candidate_ms / one.original_ms] for name, one in figures.items()})
        before, after = figures[best].original_ms, figures[best].candidate_ms
        measured = f"{before / after:.2f}x the speed here ({before:.2f} → {after:.2f} ms a pass)"
        # At the same speed, too, the fused form wins: its memory grows with the length, not with its square.
        if screen(before, after) == "slower":
            return Verdict("refused", f"not faster by {best}: {measured}", original, figures[best])
        return Verdict("kept", f"by {best}, {measured}", {shapes: best}, figures[best])

    def _figures(self, *backends: str) -> Measurement:
        return together(one for name in backends for one in self._measured[name])


class ByRows(Backend):
    """Attention by the formula of fused kernels, in plain operations: what that is off, each of them may be off.

    Going backward through a softmax takes, for each query, the sum over all keys of weights times their gradients.
    Fused kernels, which keep no weights, take the same sum over the features of output times gradient instead
    (FlashAttention, https://arxiv.org/abs/2205.14135, algorithm 4), and the output has been rounded by then. Where
    weights are nearly alike, as in a network that has hardly been trained, little is left after that sum is subtracted,
    and what was rounded off is much of it: in bfloat16 4% of the gradient of queries and keys, by whichever kernel.

    Takes every call without dropout, in memory that grows with the square of the length.
    """

    name = "by rows"

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        if call.dropout_p and not is_dropout_off():
            raise NotImplementedError("the formula is written without dropout")
        call = call.with_dense_mask()
        mask = call.band(None, 0) if call.is_causal else call.mask
        if mask is None:
            mask = call.query.new_zeros((), dtype=torch.float32)
        elif mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -math.inf)
        result: Tensor = _Attention.apply(call.query, call.key, call.value, mask, call.true_scale)  # type: ignore[no-untyped-call]
        return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        weights = ((query @ key.mT).to(wide) * scale + mask).softmax(-1)
        output = weights.to(query.dtype) @ value
        ctx.save_for_backward(query, key, value, mask, weights, output)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, weights, output = ctx.saved_tensors
        of_weights = (gradient @ value.mT).to(weights.dtype)
        sums = (gradient.to(weights.dtype) * output.to(weights.dtype)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - sums)
        scaled = (of_scores * ctx.scale).to(query.dtype)
        of_mask = of_scores.sum_to_size(mask.shape).to(mask.dtype) if ctx.needs_input_grad[3] else None
        return scaled @ key, scaled.mT @ query, weights.to(query.dtype).mT @ gradient, of_mask, None
