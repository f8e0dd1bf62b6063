"""Which modules have an in-place form that computes the same, and what forbids it wherever they stand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.core.host import Host
from lightning_accel.core.torch_private.modules import hooks_of

_COPIES = "in place PyTorch copies its input for the backward pass: nothing is saved, and the copy takes time"
_ROUNDS = "in place its gradient is computed from its rounded result: other numbers (in bfloat16, far off)"


@dataclass(frozen=True)
class ActivationKind:
    """How one ``forward`` of torch's is done in place."""

    # Of the module and its input. The module's own `inplace` is not touched: another thread may be reading it.
    run: Callable[[Any, Tensor], Tensor]
    not_in_training: str = ""  # why it stays as it is where a gradient is due; empty: it does not
    saves_result: bool = False  # for its backward pass, where that of the original needs the input
    is_dropout: bool = False  # so that it hands out its very input in evaluation and with p=0


_KINDS: dict[Any, ActivationKind] = {
    nn.ReLU.forward: ActivationKind(lambda m, x: F.relu(x, True)),
    nn.LeakyReLU.forward: ActivationKind(lambda m, x: F.leaky_relu(x, m.negative_slope, True), saves_result=True),
    nn.RReLU.forward: ActivationKind(lambda m, x: F.rrelu(x, m.lower, m.upper, m.training, True), saves_result=True),
    nn.Dropout.forward: ActivationKind(lambda m, x: F.dropout(x, m.p, m.training, True), is_dropout=True),
    nn.Dropout1d.forward: ActivationKind(lambda m, x: F.dropout1d(x, m.p, m.training, True), is_dropout=True),
    nn.Dropout2d.forward: ActivationKind(lambda m, x: F.dropout2d(x, m.p, m.training, True), is_dropout=True),
    nn.Dropout3d.forward: ActivationKind(lambda m, x: F.dropout3d(x, m.p, m.training, True), is_dropout=True),
    nn.ELU.forward: ActivationKind(lambda m, x: F.elu(x, m.alpha, True), _ROUNDS),
    nn.CELU.forward: ActivationKind(lambda m, x: F.celu(x, m.alpha, True), _ROUNDS),
    nn.SELU.forward: ActivationKind(lambda m, x: F.selu(x, True), _ROUNDS),
    nn.Hardtanh.forward: ActivationKind(lambda m, x: F.hardtanh(x, m.min_val, m.max_val, True), _COPIES),
    nn.Hardsigmoid.forward: ActivationKind(lambda m, x: F.hardsigmoid(x, True), _COPIES),
    nn.Hardswish.forward: ActivationKind(lambda m, x: F.hardswish(x, True), _COPIES),
    nn.SiLU.forward: ActivationKind(lambda m, x: F.silu(x, True), _COPIES),
    nn.Mish.forward: ActivationKind(lambda m, x: F.mish(x, True), _COPIES),
    nn.Threshold.forward: ActivationKind(lambda m, x: F.threshold(x, m.threshold, m.value, True), _COPIES),
}

# They read what they are given, keep it only for their backward pass, and give something new.
_READERS = frozenset(
    cls.forward
    for cls in (
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear),
        *(nn.BatchNorm1d, nn.InstanceNorm1d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    )
)


def kind_of(module: nn.Module) -> ActivationKind | None:
    """The kind of ``module``, if it has an in-place form and is not set to it; nothing of the module's own is run."""
    forward = inspect.getattr_static(type(module), "forward", None)
    is_out_of_place = module.__dict__.get("inplace") is False
    return _KINDS.get(forward) if is_out_of_place and inspect.isfunction(forward) else None


def unfit(module: nn.Module, host: Host) -> str | None:
    """Why ``module`` cannot work in place wherever it stands, in words; None when it can."""
    if isinstance(module, nn.LeakyReLU) and module.negative_slope < 0:
        return f"its backward cannot work in place with negative_slope={module.negative_slope}"
    if isinstance(module, nn.RReLU) and module.lower < 0:
        return f"its backward cannot work in place with lower={module.lower}"
    if type(module).forward is nn.Dropout.forward and host.kind in ("cuda", "rocm"):
        return "in place, a GPU's dropout keeps a full-width mask, not one byte an element, and draws other numbers"
    if is_rewired(module):
        return "its forward or __call__ is not the one of its class"
    return "a hook on it may keep its input" if any(hooks_of(module)) else None


def is_rewired(module: nn.Module) -> bool:
    """Whether calling ``module`` runs something else than the ``forward`` of its class."""
    own = vars(module).get("forward")  # that of the class, bound, after unpickling what was rebound
    is_own = own is None or (isinstance(own, MethodType) and own.__func__ is type(module).forward)
    return not is_own or type(module).__call__ is not nn.Module.__call__


def only_reads(module: nn.Module | None) -> bool:
    """Whether ``module`` neither overwrites nor hands on what it is given: one of torch's own, as it was made."""
    while module is not None and not is_rewired(module) and not any(hooks_of(module)):
        if not (isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward):
            return type(module).forward in _READERS
        module = next(iter(module), None)
    return False
