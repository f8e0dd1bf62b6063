"""The runs of a trial: of either side, and of the original in float64, in other orders and by formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.device import CONVOLUTIONS, dtype_of_products
from lightning_accel.core.dropout import dropout_off
from lightning_accel.core.module_copies import silent_copy
from lightning_accel.core.purse import TRIALS, Purse
from lightning_accel.core.random_streams import TORCHS
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.core.tree import map_tensors, tensors_in
from lightning_accel.experiment.passes import Call, Passes
from lightning_accel.experiment.tolerance import Spread, is_batched

ORACLE_SAMPLES = 4
ORACLE_MAX_BYTES = 2 << 30
ORACLE_MAX_SAVED_BYTES = 1 << 29  # of activations: with more, float64 takes too long
_WIDE = 6.0  # the approximate time of the original in float64, as a multiple of a candidate's call


@dataclass(frozen=True)
class TrialSide:
    """One side of a trial."""

    call: Call  # the computation, called with the site's own arguments
    # A context around the call, untimed, that prepares the model for this side.
    state: Callable[[], AbstractContextManager[Any]] = nullcontext
    # Converts the arguments to this side's form, untimed: another memory layout, say, which its results may have, too.
    arguments: Callable[[Any, Any], tuple[Any, Any]] | None = None

    def given(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments in this side's form."""
        return (args, kwargs) if self.arguments is None else self.arguments(args, kwargs)


class TooDearError(Exception):
    """The purse cannot pay for another call."""


@dataclass
class TrialRuns:
    """Runs two ways to compute one thing, on copies of one set of arguments."""

    module: nn.Module  # the module whose parameters take part; one without parameters if only the arguments do
    args: tuple[Any, ...]  # as the user's code passed them
    kwargs: dict[str, Any] = field(default_factory=dict)
    with_gradients: bool = True  # whether to compare and time the backward pass too
    samples: int | None = ORACLE_SAMPLES  # for the oracle, limited to save memory; None: all
    judged: Callable[[Any], Any] = lambda outputs: outputs  # selects what is compared
    wide: Call | None = None  # the original for float64 arguments; None: ``forward`` of a copy of the module in float64
    has_dropout: bool = False  # whether dropout stays on in the comparison: without it a side would be recompiled
    keeps_strides: bool = True  # whether outputs must have the original's memory layout
    # Whether the library builds and keeps a kernel for every shape, dtype and number of threads. Then the original runs
    # on the whole batch only, and its own result is the yardstick.
    keeps_kernels: bool = False
    purse: Purse | None = None  # must be able to pay for another call as long as the last, or the trial ends
    alike: Spread = field(default_factory=Spread)  # of other numbers of the same shapes, as far as it was measured
    # The same computation by formulas that candidates share: their gradients may have the same error.
    formulas: Sequence[TrialSide] = ()
    convolves: bool = False  # whether the computation has convolutions that are not modules

    def __post_init__(self) -> None:
        tensors = [*self.module.parameters(), *tensors_in((self.args, self.kwargs))]
        sizes = [t.shape[0] for t in tensors_in((self.args, self.kwargs)) if not t.is_nested and t.dim() > 0]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._batch_size = sizes[0] if sizes else 0
        self._passes = Passes(self.module, self.with_gradients, self.judged)
        self._drawn: set[str] = set()  # random streams, apart from torch's, from which a run drew
        self._unpaid = Stopwatch()

    def _pay(self) -> float:
        """Pays for the time since the last call; returns it as an estimate of the next run's time."""
        spent_s = self._unpaid.lap()
        if self.purse is not None:
            self.purse.pay(TRIALS, spent_s)
        return spent_s

    def _ask_purse(self, times: float = 1.0) -> None:
        if self.purse is not None and not self.purse.can_pay(times * self._pay()):
            raise TooDearError

    def _without_dropout(self) -> AbstractContextManager[list[float]]:
        return nullcontext(list[float]()) if self.has_dropout else dropout_off(self.module)

    def _once(self, side: TrialSide, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Any]]:
        """Returns a side's results and the random streams' states after it. Each run begins with the same states."""
        self._ask_purse()
        with self._streams() as before, side.state():
            results = self._passes.results(side.call, *side.given(args, kwargs))
            self._drawn |= {*before.drawn()} - TORCHS
            return results, list(self._streams().random_states.values())

    def _streams(self) -> StateSnapshot:
        return StateSnapshot(None, Level.RANDOM, self._device)

    def _samples(self, call: Call) -> tuple[Any, Any]:
        """Returns the first few samples of the arguments; all if the computation needs its whole batch."""
        if self.samples is None or self.keeps_kernels or self._batch_size <= self.samples:
            return self.args, self.kwargs
        few = slice(self.samples)
        sliced: tuple[Any, Any] = map_tensors(
            lambda t: t[few] if is_batched(t, self._batch_size) else t, (self.args, self.kwargs)
        )
        try:
            with torch.no_grad():
                copies = map_tensors(Tensor.clone, sliced)
                call(*copies[0], **copies[1])
        except Exception:  # for example with (T, B, D) inputs or masks of the batch's size
            return self.args, self.kwargs
        return sliced

    def _computed(
        self, sides: Iterable[tuple[TrialSide, AbstractContextManager[Any]]], args: Any, kwargs: Any
    ) -> Iterator[list[Tensor]]:
        """Yields the results of the sides that succeed: not every computation or kernel allows every order."""
        for side, setting in sides:
            try:
                with self._without_dropout(), setting:
                    run, _ = self._once(side, args, kwargs)
            except TooDearError:
                raise
            except Exception:
                continue
            yield run

    def _oracle(self, original: TrialSide, args: Any, kwargs: Any) -> list[Tensor] | None:
        """Returns the original's results in float64; None if they cannot be computed or would take too much memory."""
        if self.keeps_kernels or sum(p.numel() * 8 for p in self.module.parameters()) > ORACLE_MAX_BYTES:
            return None
        tensors = (*self.module.parameters(), *self.module.buffers(), *tensors_in((args, kwargs)))
        if any(t.is_complex() for t in tensors):  # .to(torch.float64) would drop the imaginary part
            return None
        self._ask_purse(_WIDE)
        try:
            with self._without_dropout(), self._streams(), original.state():
                if self.with_gradients:
                    saved_bytes = 8 * self._passes.saved_elements(original.call, args, kwargs)
                    if saved_bytes > ORACLE_MAX_SAVED_BYTES:
                        return None
                reference = silent_copy(self.module, torch.float64)
                args, kwargs = map_tensors(lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
                passes = replace(self._passes, module=reference, writes_to_input=False)
                with torch.autocast(self._device.type, enabled=False):
                    return passes.results(self.wide or reference.forward, args, kwargs)
        except Exception:  # some computations have no float64 kernels: the original's own result is used
            return None

    def _coarsest(self, results: Sequence[Tensor]) -> torch.dtype:
        dtypes = [t.dtype for t in results if t.is_floating_point()]
        if torch.is_autocast_enabled(self._device.type):  # a float32 result may be the sum of bfloat16 products
            dtypes.append(torch.get_autocast_dtype(self._device.type))
        elif torch.float32 in dtypes:
            convolves = self.convolves or any(isinstance(module, CONVOLUTIONS) for module in self.module.modules())
            dtypes += filter(None, [dtype_of_products(self._device, convolves=convolves)])
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
