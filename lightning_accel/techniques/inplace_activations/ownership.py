"""Whether anybody but the activation that is being called can ever read its input: what the runtime counts.

Who else could? Python, by another reference to the tensor. C++, by another handle on it (autograd, DLPack), or by
another tensor on its storage (a view, a result that an operation saved). All of these are counted, so the proof is a
look at a few numbers at the very call, whatever branch the code took. What they are for a tensor that nobody else holds
is tried out, once a process, by the very code that asks later.

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
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401 - where torch.jit.script, reading the original's source, looks for it
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from typing_extensions import override

from lightning_accel.techniques.inplace_activations.callers import Call, read_call
from lightning_accel.techniques.inplace_activations.kinds import Kind, kind_of, only_reads

SMALLEST = 2**14
"""Elements. On fewer, an allocation that is spared is not worth the look."""

PATIENCE = 100
"""Calls. A module that could not work in place at one of so many steps aside."""

_CALL_IMPL, _WRAPPED = nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__
_SEQUENTIAL = nn.Sequential.forward.__code__
_VIEW = "its input is a view: autograd would copy what it is a view of (nn.Linear gives one on 3-D input)"
_TOO_FEW = "its input has too few elements to gain anything"
_LAYOUT = "the original's result lies in memory in another order, as far as is known"
_CALLER = "it is called in a way that does not show who holds its input"

Numbers = tuple[int, int, int, int, int]


class Site:
    """One activation: asks at every call, and keeps count.

    Args:
        kind: What the module does.
        names: The attributes that hold the module.
        smallest: Elements below which it does not ask.
        stepping_aside: Called once with the reason, if it could not work in place at any of its first calls.
    """

    def __init__(
        self,
        kind: Kind,
        names: frozenset[str],
        smallest: int = SMALLEST,
        stepping_aside: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.kind, self.names = kind, names
        self.in_place = self.as_it_was = 0
        self._smallest, self._stepping_aside = smallest, stepping_aside
        self._layouts: dict[tuple[torch.Size, tuple[int, ...]], bool] = {}

    def rebound(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The module's forward, asking first."""
        run, is_dropout = self.kind.run, self.kind.is_dropout

        @functools.wraps(original)
        def forward(module: Any, input: Tensor) -> Any:
            if is_compiling() or (is_dropout and not (module.training and module.p)):
                return original(module, input)
            reason = self._against(module, input)
            if reason is None:
                self.in_place += 1
                return run(module, input, True)
            self._leave(reason)
            result = original(module, input)
            if reason is _LAYOUT:
                self._remember_layout(input, result)
            return result

        return forward

    def _leave(self, reason: str) -> None:
        self.as_it_was += 1
        if self.as_it_was == PATIENCE and not self.in_place:
            self._stepping_aside(f"at none of its first {PATIENCE} calls: {reason}")

    def _against(self, module: nn.Module, x: Tensor) -> str | None:
        call_impl = sys._getframe(2)
        if call_impl.f_code is not _CALL_IMPL:  # first: a tracer would record the looks at the tensor
            return "it is not called by nn.Module's own __call__: a hook, or another's code, stands between"
        if type(x) is not Tensor:
            return "its input is no plain tensor"
        if x.numel() < self._smallest:
            return _TOO_FEW
        try:
            return self._ask(module, x, call_impl)
        except Exception as error:  # asking must never break the user's step
            return f"it could not be asked: {type(error).__name__}: {error}"

    def _ask(self, module: nn.Module, x: Tensor, call_impl: FrameType) -> str | None:
        in_training = x.requires_grad
        if in_training and not torch.is_grad_enabled():
            return "its input is part of a graph, its result is not to be"
        if in_training and self.kind.not_in_training:
            return self.kind.not_in_training
        if x._is_view():
            return _VIEW
        if not in_training and x.is_inference() and not torch.is_inference_mode_enabled():
            return "its input was made in inference mode, which is over"
        if in_training and (x.is_leaf or x._backward_hooks is not None):
            return "its input is a leaf of the graph, or has hooks of its own"
        wrapped = call_impl.f_back
        if wrapped is None or wrapped.f_code is not _WRAPPED or (caller := wrapped.f_back) is None:
            return _CALLER
        storage = x.untyped_storage()
        if not storage.resizable() or (x.is_cpu and storage.is_shared()) or weakref.getweakrefcount(x):
            return "its input's memory is another library's or another process's, or it is referred to weakly"
        numbers = (
            sys.getrefcount(x),
            x._use_count(),  # type: ignore[attr-defined]
            sys.getrefcount(storage),
            torch._C._storage_Use_Count(storage._cdata),
            sys.getrefcount(caller),
        )
        return self._judge(module, x, caller, _call_in(caller), numbers)

    def _judge(
        self, module: nn.Module, x: Tensor, caller: FrameType, call: Call | None, numbers: Numbers
    ) -> str | None:
        counts = calibration()
        if isinstance(counts, str):
            return counts
        surroundings = _surroundings(x.requires_grad)
        if surroundings is not None:
            return surroundings
        if call is None or (call.callee not in self.names and caller.f_code is not _SEQUENTIAL):
            return _CALLER
        if call.argument is not None:
            if not call.is_spent:
                return "its input is held by a variable of its caller, which may still read it"
            # Where arguments are passed without being counted, only those that __call__ passes are for sure.
            if counts.borrows and call.is_parameter and getattr(caller.f_back, "f_code", None) is not _CALL_IMPL:
                return _CALLER
        if numbers != (counts.temporary if call.argument is None else counts.spent):
            return "something else holds its input, or a part of it, or it is saved for the backward pass"
        # Of other shapes the result always lies as the input does; later layers choose their kernels by that.
        if (not x.is_contiguous() or 1 in x.shape) and not self._layouts.get((x.shape, x.stride())):
            return _LAYOUT
        if x.requires_grad and self.kind.saves_result and not _is_only_read(module, caller):
            return "in place its backward pass needs its result, which what comes next might overwrite"
        return None

    def _remember_layout(self, x: Tensor, result: Tensor) -> None:
        if len(self._layouts) >= _MAX_KEPT:
            self._layouts.clear()
        self._layouts[x.shape, x.stride()] = result.stride() == x.stride()


def _surroundings(in_training: bool) -> str | None:
    """What counts references of its own, or wants to see every operation."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "a dispatch or function mode is looking on"
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "it stands inside a transform of torch.func, or forward-mode differentiation"
    if in_training and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "it stands inside other saved-tensor hooks (checkpointing, offloading)"
    return None


_read: dict[tuple[int, int], tuple[CodeType, Call | None]] = {}
_MAX_KEPT = 4096


def _call_in(frame: FrameType) -> Call | None:
    key = id(frame.f_code), frame.f_lasti
    found = _read.get(key)
    if found is None:
        if len(_read) >= _MAX_KEPT:
            _read.clear()
        # The code is kept with it, lest another be given its id.
        found = _read[key] = (frame.f_code, read_call(frame.f_code, frame.f_lasti))
    return found[1]


def _is_only_read(module: nn.Module, caller: FrameType | None) -> bool:
    """Whether all that happens to the result of ``module`` is that a layer of torch's own reads it next."""
    while caller is not None and (above := caller.f_back) is not None and above.f_code is _CALL_IMPL:
        parent = above.f_locals["self"]  # of torch's own frame, whose other variables live as long as it does
        if "forward" in vars(parent):
            return False
        if caller.f_code is not _SEQUENTIAL:
            call = _call_in(caller)
            if call is None or call.reader is None or parent._modules.get(call.callee) is not module:
                return False
            return only_reads(parent._modules.get(call.reader))
        layers = list(parent)
        if layers.count(module) != 1:
            return False
        if layers[-1] is not module:
            return only_reads(layers[layers.index(module) + 1])
        module, caller = parent, above.f_back and above.f_back.f_back  # of the Sequential it is the last of
    return False


@dataclass(frozen=True)
class Counts:
    """What is counted of a tensor that only the call itself holds.

    Attributes:
        temporary: References to the tensor, handles on it, references to its storage, handles on that, and references
            to the caller's frame: a traceback or a debugger that holds it can read its variables.
        spent: The same for a variable of the caller that nothing reads any more.
        borrows: Whether the interpreter puts a variable on the stack without counting it (Python 3.14).
    """

    temporary: Numbers
    spent: Numbers
    borrows: bool


def calibration(*, anew: bool = False) -> Counts | str:
    """The counts of this interpreter and this torch, found by the code that asks later; a reason where they are odd.

    Args:
        anew: Whether to count again: what holds frames (a compiler, a debugger) may have come since.
    """
    global _counts
    if anew or _counts is None:
        try:
            found = _calibrate()
        except Exception as error:
            return f"references could not be counted here: {type(error).__name__}: {error}"
        if isinstance(found, str) or sys.getprofile() is not None or sys.gettrace() is not None:
            return found  # a profiler, say, holds frames while it looks: what is counted then is not for later
        _counts = found
    return _counts


_counts: Counts | None = None


def _calibrate() -> Counts | str:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "without the GIL, Python's reference counts are not exact"
    probe = _Probe()
    with torch.inference_mode(False), torch.enable_grad():
        seen = {name: probe.seen(way) for name, way in _WAYS.items()}
    if any(numbers is None for numbers in seen.values()):
        return "calls are made in a way here that is not known"
    temporary, spent, kept = (seen[name] for name in ("temporary", "spent", "kept"))
    assert temporary is not None
    assert spent is not None
    extra = spent[0] - temporary[0]
    is_known = kept == spent and extra in (0, 1) and temporary[1:] == spent[1:]
    others = [numbers for name, numbers in seen.items() if name not in ("temporary", "spent", "kept")]
    if not is_known or temporary in others:
        return "references are counted in a way here that is not known"
    return Counts(temporary, spent, borrows=extra == 0)


class _Recorder(Site):
    numbers: Numbers | None = None

    @override
    def _judge(
        self, module: nn.Module, x: Tensor, caller: FrameType, call: Call | None, numbers: Numbers
    ) -> str | None:
        is_as_written = call is not None and call.callee == "act" and call.is_spent is (caller.f_code in _SPENDING)
        self.numbers = numbers if is_as_written else None
        return "only recorded"


class _Probe(nn.Module):
    """Calls an activation in several ways, the input held by nobody else or by somebody."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        kind = kind_of(self.act)
        assert kind is not None
        self._recorder = _Recorder(kind, frozenset({"act"}), smallest=0)
        self.act.forward = self._recorder.rebound(nn.ReLU.forward).__get__(self.act)  # type: ignore[method-assign]

    def seen(self, way: Callable[[Any], Any]) -> Numbers | None:
        self._recorder.numbers = None
        way(self)
        return self._recorder.numbers

    def make(self) -> Tensor:
        return torch.ones(2, device="cpu", requires_grad=True) * 2


def _temporary(self: _Probe) -> Tensor:
    return self.act(self.make())  # type: ignore[no-any-return]


def _spent(self: _Probe) -> Tensor:
    x = self.make()
    x = self.act(x)
    return x  # type: ignore[no-any-return]


def _kept(self: _Probe) -> tuple[Tensor, Tensor]:
    x = self.make()
    y = self.act(x)
    return x, y


def _held_by(holding: Callable[[Tensor], Any]) -> Callable[[_Probe], Tensor]:
    def way(self: _Probe) -> Tensor:
        held = []

        def make() -> Tensor:
            x = self.make().sigmoid() if holding is _nothing else self.make()
            held.append(holding(x))
            return x

        return self.act(make())  # type: ignore[no-any-return]

    return way


def _nothing(x: Tensor) -> None:
    return None


_SPENDING = (_spent.__code__,)
_WAYS: dict[str, Callable[[_Probe], Any]] = {
    "temporary": _temporary,
    "spent": _spent,
    "kept": _kept,
    "held": _held_by(lambda x: x),
    "viewed": _held_by(lambda x: x[:1]),
    "detached": _held_by(lambda x: x.detach()),
    "its storage held": _held_by(lambda x: x.untyped_storage()),
    "its result saved": _held_by(_nothing),
    "saved": _held_by(lambda x: x * x),
}
