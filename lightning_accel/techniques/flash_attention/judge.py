"""Decides where the calls of a site go, for one class of shapes: same numbers? which is the fastest?"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.techniques.flash_attention.backends import Backend
from lightning_accel.techniques.flash_attention.call import AttentionCall, sdpa
from lightning_accel.techniques.flash_attention.dispatch import ORIGINAL
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward
from lightning_accel.trial import TIMED_S, Contender, Trial

# A fused kernel sums over keys block by block. What that makes of float32 grows with the length, past the rounding of
# one operation; a wrong mask or scale is off by far more.
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Judgement:
    """What came out of a trial.

    Attributes:
        choice: The name of a backend, or ``"original"``.
        reason: What was measured, or why none of the backends may.
        is_wrong: Whether every backend failed or had other numbers, so that none may be tried there again.
    """

    choice: str
    reason: str
    is_wrong: bool = False


@dataclass
class WatchedBackend(Backend):
    """A backend that remembers what it was asked for and could not do; torch's own choice takes its place.

    Attributes:
        backend: The one that does the work.
        lacking: What it was asked for and lacks.
        has_dropped: Whether a call asked for dropout.
    """

    backend: Backend
    lacking: list[str] = field(default_factory=list)
    has_dropped: bool = False

    def __post_init__(self) -> None:
        self.name = self.backend.name

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        self.has_dropped |= call.dropout_p > 0
        lack = self.backend.lacks(call)
        if lack is None:
            return self.backend(call)
        if lack not in self.lacking:
            self.lacking.append(lack)
        return sdpa(call)


def judge(
    site: AttentionSite,
    backends: Sequence[WatchedBackend],
    original: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    by_clock: bool,
    timed_s: float = TIMED_S,
) -> Judgement:
    """Tries the backends on one real call of a site.

    Args:
        site: The site.
        backends: In order of preference.
        original: The module's own forward, as a function of ``(module, *args, **kwargs)``.
        args: The call's positional arguments.
        kwargs: Its keyword arguments.
        by_clock: Whether the fastest is taken, the original among them; otherwise the first that agrees.
        timed_s: About how long each may be timed against the original.
    """
    trial = Trial(
        site.module,
        args,
        kwargs,
        with_gradients=torch.is_grad_enabled(),
        tolerance=_TOLERANCE,
        timed_s=timed_s,
        repeatable=site.repeatable,
        judged=site.judged,
    )

    plain = functools.partial(original, site.module)
    agreeing: list[tuple[Backend, Forward]] = []
    failures: list[str] = []
    for backend in backends:

        def call(*args: Any, backend: Backend = backend, **kwargs: Any) -> Any:
            return site.fused(backend, original, args, kwargs)

        failure = _compare(trial, plain, call, backend)
        nothing = site.nothing_found()
        if nothing is not None and not failure:
            return Judgement(ORIGINAL, nothing)
        if not failure and backend.lacking and len(backends) > 1:
            failure = backend.lacking[-1]
        if failure:
            failures.append(f"{backend.name}: {failure}" if len(backends) > 1 else failure)
            continue
        agreeing.append((backend, call))
        if not by_clock:
            return Judgement(backend.name, f"by {backend.name}")
    if not agreeing:
        return Judgement(ORIGINAL, "; ".join(failures), is_wrong=True)
    return _fastest(trial, plain, agreeing)


def _compare(trial: Trial, plain: Forward, call: Forward, backend: WatchedBackend) -> str:
    backend.has_dropped = False
    found = trial.numbers(Contender(plain), Contender(call))
    if found.failure and backend.has_dropped:
        # Dropout that is no module of its own: the two sides drew other masks. Evaluating switches it off too.
        def evaluating() -> AbstractContextManager[None]:
            return _evaluating(trial.module)

        found = trial.numbers(Contender(plain, evaluating), Contender(call, evaluating))
    if not found.failure and not found.compared:
        return "returns no tensors that could be compared with the original's"
    return found.failure


def _fastest(trial: Trial, plain: Forward, agreeing: Sequence[tuple[Backend, Forward]]) -> Judgement:
    best, best_speed, failures = ORIGINAL, 0.0, []
    measured: dict[str, str] = {}
    for backend, call in agreeing:
        found = trial.time(Contender(plain), Contender(call))
        if found.failure:
            failures.append(f"{backend.name}: {found.failure}")
            continue
        assert found.original_ms is not None
        assert found.candidate_ms is not None
        speed = found.original_ms / found.candidate_ms
        measured[backend.name] = (
            f"{speed:.2f}x the speed here ({found.original_ms:.2f} → {found.candidate_ms:.2f} ms a pass)"
        )
        if speed > best_speed:
            best, best_speed = backend.name, speed
    if best == ORIGINAL:
        return Judgement(ORIGINAL, "; ".join(failures), is_wrong=True)
    # At the same speed, too, the fused form wins: its memory grows with the length, not with its square.
    if best_speed < 1:
        return Judgement(ORIGINAL, f"not faster by {best}: {measured[best]}")
    return Judgement(best, f"by {best}, {measured[best]}")


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    for part in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
