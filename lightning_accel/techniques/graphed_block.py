"""One block whose kernels are captured once, as CUDA graphs, and replayed at every later call that is like it.

:mod:`~lightning_accel.techniques.cuda_capture` captures; what is here keeps a replay from being silently wrong:

* A graph works in memory of its own. Results and gradients are copied out of it, or accumulated gradients and outputs
  that somebody keeps would change with the next replay.
* A block that is called again before its backward pass is over would overwrite what that needs: such a call runs as it
  was written.
* Python does not run in a replay: a block with hooks or random numbers is refused, or one that changes its attributes.
* Parameters are read where they were at the capture: a block whose parameters have moved is given back, and so is one
  that was given other parts than it had, a layer more say.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.core.isolation import no_cast_cache
from lightning_accel.core.random_streams import TORCHS
from lightning_accel.core.report import one_line
from lightning_accel.core.state_snapshot import Level, StateSnapshot
from lightning_accel.core.torch_private.autograd import saved_tensors_hooks
from lightning_accel.core.torch_private.modes import has_modes, without_dispatch_modes
from lightning_accel.core.torch_private.modules import hooks_of, hooks_on_all_modules, parts_of
from lightning_accel.core.tree import leaves, map_tensors, tensors_in
from lightning_accel.experiment.trial import NumbersComparison, Trial
from lightning_accel.experiment.trial_runs import TrialSide

Forward = Callable[..., Any]
Capture = Callable[[Forward, tuple[Tensor, ...]], Forward]

MOST_MISSES = 8
"""Calls with other shapes in a row after which a block is given back."""

_PLAIN = (Tensor, bool, int, float, str, type(None))


class NotCapturedError(RuntimeError):
    """A block cannot be captured; the message says why."""


class GraphedBlock:
    """The calls of one block: replayed where they are like the first, else as they were written.

    Args:
        block: The module.
        capture: Captures a function.
        given_back: Told why the block can never be replayed, or not any more; it is paused then.
    """

    def __init__(self, block: nn.Module, capture: Capture, given_back: Callable[[str], None]) -> None:
        self._block, self._capture, self._given_back = block, capture, given_back
        self._graphed: Forward | None = None
        self._signature: Any = None
        self._addresses: list[int] = []
        self.latest: Callable[[], _Lease | None] = lambda: None  # the last replay's, while somebody can go backward
        self._is_capturing = False
        self.is_paused = False  # whether all calls run as they were written; memory of the graphs is given back
        self.misses = 0  # calls in a row that were not like the first
        self._look()

    def pause(self, is_paused: bool) -> None:
        """Has calls run as they were written, or captures at the next call."""
        self.is_paused = is_paused
        if is_paused:
            self._graphed = None

    def call(self, original: Forward, args: Any, kwargs: dict[str, Any]) -> Any:
        """The block's forward: ``original(*args, **kwargs)``, or a replay of it."""
        may_replay = torch.is_grad_enabled() and not has_modes() and saved_tensors_hooks() is None
        if self.is_paused or self._is_capturing or not may_replay:
            return original(*args, **kwargs)
        try:
            is_ready = self._is_ready(args, kwargs)
        except NotCapturedError as error:
            is_ready = False
            self.pause(True)
            self._given_back(str(error))
        return self.replay(args, kwargs) if is_ready else original(*args, **kwargs)

    def _is_ready(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether this call can be replayed; the first is captured.

        Raises:
            NotCapturedError: No call can be, from now on.
        """
        if self._graphed is None:
            self.capture(args, kwargs)
        if self._signature != self._signature_of(args, kwargs):
            self.misses += 1
            if self.misses > MOST_MISSES:
                raise NotCapturedError(f"given back: the last {self.misses} calls had other shapes than the first")
            return False
        if self._addresses != [tensor.data_ptr() for tensor in self._held]:
            raise NotCapturedError("given back: its parameters have moved in memory")
        if self._parts != self._parts_now():
            raise NotCapturedError("given back: its modules, parameters or buffers are others than they were")
        if self._has_hooks():
            raise NotCapturedError("given back: it was given hooks, which a replay does not call")
        if (lease := self.latest()) is not None and not lease.is_over:
            return False
        self.misses = 0
        return True

    def tried(self, original: Forward, args: Any, kwargs: dict[str, Any]) -> NumbersComparison:
        """Captures the block on copies of these arguments, and compares a replay's numbers with the original's.

        Where they differ, or it cannot be captured, it is paused.
        """
        try:
            self.capture(args, kwargs)
        except NotCapturedError as error:
            found = NumbersComparison(failure=str(error))
        else:
            trial = Trial(self._block, args, kwargs, samples=None, has_dropout=True)
            found = trial.numbers(TrialSide(original), TrialSide(lambda *args, **kwargs: self.replay(args, kwargs)))
        if found.failure:
            self.pause(True)
        return found

    def replay(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Replays what was captured, on other values."""
        assert self._graphed is not None
        lease = _Lease(self)
        self.latest = weakref.ref(lease)
        given = _Leased.apply(lease, *tensors_in((args, kwargs)), *self._parameters)  # type: ignore[no-untyped-call]
        return map_tensors(Tensor.clone, self._graphed(*given))

    def capture(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Captures the block on copies of these arguments, or raises a :class:`NotCapturedError`."""
        self._look()
        self._check(args, kwargs)
        inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors_in((args, kwargs))]
        function = self._function(args, kwargs, len(inputs))
        before = StateSnapshot(self._block, Level.FULL, (*inputs, *self._held)[0].device)
        self._is_capturing = True
        try:
            # Who watches this call, or what it saves, is not to be in the graph: a call that is watched is no replay.
            plain = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)
            with no_cast_cache(), without_dispatch_modes(), plain:
                self._rehearse(function, inputs, before)
                self._graphed = self._capture(function, (*inputs, *self._parameters))
        except NotCapturedError:
            raise
        except Exception as error:  # a synchronisation, data-dependent control flow, tensors on the host
            raise NotCapturedError(f"cannot be captured: {one_line(error)}") from None
        finally:
            self._is_capturing = False
            before.restore()
        self._signature = self._signature_of(args, kwargs)
        self._addresses = [tensor.data_ptr() for tensor in self._held]

    def _look(self) -> None:
        block = self._block
        self._modules = list(block.modules())
        self._held = [*block.parameters(), *block.buffers()]
        self._parameters = list(block.parameters())
        self._names = [name for name, _ in block.named_parameters()]
        self._parts = self._parts_now()

    def _parts_now(self) -> list[int]:
        # By identity: what is held does not die, so that no other object has its address.
        return [id(part) for module in self._modules for part in parts_of(module)]

    def _has_hooks(self) -> bool:
        return any(any(hooks_of(module)) for module in self._modules) or bool(hooks_on_all_modules())

    def _check(self, args: Any, kwargs: dict[str, Any]) -> None:
        if self._has_hooks():
            raise NotCapturedError("has hooks, which a replay does not call")
        if strange := next((one for one in leaves((args, kwargs)) if not isinstance(one, _PLAIN)), None):
            raise NotCapturedError(f"takes a {type(strange).__name__}, which a replay does not see")
        if not any(t.requires_grad for t in [*self._parameters, *tensors_in((args, kwargs))]):
            raise NotCapturedError("has nothing to go backward for")
        if any(buffer.requires_grad for buffer in self._block.buffers()):
            raise NotCapturedError("has a buffer that requires gradients")
        kinds = {t.device for t in [*self._held, *tensors_in((args, kwargs))]}
        if len(kinds) > 1:
            raise NotCapturedError(f"computes on {', '.join(sorted(map(str, kinds)))}, and a graph on one device")

    def _rehearse(self, function: Forward, inputs: list[Tensor], before: StateSnapshot) -> None:
        """Runs the block once, and refuses it if a replay would leave out some of what it does."""
        buffers = {name: id(buffer) for name, buffer in self._block.named_buffers()}
        outputs = function(*inputs, *self._parameters)
        if not all(isinstance(leaf, Tensor) for leaf in leaves(outputs)):
            raise NotCapturedError("returns more than tensors")
        if not TORCHS.isdisjoint(before.drawn()):
            raise NotCapturedError("draws random numbers: replayed, they would be others than the plain run's")
        are_replaced = buffers != {name: id(buffer) for name, buffer in self._block.named_buffers()}
        changed = [name for name in before.restore() if name not in buffers or are_replaced]
        if changed:
            raise NotCapturedError(f"its forward changes {changed[0]}, which a replay does not")

    def _function(self, args: Any, kwargs: dict[str, Any], num_inputs: int) -> Forward:
        """The block as a function of its inputs' tensors and its parameters."""
        block, names = self._block, self._names

        def function(*tensors: Tensor) -> Any:
            inputs = iter(tensors[:num_inputs])
            now_args, now_kwargs = map_tensors(lambda _: next(inputs), (args, kwargs))
            kind = tensors[-1].device.type
            # A cast of a weight that was cached before the capture would be read, and never made anew.
            with torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), False):
                parameters = dict(zip(names, tensors[num_inputs:], strict=True))
                return torch.func.functional_call(block, parameters, now_args, now_kwargs)

        return function

    def _signature_of(self, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        kind = next((tensor.device.type for tensor in (*self._held, *tensors)), "cpu")
        return (
            [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors],
            map_tensors(lambda tensor: None, (args, kwargs)),  # type: ignore[arg-type, return-value]
            [parameter.requires_grad for parameter in self._parameters],
            [module.training for module in self._modules],
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
        )


@dataclass(eq=False)
class _Lease:
    """One replay's hold on a graph's memory: until its backward pass, or until nobody can go backward any more."""

    block: GraphedBlock
    is_over: bool = False


class _Leased(torch.autograd.Function):
    """Passes tensors on to a replay, and their gradients back, out of the graph's memory."""

    @staticmethod
    def forward(ctx: Any, lease: _Lease, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lease = lease
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.lease.block.latest() is not ctx.lease:
            raise RuntimeError(
                "graphs: a second backward pass through a block that has since been called again. Its CUDA graph holds"
                " the later call only: use compile.graphs='off' where a graph is retained over steps"
            )
        ctx.lease.is_over = True
        return (None, *(None if gradient is None else gradient.clone() for gradient in gradients))
