"""LSTM and GRU as torch captures them: whole, in place of unrolled over the example's sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

OPERATIONS: tuple[Any, ...] = (torch.ops.aten.lstm.input, torch.ops.aten.gru.input)


@contextmanager
def recurrence_whole() -> Iterator[None]:
    """Inside, captured graphs have an LSTM or GRU as one operation, for sequences of any length.

    To learn their shapes torch runs Python code that unrolls them, which fixes the length: the kernels of
    ``OpOverload.py_impl`` and ``torch._decomp.decomposition_table``, since torch 2.1. Inside both only tell shapes.
    """
    table: Any = decomposition_table
    before = [(one, {**one.py_kernels}, table[one]) for one in OPERATIONS]
    try:
        for one, kernels, _ in before:
            _set_kernels(one, dict.fromkeys(kernels, _shapes))
            table[one] = _shapes
        yield
    finally:
        for one, kernels, decomposition in before:
            _set_kernels(one, kernels)
            table[one] = decomposition


def _set_kernels(operation: Any, kernels: dict[Any, Any]) -> None:
    operation.py_kernels.clear()
    for key, kernel in kernels.items():
        operation.py_impl(key)(kernel)


def _shapes(
    x: Tensor, states: Any, weights: Any, biases: bool, layers: int, dropout: float, train: bool, both: bool, *_: Any
) -> tuple[Tensor, ...]:
    """What the operation returns, without numbers; ``both``: in both directions."""
    found = [states] if isinstance(states, Tensor) else [*states]
    width = found[0].shape[-1] * (2 if both else 1)
    return (x.new_empty((*x.shape[:-1], width)), *(state.new_empty(state.shape) for state in found))
