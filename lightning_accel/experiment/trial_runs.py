"""What a trial runs: either side, and the original in float64, in other orders and by formulas, as its yardsticks."""

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
from lightning_accel.experiment.tolerance import Spread, is_batched, other_orders

ORACLE_SAMPLES = 4
ORACLE_MAX_BYTES = 2 << 30
ORACLE_MAX_SAVED_BYTES = 1 << 29  # of activations: more would take longer in float64 than it tells
_WIDE = 6.0  # times as long as a candidate's call the original takes in float64, about


@dataclass(frozen=True)
class TrialSide:
    """One side of a trial.

    Attributes:
        call: The computation, called with the site's own arguments.
        state: Entered around it, untimed: whatever makes the model ready for this side.
        arguments: Makes of the arguments the form in which this side takes them, untimed: another layout, in which its
            results may lie, too.
    """

    call: Call
    state: Callable[[], AbstractContextManager[Any]] = nullcontext
    arguments: Callable[[Any, Any], tuple[Any, Any]] | None = None

    def given(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments in this side's form."""
        return (args, kwargs) if self.arguments is None else self.arguments(args, kwargs)


class TooDearError(Exception):
    """There is not enough left for another call."""


@dataclass
class TrialRuns:
    """Runs two ways to compute one thing, on copies of one set of arguments.

    Attributes:
        module: The module whose parameters take part; one without any for a computation of its arguments alone.
        args: The positional arguments, as the user's code passed them.
        kwargs: The keyword arguments.
        with_gradients: Whether to compare and time the backward pass too.
        samples: How many samples of the batch the oracle sees, so that it never exhausts the memory; None: all.
        judged: Takes from the outputs what is to be compared.
        wide: The original, for arguments in float64; by default ``forward`` of a copy of the module in float64.
        has_dropout: Whether dropout stays on while numbers are compared, for what would be compiled anew without.
        keeps_strides: Whether outputs have to lie in memory as the original's do.
        keeps_kernels: Whether the library builds a kernel for every shape, dtype and number of threads, and keeps it:
            then the original is asked on the whole batch only, and its own result is the yardstick.
        purse: What has to be able to pay for another call, as long as the one before, or the trial ends; None: no end.
        alike: The spread of the same computation on other numbers of the same shapes, so far as it was measured.
        formulas: The same computation by formulas that candidates share: their gradients may be as far off.
        convolves: Whether there are convolutions in it that are no modules.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    with_gradients: bool = True
    samples: int | None = ORACLE_SAMPLES
    judged: Callable[[Any], Any] = lambda outputs: outputs
    wide: Call | None = None
    has_dropout: bool = False
    keeps_strides: bool = True
    keeps_kernels: bool = False
    purse: Purse | None = None
    alike: Spread = field(default_factory=Spread)
    formulas: Sequence[TrialSide] = ()
    convolves: bool = False

    def __post_init__(self) -> None:
        tensors = [*self.module.parameters(), *tensors_in((self.args, self.kwargs))]
        sizes = [t.shape[0] for t in tensors_in((self.args, self.kwargs)) if not t.is_nested and t.dim() > 0]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._batch_size = sizes[0] if sizes else 0
        self._passes = Passes(self.module, self.with_gradients, self.judged)
        self._drawn: set[str] = set()  # from which streams of others than torch, which nobody replays
        self._unpaid = Stopwatch()

    def _pay(self) -> float:
        """Pays for what was done since the last call; that is what the next may take, too."""
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
        """What it computes, and the states of the random streams after that. Each run begins with the same ones."""
        self._ask_purse()
        with self._streams() as before, side.state():
            results = self._passes.results(side.call, *side.given(args, kwargs))
            self._drawn |= {*before.drawn()} - TORCHS
            return results, list(self._streams().random_states.values())

    def _streams(self) -> StateSnapshot:
        return StateSnapshot(None, Level.RANDOM, self._device)

    def _samples(self, call: Call) -> tuple[Any, Any]:
        """The first few samples of the arguments; all of them where the computation wants its whole batch."""
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
        except Exception:  # (T, B, D) inputs, masks of the batch's size
            return self.args, self.kwargs
        return sliced

    def _in_other_orders(self, original: TrialSide, args: Any, kwargs: Any) -> Iterator[list[Tensor]]:
        size = self._batch_size if args is self.args else self.samples or 0
        orders = other_orders(original.call, size, self._device, new_kernels=not self.keeps_kernels)
        return self._computed(((TrialSide(call, original.state), setting) for call, setting in orders), args, kwargs)

    def _by_formulas(self, args: Any, kwargs: Any) -> Iterator[list[Tensor]]:
        return self._computed(((formula, nullcontext()) for formula in self.formulas), args, kwargs)

    def _computed(
        self, sides: Iterable[tuple[TrialSide, AbstractContextManager[Any]]], args: Any, kwargs: Any
    ) -> Iterator[list[Tensor]]:
        """The results of those that can compute this: views of its input, say, or its kernels, may not allow it."""
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
        """The original in float64; None where that cannot be had, or would take too much memory."""
        if self.keeps_kernels or sum(p.numel() * 8 for p in self.module.parameters()) > ORACLE_MAX_BYTES:
            return None
        tensors = (*self.module.parameters(), *self.module.buffers(), *tensors_in((args, kwargs)))
        if any(t.is_complex() for t in tensors):  # whose imaginary part .to(torch.float64) would drop
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
        except Exception:  # not every computation has float64 kernels: the original's own result remains
            return None

    def _coarsest(self, results: Sequence[Tensor]) -> torch.dtype:
        dtypes = [t.dtype for t in results if t.is_floating_point()]
        if torch.is_autocast_enabled(self._device.type):  # a float32 result may be the sum of bfloat16 products
            dtypes.append(torch.get_autocast_dtype(self._device.type))
        elif torch.float32 in dtypes:
            convolves = self.convolves or any(isinstance(module, CONVOLUTIONS) for module in self.module.modules())
            dtypes += filter(None, [dtype_of_products(self._device, convolves=convolves)])
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
