"""Looks into masks once, so that a causal one costs neither memory nor time, and remembers what it saw.

A mask that a module computes from its buffers, or is handed by its caller, is a short calculation from a few tensors
that stay the same from call to call. As long as they are the same objects, unwritten, what was seen still holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HIDES_BELOW = -9e3  # a score that low has no weight beside scores of any model that trains
_REMEMBERED = 64  # entries; a mask made anew for every batch must not pile up


def is_traced() -> bool:
    """Whether a compiler is looking on, so that tensors have no values."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


def can_look_into(tensor: Tensor) -> bool:
    """Whether a tensor's values are there to be read at once: not on a GPU, and not while a graph is traced."""
    return tensor.device.type == "cpu" and not is_traced()


@dataclass(frozen=True)
class MaskFacts:
    """What a look into a mask (…, T, S) showed.

    Attributes:
        hides_nothing: Every key takes part everywhere.
        has_empty_rows: Some query sees no key at all.
        window: Keys seen to the left and to the right of each query, None for no limit, if the mask is such a band and
            the same for all samples and heads; else None.
    """

    hides_nothing: bool
    has_empty_rows: bool
    window: tuple[int | None, int | None] | None

    @property
    def is_causal(self) -> bool:
        return self.window == (None, 0)


def look_into(keep: Tensor) -> MaskFacts:
    """The facts of a boolean mask (…, T, S), True where a key takes part. Waits for the mask's device."""
    hides_nothing = bool(keep.all())
    has_empty_rows = not bool(keep.any(dim=-1).all())
    rows, columns = keep.shape[-2:]
    first = keep.reshape(-1, rows, columns)[0] if keep.numel() else keep
    is_one = rows > 1 and (keep.numel() == rows * columns or bool((keep == first).all()))
    window = None if hides_nothing or has_empty_rows or not is_one else _band(first)
    return MaskFacts(hides_nothing, has_empty_rows, window)


def _band(keep: Tensor) -> tuple[int | None, int | None] | None:
    rows, columns = keep.shape
    right = int(keep[0].nonzero().max())
    left = rows - 1 - int(keep[-1].nonzero().min())
    band = torch.ones_like(keep).tril(right).triu(-left)
    if not torch.equal(band, keep):
        return None
    return (None if left >= rows - 1 else left, None if right >= columns - 1 else right)


def causal_fill(mask: Tensor) -> float | None:
    """What an added mask gives to hidden keys, if it is zero elsewhere and hides what a causal mask hides."""
    keep = mask == 0
    if not look_into(keep).is_causal:
        return None
    hidden = mask[~keep]
    return float(hidden.max()) if bool((hidden <= HIDES_BELOW).all()) else None


class MaskMemory:
    """Facts by what a mask was computed from: tensors, by identity and version, and numbers."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[list[weakref.ref[Tensor]], Any]] = {}

    def recall(self, sources: tuple[Any, ...], find: Callable[[], Any]) -> Any:
        """What ``find()`` said when these sources were last seen unchanged, or says now."""
        tensors = [source for source in sources if isinstance(source, Tensor)]
        if any(tensor.is_inference() for tensor in tensors):  # which keep no count of what is written to them
            return find()
        key = tuple((id(s), s._version, s.data_ptr()) if isinstance(s, Tensor) else s for s in sources)
        known = self._known.get(key)
        if known is not None and all(ref() is tensor for ref, tensor in zip(known[0], tensors, strict=True)):
            return known[1]
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        facts = find()
        self._known[key] = ([weakref.ref(tensor) for tensor in tensors], facts)
        return facts
