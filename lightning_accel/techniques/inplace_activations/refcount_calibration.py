"""What is counted of a tensor that nobody else holds, in this interpreter and this torch: found by trying it out."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.techniques.inplace_activations.callers import ActivationCall
from lightning_accel.techniques.inplace_activations.kinds import kind_of
from lightning_accel.techniques.inplace_activations.ownership import Activation, Counts, Numbers

_Unary = Callable[[Tensor], Any]
# What else may hold a tensor: a later operation that saved it, a variable, a view, another tensor on its storage, that.
_HOLDS: tuple[_Unary, ...] = (lambda x: x * x, lambda x: x, lambda x: x[:1], Tensor.detach, Tensor.untyped_storage)

_counts: Counts | None = None


def calibration(*, anew: bool = False) -> Counts | str:
    """The counts of this interpreter and this torch, found by the code that asks later; a reason where they are odd.

    Counted ``anew`` where what holds frames (a compiler, a debugger) may have come since.
    """
    global _counts
    if not anew and _counts is not None:
        return _counts
    try:
        found = _calibrate()
    except Exception as error:
        return f"references could not be counted here: {type(error).__name__}: {error}"
    # A profiler, say, holds frames while it looks: what is counted then is not for later.
    if isinstance(found, Counts) and sys.getprofile() is None and sys.gettrace() is None:
        _counts = found
    return found


def _calibrate() -> Counts | str:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "without the GIL, Python's reference counts are not exact"
    probe = _Probe()
    with torch.inference_mode(False), torch.enable_grad():
        temporary, spent, kept = map(probe.numbers_of, (_Probe.temporary, _Probe.spent, _Probe.kept))
        # Saved by the operation whose result it is, for its backward pass.
        held = [probe.numbers_of(functools.partial(_Probe.temporary, operation=torch.sigmoid))]
        held += [probe.numbers_of(functools.partial(_Probe.temporary, hold=hold)) for hold in _HOLDS]
    if temporary is None or spent is None or None in (kept, *held):
        return "calls are made in a way here that is not known"
    extra = spent[0] - temporary[0]
    if kept != spent or extra not in (0, 1) or temporary[1:] != spent[1:] or temporary in held:
        return "references are counted in a way here that is not known"
    return Counts(temporary, spent, borrows=extra == 0)


class _Recorder(Activation):
    numbers: Numbers | None = None

    @override
    def _judge(
        self, module: nn.Module, x: Tensor, caller: FrameType, call: ActivationCall | None, numbers: Numbers
    ) -> str | None:
        is_spent = caller.f_code is _Probe.spent.__code__
        is_as_written = call is not None and call.callee == "act" and call.is_spent is is_spent
        self.numbers = numbers if is_as_written else None
        return "only recorded"


class _Probe(nn.Module):
    """Calls an activation in several ways, the input held by nobody else or by somebody."""

    def __init__(self) -> None:
        super().__init__()
        self._held: Any = None
        self.act = nn.ReLU()
        kind = kind_of(self.act)
        assert kind is not None
        self._recorder = _Recorder(kind, frozenset({"act"}), lambda: "", smallest=0)
        self.act.forward = self._recorder.rebound(nn.ReLU.forward).__get__(self.act)  # type: ignore[method-assign]

    def numbers_of(self, call: Callable[[_Probe], Any]) -> Numbers | None:
        self._recorder.numbers = None
        call(self)
        return self._recorder.numbers

    def made(self, operation: _Unary = torch.neg, hold: _Unary = lambda x: None) -> Tensor:
        x: Tensor = operation(torch.ones(2, device="cpu", requires_grad=True))
        self._held = hold(x)
        return x

    def temporary(self, operation: _Unary = torch.neg, hold: _Unary = lambda x: None) -> Tensor:
        return self.act(self.made(operation, hold))  # type: ignore[no-any-return]

    def spent(self) -> Tensor:
        x = self.made()
        x = self.act(x)
        return x  # type: ignore[no-any-return]

    def kept(self) -> tuple[Tensor, Tensor]:
        x = self.made()
        y = self.act(x)
        return x, y
