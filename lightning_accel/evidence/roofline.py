"""What the operations of a step have to do, beside what they take: of many it is less than it costs to have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from lightning_accel.evidence.step_breakdown import OperationsAlike

COPYING = frozenset({"clone", "copy_", "to_copy"})
"""Operations that change nothing but where and how a tensor lies."""


class ToDo:
    """Notes operation by operation what grows with the batch, which a model's weights do not."""

    def __init__(self, model: nn.Module) -> None:
        shapes = [tuple(p.shape) for p in model.parameters() if not nn.parameter.is_lazy(p)]
        self._weights = {*shapes, *(shape[::-1] for shape in shapes)}
        self._flops: list[int] = []
        self._low_precision_flops: list[int] = []
        self._moved_bytes: list[int] = []

    def note(self, name: str, written: Sequence[Tensor], moved_bytes: int) -> None:
        is_of_weight = name in COPYING and any(tuple(tensor.shape) in self._weights for tensor in written)
        self._flops.append(0)
        self._low_precision_flops.append(0)
        self._moved_bytes.append(0 if is_of_weight else moved_bytes)

    def counted(self, flops: int, *, is_low_precision: bool = False) -> None:
        """Tells that the latest operation is a product: of few samples it reads weights, whatever their number."""
        self._flops[-1], self._moved_bytes[-1] = flops, 0
        self._low_precision_flops[-1] = flops if is_low_precision else 0

    def alike(self, each_ms: Iterable[float], are_chosen: Iterable[bool]) -> list[OperationsAlike]:
        """Those that are chosen, with what each has taken, together where they have about as much to do."""
        found: defaultdict[tuple[int, int], OperationsAlike] = defaultdict(OperationsAlike)
        noted = zip(self._flops, self._low_precision_flops, self._moved_bytes, strict=True)
        for ms, is_chosen, (flops, low_precision, moved_bytes) in zip(each_ms, are_chosen, noted, strict=True):
            if is_chosen:
                some = found[flops.bit_length(), moved_bytes.bit_length()]
                some.count += 1
                some.ms += ms
                some.flops += flops
                some.low_precision_flops += low_precision
                some.moved_bytes += moved_bytes
        return list(found.values())
