"""Captures LSTM and GRU as one operation, instead of unrolled over the example's sequence length."""

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
    """Makes captured graphs hold an LSTM or GRU as one operation, for sequences of any length.

    To learn output shapes, torch runs Python code that unrolls the sequence, which fixes its length: the kernels of
    ``OpOverload.py_impl`` and ``torch._decomp.decomposition_table``, since torch 2.1. Inside the context both only
    return shapes.
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
    """Returns empty tensors of the operation's output shapes. ``both`` means bidirectional."""
    found = [states] if isinstance(states, Tensor) else [*states]
    width = found[0].shape[-1] * (2 if both else 1)
    return (x.new_empty((*x.shape[:-1], width)), *(state.new_empty(state.shape) for state in found))
