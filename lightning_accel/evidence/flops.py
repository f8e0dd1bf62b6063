"""The FLOPs of a step, as autograd's operations come: each by its formula, a forward pass that is repeated left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop
from typing_extensions import override

from lightning_accel.core.torch_private.autograd import is_in_backward
from lightning_accel.core.torch_private.modes import DispatchMode

_aten = torch.ops.aten

# Under inference mode, and within jagged tensors, these arrive whole; elsewhere autograd has taken them apart before.
_COMPOSITE = {
    *(_aten.linear, _aten.matmul, _aten.einsum, _aten.scaled_dot_product_attention),
    *(_aten.conv1d, _aten.conv2d, _aten.conv3d),
}


class FlopMode(DispatchMode):
    """Counts the FLOPs of the operations under it, by the formulas of :mod:`torch.utils.flop_counter`.

    :class:`~torch.utils.flop_counter.FlopCounterMode` itself also hooks every module of the process, to say which
    one spent what; and it counts a forward pass that gradient checkpointing repeats as if the model had asked for it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0  # counted so far
        self.saw_backward = False  # whether an operation ran in a backward pass
        self.failure: Exception | None = None  # what went wrong in a formula; the count is then worthless

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ == "FakeTensor" for kind in types):  # DTensor asks about shapes: that is no work
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            # A tensor subclass (DTensor, jagged tensor) unwraps first: what this rank really computes comes next.
            return NotImplemented
        operation = getattr(func, "overloadpacket", func)
        if operation in _COMPOSITE:
            with self:
                return func.decompose(*args, **kwargs)
        out = self.run(func, args, kwargs)
        is_backward = is_in_backward()
        self.saw_backward |= is_backward
        # Backward passes run without grad mode, so an operation in one with grad mode is a forward pass repeated by
        # checkpointing: work, but not the model's. (So is a backward pass under create_graph=True: it is left out.)
        if not (is_backward and torch.is_grad_enabled()):
            try:
                flops = _formula(operation)(*args, **kwargs, out_val=out)
            except Exception as error:  # a measurement must not end the user's run
                self.failure = error
            else:
                self.flops += flops
                self.counted(flops)
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def counted(self, flops: int) -> None:
        """Told of those of the operation that was run last."""


def _formula(operation: Any) -> Callable[..., int]:
    if (known := flop_registry.get(operation)) is not None:
        return known  # type: ignore[no-any-return]
    # torch's table has the fused attention kernels of every GPU, and not the CPU's.
    name = getattr(operation, "__name__", "")
    if "scaled_dot_product" in name:
        return sdpa_backward_flop if name.endswith("backward") else sdpa_flop
    return lambda *args, **kwargs: 0
