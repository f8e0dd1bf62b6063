"""Tensors in 8 bits, in blocks of 256 elements, for optimizer states: torchao's codes, written in one pass.

:class:`Errors` measures during the run how much 8-bit moments, and Adam updates that use them, differ from float ones.
Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), https://arxiv.org/abs/2110.02861.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_accel.core.torchao import load

BLOCK = 256
LEAST_ELEMENTS = 4096
"""Smaller tensors are not packed, as in the paper: they would save little."""

MODULE = "torchao.optim.subclass_8bit"
_MEASURED_AT = frozenset(10**exponent for exponent in range(8))


def is_possible(tensor: Tensor) -> bool:
    """Returns whether the kind and size of a tensor allow 8 bits."""
    has_blocks = tensor.numel() >= LEAST_ELEMENTS and tensor.numel() % BLOCK == 0
    return has_blocks and tensor.layout == torch.strided and tensor.dtype in (torch.float32, torch.bfloat16)


def is_packed(value: Any) -> bool:
    """Returns whether a value is stored in 8 bits."""
    return type(value).__name__ == "OptimState8bit"


def zeros_like(tensor: Tensor, *, signed: bool) -> Any:
    """Returns 8-bit zeros with the shape, device and unpacked dtype of ``tensor``.

    Without negative values (not ``signed``), the resolution is twice as fine.
    """
    return load(MODULE).OptimState8bit.zeros(tensor.shape, signed, BLOCK, tensor.device, tensor.dtype)


def write(packed: Any, values: Tensor) -> None:
    """Rounds ``values`` to the nearest codes of ``packed``, block by block.

    torchao's own ``copy_`` needs twenty passes to find the codes, unless they are compiled into one.
    """
    blocks = values.float().reshape(-1, BLOCK)
    scale = blocks.abs().amax(dim=-1).clamp(min=1e-12)
    halfway = (packed.qmap[1:] + packed.qmap[:-1]) / 2
    codes = torch.bucketize(blocks / scale[:, None], halfway, right=True, out_int32=True)
    packed.codes.copy_(codes.view(packed.codes.shape))
    packed.scale.copy_(scale)


def read(packed: Any, like: Tensor) -> Tensor:
    """Returns the rounded values of ``packed`` in the dtype and strides of ``like``.

    Fused optimizers go through parameter and state by memory address.
    """
    return torch.empty_like(like).copy_(packed.dequantize())


def packed_bytes(packed: Any) -> int:
    """Returns the memory of ``packed``: one byte per element, four per block, and the code table."""
    return int(packed.codes.nbytes + packed.scale.nbytes + packed.qmap.nbytes)


class Errors:
    """Measures at steps 1, 10, 100 and so on, and at the step after each. Does nothing at other steps.

    Moments: the relative error of rounding, in the norm, over all parameters. Update: the error of one parameter's next
    update that is due to rounded moments, with the same gradient.
    """

    def __init__(self) -> None:
        self._is_rounding, self._is_updating = False, False
        self._moments: dict[str, list[tuple[Tensor, Tensor]]] = {}
        # A parameter whose moments were also kept in floats for one step, and these.
        self._witness: tuple[Tensor, Mapping[str, Tensor]] | None = None
        self._update: float | None = None

    def begin(self, step: int) -> None:
        """Announces the step of the run that begins, counted from 1."""
        self._is_rounding, self._is_updating = step in _MEASURED_AT, step - 1 in _MEASURED_AT
        if self._is_rounding:
            self._moments, self._witness, self._update = {}, None, None

    def before(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        floats: Sequence[Mapping[str, Tensor]],
        group: Mapping[str, Any],
    ) -> None:
        """Called before a step of these parameters, whose moments were read from 8 bits."""
        if not self._is_updating or self._witness is None or getattr(optimizer, "grad_scale", None) is not None:
            return
        witness, exact = self._witness
        for parameter, moments in zip(parameters, floats, strict=True):
            # Without moments the user has cleared the state, and nothing is left to compare.
            if parameter is witness and parameter.grad is not None and moments:
                by_floats, by_bits = (_update(m, parameter.grad, group) for m in (exact, moments))
                self._update = _relative(by_bits - by_floats, by_floats)

    def after(
        self, parameters: Sequence[Tensor], states: Sequence[Mapping[str, Any]], floats: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Called after the moments were rounded."""
        if not self._is_rounding:
            return
        for state, moments in zip(states, floats, strict=True):
            for name, exact in moments.items():
                rounded = read(state[name], exact)
                norms = (rounded - exact).float().square().sum(), exact.float().square().sum()
                self._moments.setdefault(name, []).append(norms)
        if self._witness is None:
            smallest = min(range(len(parameters)), key=lambda at: parameters[at].numel())
            self._witness = parameters[smallest], floats[smallest]

    def line(self, step: int) -> str | None:
        """Returns the new measurements in one line; None if there is nothing new."""
        if not self._is_updating or not self._moments:
            return None
        off = []
        for name, label in (("exp_avg", "the first moment"), ("exp_avg_sq", "the second")):
            errors, norms = zip(*self._moments[name], strict=True)
            off.append(f"{label} by {_relative(torch.stack(errors).sum().sqrt(), torch.stack(norms).sum().sqrt()):.2%}")
        if self._update is not None:
            off.append(f"an update by {self._update:.2%}")
        self._moments, self._witness = {}, None
        return f"rounding puts off {', '.join(off)} (at step {step - 1})"


def _update(moments: Mapping[str, Tensor], gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Returns Adam's direction, without the bias corrections, which are the same for both."""
    beta1, beta2 = group["betas"]
    first = moments["exp_avg"].float().lerp(gradient.float(), 1 - beta1)
    second = moments["exp_avg_sq"].float().lerp(gradient.float().square(), 1 - beta2)
    direction: Tensor = first / (second.sqrt() + group["eps"])
    return direction


def _relative(error: Tensor, norm: Tensor) -> float:
    return float(error.float().norm() / norm.float().norm().clamp(min=torch.finfo(torch.float32).tiny))
