"""Whether anybody but the activation that is being called can ever read its input: what the runtime counts.

Who else could? Python, by another reference to the tensor. C++, by another handle on it (autograd, DLPack), or by
another tensor on its storage (a view, a result that an operation saved). All of these are counted, so the proof is a
look at a few numbers at the very call, whatever branch the code took. What they are for a tensor that nobody else holds
is tried out, once a process, by the very code that asks later (``refcount_calibration.py``).

The caller's own variable is one reference more, and harmless where the next thing done is to bind the variable anew
(``x = self.act(x)``, the loop of ``nn.Sequential``) or to return. The counts mean what they were found to mean only for
calls of the same form: the caller's bytecode has to show that form, and a name of the module in it. (C code may hold
more or less while it calls: ``sorted(hs, key=act)``, ``starmap(act, …)``, or ``list(hs)`` of ``hs = map(act, …)``.)
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401 - where torch.jit.script, reading the original's source, looks for it
from torch import Tensor, nn
from torch.compiler import is_compiling

from lightning_accel.core.call_sites import remembered
from lightning_accel.core.torch_private.autograd import has_gradient_hooks, is_transformed, saved_tensors_hooks
from lightning_accel.core.torch_private.modes import has_modes
from lightning_accel.core.torch_private.modules import eager_call
from lightning_accel.core.torch_private.tensors import handles_on_storage, handles_on_tensor
from lightning_accel.techniques.inplace_activations.callers import ActivationCall, read_call
from lightning_accel.techniques.inplace_activations.kinds import ActivationKind, only_reads

SMALLEST = 2**14
"""Elements. On fewer, an allocation that is spared is not worth the look."""

PATIENCE = 100
"""Calls. A module that could not work in place at one of so many steps aside."""

_CALL_IMPL, _CALL = eager_call(nn.Module).__code__, nn.Module.__call__.__code__
_SEQUENTIAL = nn.Sequential.forward.__code__
_LAYOUT = "the original's result may lie in memory in another order"
_CALLER = "it is called in a way that does not show who holds its input"
_MAX_LAYOUTS = 4096

Numbers = tuple[int, int, int, int, int]
"""References to the tensor, handles on it, references to its storage, handles on that, and references to the caller's
frame: a traceback or a debugger that holds it can read its variables."""


@dataclass(frozen=True)
class Counts:
    """What is counted of a tensor that only the call itself holds."""

    temporary: Numbers
    spent: Numbers  # of a variable of the caller that nothing reads any more
    borrows: bool  # the interpreter puts a variable on the stack without counting it (Python 3.14)


class Activation:
    """One activation: asks at every call, and keeps count."""

    def __init__(
        self,
        kind: ActivationKind,
        names: frozenset[str],  # of the attributes that hold the module
        counts: Callable[[], Counts | str],  # or why they are not known
        smallest: int = SMALLEST,  # elements, below which it does not ask
        stepping_aside: Callable[[str], None] = lambda reason: None,  # if none of its first calls could be in place
    ) -> None:
        self.kind, self.names = kind, names
        self.in_place = self.as_it_was = 0
        self.is_paused = False
        self._counts, self._smallest, self._stepping_aside = counts, smallest, stepping_aside
        self._layouts: dict[tuple[torch.Size, tuple[int, ...]], bool] = {}

    @property
    def is_used(self) -> bool:
        """Whether a call has worked in place."""
        return self.in_place > 0

    def rebound(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The module's forward, asking first."""
        run, is_dropout = self.kind.run, self.kind.is_dropout

        @functools.wraps(original)
        def forward(module: Any, input: Tensor) -> Any:
            if is_compiling() or self.is_paused or (is_dropout and not (module.training and module.p)):
                return original(module, input)
            reason = self._objection(module, input)
            if reason is None:
                self.in_place += 1
                return run(module, input)
            self.as_it_was += 1
            if self.as_it_was == PATIENCE and not self.in_place:
                self._stepping_aside(f"it could not work in place at any of its first {PATIENCE} calls: {reason}")
            result = original(module, input)
            if reason is _LAYOUT:
                if len(self._layouts) >= _MAX_LAYOUTS:
                    self._layouts.clear()
                self._layouts[input.shape, input.stride()] = result.stride() == input.stride()
            return result

        return forward

    def _objection(self, module: nn.Module, x: Tensor) -> str | None:
        """Why ``x`` must not be overwritten; None: nobody else can ever read it."""
        call_impl = sys._getframe(2)
        if call_impl.f_code is not _CALL_IMPL:  # first: a tracer would record the looks at the tensor
            return "it is not called by nn.Module's own __call__ directly: a hook or other code is in between"
        if type(x) is not Tensor:
            return "its input is no plain tensor"
        if x.numel() < self._smallest:
            return "its input has too few elements to gain anything"
        try:
            return self._ask(module, x, call_impl)
        except Exception as error:  # asking must never break the user's step
            return f"its references could not be counted: {type(error).__name__}: {error}"

    def _ask(self, module: nn.Module, x: Tensor, call_impl: FrameType) -> str | None:
        if x.requires_grad:
            if not torch.is_grad_enabled():
                return "its input is part of a graph, its result is not to be"
            if self.kind.not_in_training:
                return self.kind.not_in_training
            if x.is_leaf or has_gradient_hooks(x):
                return "its input is a leaf of the graph, or has hooks of its own"
        elif x.is_inference() and not torch.is_inference_mode_enabled():
            return "its input was made in inference mode, which has ended"
        called = call_impl.f_back
        if called is None or called.f_code is not _CALL or (caller := called.f_back) is None:
            return _CALLER
        storage = x.untyped_storage()
        if not storage.resizable() or (x.is_cpu and storage.is_shared()) or weakref.getweakrefcount(x):
            return "its input's memory is another library's or another process's, or it is referred to weakly"
        numbers = (
            sys.getrefcount(x),
            handles_on_tensor(x),
            sys.getrefcount(storage),
            handles_on_storage(storage),
            sys.getrefcount(caller),
        )
        return self._judge(module, x, caller, call_in(caller), numbers)

    def _judge(
        self, module: nn.Module, x: Tensor, caller: FrameType, call: ActivationCall | None, numbers: Numbers
    ) -> str | None:
        counts = self._counts()
        if isinstance(counts, str):
            return counts
        if has_modes() or is_transformed():
            return "it runs inside a mode that sees every operation, a transform of torch.func or forward-mode AD"
        if x.requires_grad and saved_tensors_hooks() is not None:
            return "it runs inside other saved-tensor hooks (checkpointing, offloading)"
        if call is None or (call.callee not in self.names and caller.f_code is not _SEQUENTIAL):
            return _CALLER
        if call.argument is not None:
            if not call.is_spent:
                return "its input is held by a variable of its caller, which may still read it"
            # Where arguments are passed without being counted, and what is bound to them (y = x) is not counted either,
            # only those are for sure that __call__ passes.
            if counts.borrows and not call.is_own and getattr(caller.f_back, "f_code", None) is not _CALL_IMPL:
                return _CALLER
        if numbers != (counts.temporary if call.argument is None else counts.spent):
            return "something else holds its input, a part of it or (nn.Linear, of 3-D input) what it is a view of"
        # Of other shapes the result always lies as the input does; later layers choose their kernels by that.
        if (not x.is_contiguous() or 1 in x.shape) and not self._layouts.get((x.shape, x.stride())):
            return _LAYOUT
        if x.requires_grad and self.kind.saves_result and not _is_only_read(module, caller):
            return "in place its backward pass needs its result, which the next operation might overwrite"
        return None


call_in = remembered(read_call)


def _is_only_read(module: nn.Module, caller: FrameType | None) -> bool:
    """Whether all that happens to the result of ``module`` is that a layer of torch's own reads it next."""
    while caller is not None and (above := caller.f_back) is not None and above.f_code is _CALL_IMPL:
        parent = above.f_locals["self"]  # of torch's own frame, whose other variables live as long as it does
        if "forward" in vars(parent):
            return False
        if caller.f_code is not _SEQUENTIAL:
            call = call_in(caller)
            if call is None or call.reader is None or getattr(parent, call.callee, None) is not module:
                return False
            return only_reads(getattr(parent, call.reader, None))
        layers = list(parent)
        if layers.count(module) != 1:
            return False
        if layers[-1] is not module:
            return only_reads(layers[layers.index(module) + 1])
        module, caller = parent, above.f_back and above.f_back.f_back  # of the Sequential it is the last of
    return False
