"""One training step taken apart, operation by operation: which module's time, FLOPs, bytes and memory are whose.

A forward pass is told by the module that is being called, a backward pass by the node that autograd is at: its number
is that of the operation that made it, and that operation was some module's. Nothing is inserted into the graph.
"""

from __future__ import annotations

import itertools
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_accel.core.clocks import HostClock
from lightning_accel.core.hidden_warnings import hide_warnings
from lightning_accel.core.optimizers import state_of
from lightning_accel.core.torch_private.autograd import is_in_backward, latest_node, node_under_way
from lightning_accel.core.tree import tensors_in
from lightning_accel.core.user_frames import users_line
from lightning_accel.evidence import step_breakdown
from lightning_accel.evidence.flops import FlopMode
from lightning_accel.evidence.peak_tensors import LiveBlocks
from lightning_accel.evidence.roofline import (
    COPYING,
    Operation,
    alike,
    is_of_weight,
    odd_operand,
    strides_that_matter,
    weight_shapes,
)
from lightning_accel.evidence.step_breakdown import OPTIMIZER, Anatomy, LayoutCopy, MemoryPeaked, ModuleCost
from lightning_accel.memory.meter import MeterBusyError, meter_for

# Operations, without the line that some names begin with.
_READS_CLASSES = frozenset({"log_softmax", "nll_loss_forward", "nll_loss2d_forward", "log_softmax_backward_data"})
_MANY_CLASSES = 1024
_LEAST_COPIED = 1 << 12  # elements: what is smaller costs nothing
_WAITS = frozenset({"local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique2", "masked_select"})
"""Operations whose result the host has to know before it can go on."""


class AnatomyMode(FlopMode):  # type: ignore[no-untyped-call]
    """Takes the step under it apart.

    ``is_stepping`` says whether an optimizer is at its step, and not in a closure of it. If it ``meters``, the
    allocator is asked, too, on a CPU, what was the most: nobody else can profile meanwhile.

    Attributes:
        trouble: What went wrong in looking at an operation; the step is then not taken apart.
    """

    def __init__(
        self, model: nn.Module, clock: HostClock, is_stepping: Callable[[], bool], *, meters: bool = False
    ) -> None:
        super().__init__()
        self.trouble: Exception | None = None
        self._model, self._clock, self._is_stepping = model, clock, is_stepping
        self._names = {id(module): name for name, module in model.named_modules()}
        self._kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._blocks = LiveBlocks(device)
        self._costs: dict[str, ModuleCost] = {}
        self._copies: dict[tuple[str, str, str], LayoutCopy] = {}
        self._waits: Counter[str] = Counter()
        self._operations: list[Operation] = []
        self._weights = weight_shapes(model)
        self._hidden: list[tuple[tuple[Any, Any], tuple[Any, Any], LayoutCopy]] = []  # see _run_again
        self._stacks: defaultdict[int, list[str]] = defaultdict(list)  # of modules, thread by thread
        self._module_of: dict[int, str] = {}  # node → the module whose operation made it
        self._made_by: dict[int, str] = {}  # id of a storage → what gave a view of it other strides
        self._hooks = ExitStack()
        self._meter = meter_for(device) if meters and device.type == "cpu" else None
        self._metered_bytes: int | None = None

    def begin(self, batch: Any, optimizers: Iterable[Optimizer]) -> None:
        """Tells what was there before the step."""
        try:
            parameters = _plain(self._model.parameters())
            held = {
                step_breakdown.PARAMETERS: parameters,
                step_breakdown.BUFFERS: _plain(self._model.buffers()),
                step_breakdown.GRADIENTS: _plain(p.grad for p in parameters),
                step_breakdown.STATES: _plain(state_of(optimizers)),
                step_breakdown.BATCH: _plain(tensors_in(batch)),
            }
            for category, tensors in held.items():
                self._blocks.hold(tensors, category)
            if self._meter is not None:
                self._meter.start(itertools.chain.from_iterable(held.values()))
        except MeterBusyError:
            self._meter = None
        except Exception as error:  # tensors of any kind
            self.trouble = error

    @override
    def __enter__(self) -> Self:
        # Called for every module of the process, of this model or not, in whichever thread.
        for handle in (
            all_modules.register_module_forward_pre_hook(self._module_begins),
            all_modules.register_module_forward_hook(self._module_ends, always_call=True),
        ):
            self._hooks.callback(handle.remove)
        # Modules made by torch.compile warn of such hooks, which their users have not made.
        self._hooks.callback(hide_warnings(r"Using `torch.compile\(module\)` when there are global hooks"))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        meter, self._meter = self._meter, None
        if meter is None:
            return
        try:
            self._metered_bytes = max(interval.peak_bytes for interval in meter.stop())
        except MeterBusyError:
            pass  # another profiler has begun
        finally:
            meter.abort()

    def taken(self, optimizers: Iterable[Optimizer]) -> tuple[Anatomy, MemoryPeaked]:
        """What was seen; it waits for the device.

        Raises:
            Exception: Whatever went wrong while it was seen.
        """
        if self.trouble is not None:
            raise self.trouble
        operations = self._operations
        if operations:
            self._clock.wait_for(operations[-1].ended)
        if self._hidden:
            self._clock.wait_for(self._hidden[-1][1][1])
        for one in operations:
            one.ms = self._clock.ms_between(one.began, one.ended)
            if one.is_backward:
                one.cost.backward_ms += one.ms
            else:
                one.cost.forward_ms += one.ms
            if one.copy is not None:
                one.copy.ms += one.ms
        for ran, again, copy in self._hidden:
            copy.ms += max(0.0, self._clock.ms_between(*ran) - self._clock.ms_between(*again))
        gradients = _plain(p.grad for p in _plain(self._model.parameters()))
        least_ms = statistics.quantiles((one.ms for one in operations), n=10)[0] if len(operations) > 1 else 0.0
        of_model = [one for one in operations if one.cost.module != OPTIMIZER]
        memory = self._blocks.peak(gradients, _plain(state_of(optimizers)), self._metered_bytes)
        costs = sorted(self._costs.values(), key=lambda one: one.forward_ms + one.backward_ms, reverse=True)[:MOST]
        anatomy = Anatomy(
            modules=costs,
            copies=sorted(self._copies.values(), key=lambda one: one.ms, reverse=True)[:MOST],
            waits=dict(self._waits.most_common(MOST)),
            operations=len(operations),
            operations_ms=sum(one.ms for one in operations),
            work_ms=sum(max(0.0, one.ms - least_ms) for one in of_model),
            least_ms=least_ms,
            alike=alike(of_model),
            product_ms=sum(one.ms for one in operations if one.flops),
        )
        return anatomy, memory

    @override
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.trouble is not None:
            return func(*args, **kwargs)
        began = self._clock.mark()
        out = func(*args, **kwargs)
        ended = self._clock.mark()
        try:
            self._note(func, args, kwargs, out, began, ended)
        except Exception as error:  # a measurement must not end the user's run, nor the count of its FLOPs
            self.trouble = error
        return out

    @override
    def counted(self, flops: int) -> None:
        if self._operations and flops:
            latest = self._operations[-1]
            latest.flops = flops
            latest.cost.flops += flops
            latest.cost.low_precision_flops += flops if latest.is_low_precision else 0

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, began: Any, ended: Any) -> None:
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "").lstrip("_")
        node, is_backward = node_under_way(), is_in_backward()
        stack = self._stacks[threading.get_ident()]
        if node >= 0:
            self._blocks.backward_begins()
            module = self._module_of.get(node, "")
        else:
            module = stack[-1] if stack else ""
            if torch.is_grad_enabled():
                self._module_of[latest_node()] = module
        read, written = tensors_in((args, kwargs)), tensors_in(out)
        if self._is_stepping():
            module, category = OPTIMIZER, step_breakdown.STEPPING
        elif is_backward and not torch.is_grad_enabled():
            category = step_breakdown.BACKWARD
        else:
            is_copy = name == "to_copy" and self._blocks.is_a(read[0], step_breakdown.PARAMETERS)
            category = step_breakdown.COPIES if is_copy else step_breakdown.ACTIVATIONS
        cost = self._costs.setdefault(module, ModuleCost(module=module, kind=self._kinds.get(module, "")))
        is_new = [self._blocks.made(tensor, category, module) for tensor in written]
        if name in _READS_CLASSES and read and read[0].dim() and read[0].shape[-1] >= _MANY_CLASSES:
            for tensor in (*read, *written):
                if tensor.shape == read[0].shape:
                    self._blocks.are_logits(tensor)
        is_view = bool(written) and not any(is_new) and not name.endswith("_")
        moved_bytes = 0 if is_view else sum(tensor.nbytes for tensor in (*read, *written) if not tensor.is_sparse)
        cost.moved_bytes += moved_bytes
        cost.operations += 1
        copy = self._layout_copy(name, module, read, written, is_view, is_backward)
        self._run_again(func, args, kwargs, (began, ended), module)
        if name in _WAITS and category == step_breakdown.ACTIVATIONS:
            self._waits[users_line()] += 1
        is_low = bool(read) and read[0].is_floating_point() and read[0].element_size() <= 2
        growing_bytes = 0 if is_of_weight(name, written, self._weights) else moved_bytes
        self._operations.append(Operation(cost, began, ended, is_backward, is_low, growing_bytes, copy))

    def _layout_copy(
        self, name: str, module: str, read: list[Tensor], written: list[Tensor], is_view: bool, is_backward: bool
    ) -> LayoutCopy | None:
        if not written or not read or written[0].layout is not torch.strided or read[-1].layout is not torch.strided:
            return None
        source, result = (read[-1] if name == "copy_" else read[0]), written[0]
        if is_view:
            if not is_backward and source.is_contiguous() and not result.is_contiguous():
                self._made_by[id(result.untyped_storage())] = f"{name} at {users_line()}"
            return None
        is_copy = name in COPYING and source.numel() >= _LEAST_COPIED and source.shape == result.shape
        if not is_copy or (source.dtype, source.device) != (result.dtype, result.device):
            return None
        if strides_that_matter(source) == strides_that_matter(result):
            return None
        return self._copied(source, module, is_backward)

    def _run_again(self, func: Any, args: Any, kwargs: Any, ran: tuple[Any, Any], module: str) -> None:
        """Times an operation on tensors in order, where it had others: what it does about them itself nobody sees."""
        odd = odd_operand(func, tensors_in(args))
        if odd is None or odd.numel() < _LEAST_COPIED or kwargs:
            return
        with suppress(torch.OutOfMemoryError):
            in_order = [one.contiguous() if isinstance(one, Tensor) else one for one in args]
            func(*in_order)  # which sets itself up for them
            began = self._clock.mark()
            func(*in_order)
            again = began, self._clock.mark()
            self._hidden.append((ran, again, self._copied(odd, module, is_in_backward())))

    def _copied(self, source: Tensor, module: str, is_backward: bool) -> LayoutCopy:
        made_by = self._made_by.get(id(source.untyped_storage()), "")
        key = module, "" if is_backward else users_line(), made_by
        copy = self._copies.setdefault(key, LayoutCopy(module=key[0], line=key[1], made_by=key[2]))
        copy.moved_bytes += source.numel() * source.element_size()
        copy.count += 1
        return copy

    def _module_begins(self, module: nn.Module, args: Any) -> None:
        stack = self._stacks[threading.get_ident()]
        stack.append(self._names.get(id(module), stack[-1] if stack else ""))

    def _module_ends(self, module: nn.Module, args: Any, out: Any) -> None:
        if stack := self._stacks[threading.get_ident()]:
            stack.pop()


MOST = 1000
"""Modules, lines and copies that are kept: those with the most time."""


def _plain(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Those that have a storage to be looked at."""
    return [t for t in tensors if t is not None and not nn.parameter.is_lazy(t) and t.layout is torch.strided]
