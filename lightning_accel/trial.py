"""Trials: the original against a candidate, on the user's own first input. Same numbers? Not slower?

A trial leaves no trace in the run: random streams, buffers, gradients and dispatch modes are as they were.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.isolation import device_of, dropout_off, isolated, own_rng
from lightning_accel.tree import map_tensors, tensors_in

ORACLE_SAMPLES = 4
ORACLE_MAX_BYTES = 2 << 30
ORACLE_MAX_SAVED_BYTES = 1 << 29  # of activations: more would take longer in float64 than it tells
ERROR_FACTOR = 8  # Winograd convolutions are off by that much more than direct ones, and nobody calls them wrong
MIN_PAIRS, MAX_PAIRS = 3, 15
TIMED_S = 1.0
NOT_SLOWER = 1.02  # a median this close to the original's is a tie: the clocks of shared machines tell no more


@dataclass(frozen=True)
class Contender:
    """One side of a trial.

    Attributes:
        call: The computation, called with the site's own arguments.
        state: Entered around it, untimed: whatever makes the model ready for this side.
    """

    call: Callable[..., Any]
    state: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a trial measured.

    Attributes:
        failure: What the candidate raised, or how its numbers differ; empty when they agree.
        error: The candidate's largest relative error, against the oracle where there is one.
        allowed_error: What the original's own error in the same dtype allows.
        original_ms: Median milliseconds of the original, forward and backward; None untimed.
        candidate_ms: The candidate's.
        compared: How many tensors that is the result of comparing.
        left_behind: Buffers, attributes and inputs that the forward pass changed (and the trial restored).
    """

    failure: str = ""
    error: float = 0.0
    allowed_error: float = 0.0
    original_ms: float | None = None
    candidate_ms: float | None = None
    compared: int = 0
    left_behind: tuple[str, ...] = ()


@dataclass
class Trial:
    """Two ways to compute one module, on one set of arguments.

    Attributes:
        module: The module at the site.
        args: Its positional arguments, as the user's code passed them.
        kwargs: Its keyword arguments.
        with_gradients: Whether to compare and time the backward pass too.
        samples: How many samples of the batch the oracle sees, so that it never exhausts the memory; None: all.
        tolerance: A relative error that is allowed whatever the original's own is, for candidates that order sums
            otherwise on purpose.
        timed_s: No further pair is timed once they have taken this long together.
        repeatable: Makes of the arguments what one more call may be given: tensors are copied in any case, objects
            that a call adds to (a key/value cache) are not.
        judged: Takes from the outputs what is to be compared.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    with_gradients: bool = True
    samples: int | None = ORACLE_SAMPLES
    tolerance: float = 0.0
    timed_s: float = TIMED_S
    repeatable: Callable[[Any, Any], tuple[Any, Any]] = lambda args, kwargs: (args, kwargs)
    judged: Callable[[Any], Any] = lambda outputs: outputs
    _overwritten: set[str] = field(default_factory=set, init=False, repr=False)

    def numbers(self, original: Contender, candidate: Contender, *, with_oracle: bool = True) -> Comparison:
        """Compares outputs and, ``with_gradients``, the gradients of inputs and parameters.

        The oracle is the original in float64, without autocast, on a few samples: the candidate may be off by a small
        multiple of what the original is off in the run's own dtype. Without one (``with_oracle=False``, or the module
        cannot be copied) the two must agree to the rounding of that dtype.
        """
        try:
            with isolated(self.module) as left_behind, dropout_off(self.module) if with_oracle else nullcontext():
                with own_rng(device_of(self.module)), original.state():
                    args, kwargs = self._samples(original.call) if with_oracle else (self.args, self.kwargs)
                    oracle = self._oracle(original.call, args, kwargs) if with_oracle else None
                with own_rng(device_of(self.module)), original.state():
                    expected = self._run(original.call, args, kwargs)
                with candidate.state():
                    actual = self._run(candidate.call, args, kwargs)
        except Exception as error:
            return Comparison(failure=f"failed in its trial: {_one_line(error)}")
        if [t.shape for t in actual] != [t.shape for t in expected]:
            return Comparison(failure="returns tensors of other shapes than the original")
        rounding = max((torch.finfo(tensor.dtype).eps for tensor in expected), default=0.0)
        allowed = float("inf")
        if oracle is not None and [t.shape for t in oracle] == [t.shape for t in expected]:
            allowed = ERROR_FACTOR * relative_error(expected, oracle) + rounding
            error_found = relative_error(actual, oracle)
        # An original that is that far off (it overflows, it draws random numbers) would let anything pass.
        if allowed >= 1:
            rounding = max(rounding, _autocast_eps(self.module))
            allowed, error_found = ERROR_FACTOR * rounding, relative_error(actual, expected)
        allowed = max(allowed, self.tolerance)
        failure = (
            ""
            if error_found <= allowed
            else f"other numbers than the original: relative error {error_found:.1e}, allowed {allowed:.1e}"
        )
        return Comparison(
            failure=failure,
            error=error_found,
            allowed_error=allowed,
            compared=len(expected),
            left_behind=(*left_behind, *self._overwritten),
        )

    def time(self, original: Contender, candidate: Contender) -> Comparison:
        """Times both, forward and backward, interleaved after a warm-up of each. Medians, in milliseconds."""
        try:
            with isolated(self.module):
                pairs: list[tuple[float, float]] = []
                for pair in range(1 + MAX_PAIRS):
                    with original.state():
                        original_s = self._timed(original.call)
                    with candidate.state():
                        candidate_s = self._timed(candidate.call)
                    took_s = original_s + candidate_s
                    if pair > 0 or took_s > self.timed_s:  # the first is the warm-up, which matters to short ones only
                        pairs.append((original_s, candidate_s))
                    timed_s = sum(map(sum, pairs))
                    if timed_s > (self.timed_s if len(pairs) >= MIN_PAIRS else 3 * self.timed_s):
                        break
        except Exception as error:
            return Comparison(failure=f"failed in its trial: {_one_line(error)}")
        original_ms, candidate_ms = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
        return Comparison(original_ms=original_ms, candidate_ms=candidate_ms)

    def _timed(self, call: Callable[..., Any]) -> float:
        synchronize(self.module)
        start = time.perf_counter()
        self._run(call, self.args, self.kwargs, torch.ones_like)
        synchronize(self.module)
        return time.perf_counter() - start

    def _run(
        self, call: Callable[..., Any], args: Any, kwargs: Any, cotangent: Callable[[Tensor], Tensor] | None = None
    ) -> list[Tensor]:
        """Outputs, then gradients of inputs and parameters: floating-point tensors only, detached."""
        if not self.with_gradients:
            with torch.no_grad():
                return [_comparable(t) for t in tensors_in(self._on_copies(call, args, kwargs)) if _has_numbers(t)]
        with torch.enable_grad():
            args, kwargs = map_tensors(_fresh_leaf, (args, kwargs))
            outputs = [t for t in tensors_in(self._on_copies(call, args, kwargs)) if _has_numbers(t)]
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
            wanted = inputs + [p for p in self.module.parameters() if p.requires_grad]
            differentiable = [t for t in outputs if t.requires_grad]
            if not differentiable or not wanted:
                return [_comparable(t) for t in outputs]
            cotangents = [(cotangent or _random_cotangent)(t) for t in differentiable]
            gradients = torch.autograd.grad(differentiable, wanted, cotangents, allow_unused=True)
        # An unused input has no gradient; zeros keep the two sides' lists in step.
        filled = [torch.zeros_like(w) if g is None else g for g, w in zip(gradients, wanted, strict=True)]
        return [_comparable(t) for t in outputs + filled]

    def _on_copies(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls with copies of the inputs: a forward pass may write into what it is given (``x -= self.mean``)."""
        args, kwargs = map_tensors(Tensor.clone, (args, kwargs))
        repeatable_args, repeatable_kwargs = self.repeatable(args, kwargs)
        outputs = self.judged(call(*repeatable_args, **repeatable_kwargs))
        if any(t._version for t in tensors_in((args, kwargs)) if not t.is_inference()):
            self._overwritten.add("its input")
        return outputs

    def _samples(self, call: Callable[..., Any]) -> tuple[Any, Any]:
        if self.samples is None:
            return self.args, self.kwargs
        tensors = [t for t in tensors_in((self.args, self.kwargs)) if t.dim() > 0]
        batch_size = tensors[0].shape[0] if tensors else 0

        def take(tensor: Tensor) -> Tensor:
            is_batched = tensor.layout == torch.strided and tensor.dim() > 0 and tensor.shape[0] == batch_size
            return tensor[: self.samples] if is_batched else tensor

        sliced: tuple[Any, Any] = map_tensors(take, (self.args, self.kwargs))
        try:
            with torch.no_grad():
                self._on_copies(call, *sliced)
        except Exception:  # a module that wants its whole batch: (T, B, D) inputs, masks of the batch's size
            return self.args, self.kwargs
        return sliced

    def _oracle(self, original: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor] | None:
        if sum(p.numel() * 8 for p in self.module.parameters()) > ORACLE_MAX_BYTES:
            return None
        tensors = (*self.module.parameters(), *self.module.buffers(), *tensors_in((args, kwargs)))
        if any(t.is_complex() for t in tensors):  # whose imaginary part .to(torch.float64) would drop
            return None
        if self.with_gradients and self._saved_elements(original, args, kwargs) * 8 > ORACLE_MAX_SAVED_BYTES:
            return None
        try:
            reference = copy.deepcopy(self.module).to(torch.float64)
            vars(reference).pop("forward", None)
            args, kwargs = map_tensors(lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
            device_type = device_of(self.module).type
            with torch.autocast(device_type, enabled=False):
                trial = Trial(
                    reference, args, kwargs, self.with_gradients, repeatable=self.repeatable, judged=self.judged
                )
                return trial._run(reference.forward, args, kwargs)
        except Exception:  # not every module can be copied, or has float64 kernels: the plain comparison remains
            return None

    def _saved_elements(self, call: Callable[..., Any], args: Any, kwargs: Any) -> int:
        """What one forward pass keeps for its backward pass: one sample of long attention can be gigabytes."""
        saved: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes() // tensor.element_size()
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            self._on_copies(call, *map_tensors(_fresh_leaf, (args, kwargs)))
        return sum(saved.values())


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest norm of a difference over the norm of the expected tensor; infinite for NaN where none belongs.

    A tensor whose true value is zero but for rounding (the bias before a batch norm has such a gradient) is measured
    against a hundredth of the largest tensor's norm. Infinities and NaNs must stand in the same places.
    """
    norms = [float(torch.linalg.vector_norm(_finite_part(t))) for t in expected]
    floor = max(norms, default=0.0) / 100
    worst = 0.0
    for got, want, norm in zip(actual, expected, norms, strict=True):
        if not all(torch.equal(is_odd(got), is_odd(want)) for is_odd in (torch.isnan, torch.isposinf, torch.isneginf)):
            return float("inf")
        off = float(torch.linalg.vector_norm(_finite_part(got) - _finite_part(want)))
        if off:
            worst = max(worst, off / max(norm, floor, 1e-300))
    return worst


def _finite_part(tensor: Tensor) -> Tensor:
    # Metal has no float64: there the host compares.
    wide = (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
    return torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0)


def synchronize(module: nn.Module) -> None:
    """Waits for the module's device, where it computes behind the caller's back."""
    device = device_of(module)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _autocast_eps(module: nn.Module) -> float:
    # Under autocast a float32 output may be the sum of bfloat16 products.
    device_type = device_of(module).type
    return torch.finfo(torch.get_autocast_dtype(device_type)).eps if torch.is_autocast_enabled(device_type) else 0.0


def _fresh_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _random_cotangent(output: Tensor) -> Tensor:
    # Drawn in float64 and rounded, so that every dtype is asked for the gradient in the same direction.
    generator = torch.Generator().manual_seed(output.numel())
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device, output.dtype)


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _comparable(tensor: Tensor) -> Tensor:
    """The tensor detached, dense and real: what norms and differences can be taken of."""
    tensor = tensor.detach()
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _one_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
