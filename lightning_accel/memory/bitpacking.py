"""Packs integer words by a bit mask of the relevant ones: with NumPy's loops on a CPU, torch's kernels elsewhere.

A word is the bit pattern of one element, read as a signed integer of the same size. A byte holds eight bits, the first
element's in the highest place. All work is done in pieces: temporaries then fit the cache on a CPU, and are small
compared with the tensor on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_accel.ops.arrays import tensor_as_numpy
from lightning_accel.ops.nonzeros import Test

# Eight bytes of 0 or 1, read as one integer and multiplied by this, give their bits in the highest byte, the first
# byte's bit highest. No two of the 64 partial products overlap, so there is no carry.
_GATHER = 0x8040201008040201 - (1 << 64)
_SPREAD, _PICK = 0x0101010101010101, 0x0102040810204080


def mask_bits(words: Tensor, test: Test) -> Tensor:
    """Returns the bits of ``test(words)``: (N,) words → (ceil(N / 8),) uint8."""
    library, bits = _library(words), _empty_bits(words)
    for part, packed in library.pieces(words, bits):
        packed[:] = library.to_bits(test(part))
    return bits


def split_words(words: Tensor, max_values: int) -> tuple[Tensor, Tensor, list[int]] | None:
    """Separates the nonzero words from zeros; None if there are more than ``max_values`` nonzero words.

    On a GPU this waits for the device once, to learn how much memory the values need.

    Returns:
        Bits, (ceil(N / 8),) uint8, set where the word is not zero; the nonzero words, in order; and how many of these
        are in each piece of the words.
    """
    library, bits = _library(words), _empty_bits(words)
    found = []
    for part, packed in library.pieces(words, bits):
        mask = part != 0
        packed[:] = library.to_bits(mask)
        found.append(library.count(mask))
    counts = library.numbers(found)  # the one place that waits for the device
    if sum(counts) > max_values:
        return None
    values = torch.empty(sum(counts), dtype=words.dtype, device=words.device)
    for (part, _), kept in zip(library.pieces(words, bits), torch.split(values, counts), strict=True):
        library.take_nonzeros(part, library.open(kept))
    return bits, values, counts


def fill_words(out: Tensor, bits: Tensor, word: int) -> None:
    """Sets each word of ``out`` (N,) to ``word`` if its bit is set, otherwise to zero."""
    library = _library(out)
    for part, packed in library.pieces(out, bits):
        library.fill(part, packed, word)


def join_words(out: Tensor, bits: Tensor, values: Tensor, counts: list[int]) -> None:
    """Sets every word of ``out`` (N,) to its value before :func:`split_words`."""
    library = _library(out)
    for (part, packed), some in zip(library.pieces(out, bits), torch.split(values, counts), strict=True):
        library.put_nonzeros(part, packed, library.open(some))


def _empty_bits(words: Tensor) -> Tensor:
    return torch.empty((words.numel() + 7) // 8, dtype=torch.uint8, device=words.device)


def _library(words: Tensor) -> type[_NumPy] | type[_Torch]:
    return _NumPy if words.is_cpu else _Torch


class _Torch:
    """The operations on a piece, by torch's kernels."""

    piece = 1 << 24  # words; a multiple of 8, so that it ends where a byte of bits ends

    @classmethod
    def pieces(cls, words: Tensor, bits: Tensor) -> Iterator[tuple[Any, Any]]:
        """Yields views of the words, piece by piece, each with its bits."""
        array, packed = cls.open(words), cls.open(bits)
        for start in range(0, len(words), cls.piece):
            stop = min(start + cls.piece, len(words))
            yield array[start:stop], packed[start // 8 : (stop + 7) // 8]

    @staticmethod
    def open(tensor: Tensor) -> Any:
        return tensor

    @staticmethod
    def count(mask: Tensor) -> Any:
        return torch.count_nonzero(mask)

    @staticmethod
    def numbers(counts: list[Any]) -> list[int]:
        return torch.stack(counts).tolist() if counts else []

    @staticmethod
    def to_bits(mask: Tensor) -> Tensor:
        ragged = -mask.numel() % 8
        if ragged:
            mask = torch.cat([mask, mask.new_zeros(ragged)])
        return mask.view(torch.int64).mul(_GATHER).view(torch.uint8).view(-1, 8)[:, 7]

    @staticmethod
    def to_mask(bits: Tensor, size: int) -> Tensor:
        spread = bits.to(torch.int64).mul_(_SPREAD).bitwise_and_(_PICK)
        return spread.view(torch.uint8)[:size] != 0

    @staticmethod
    def fill(part: Tensor, bits: Tensor, word: int) -> None:
        torch.mul(_Torch.to_mask(bits, part.numel()), word, out=part)

    @staticmethod
    def take_nonzeros(part: Tensor, out: Tensor) -> None:
        # The number is known, so this does not wait for the device.
        torch.index_select(part, 0, torch.nonzero_static(part, size=len(out)).view(-1), out=out)

    @staticmethod
    def put_nonzeros(part: Tensor, bits: Tensor, values: Tensor) -> None:
        mask = _Torch.to_mask(bits, part.numel())
        part.zero_().index_copy_(0, torch.nonzero_static(mask, size=len(values)).view(-1), values)


class _NumPy(_Torch):
    """The same operations by NumPy's loops."""

    piece = 1 << 17

    @staticmethod
    def open(tensor: Tensor) -> Any:
        return tensor_as_numpy(tensor)

    @staticmethod
    def count(mask: Any) -> Any:
        return np.count_nonzero(mask)

    @staticmethod
    def numbers(counts: list[Any]) -> list[int]:
        return counts

    @staticmethod
    def to_bits(mask: Any) -> Any:
        return np.packbits(mask)

    @staticmethod
    def fill(part: Any, bits: Any, word: int) -> None:
        np.multiply(np.unpackbits(bits, count=part.size).view(np.int8), part.dtype.type(word), out=part)

    @staticmethod
    def take_nonzeros(part: Any, out: Any) -> None:
        # Comparing again takes a tenth of the time. compress() is three to six times as fast as part[mask].
        np.compress(part != 0, part, out=out)

    @staticmethod
    def put_nonzeros(part: Any, bits: Any, values: Any) -> None:
        part.fill(0)
        mask = np.unpackbits(bits, count=part.size).view(np.bool_)
        # Positions instead of the mask: a mask costs five times as much at half density, by its branches.
        part[np.flatnonzero(mask)] = values
