"""Integer words and the bits that say which of them matter: numpy's loops on a CPU, torch's kernels elsewhere.

A word is the bit pattern of one element, read as a signed integer of its size. Bits lie eight to a byte, the first
element's in the highest place. Everything runs in pieces, for temporaries that fit the cache on a CPU and stay small
beside the tensor on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Test = Callable[[Any], Any]
"""Words → booleans, elementwise, written with operators that numpy arrays and tensors share."""

# Multiples of 8: a piece ends where a byte of bits ends.
_HOST_PIECE = 1 << 17
_DEVICE_PIECE = 1 << 24

# Eight bytes of 0 or 1, read as one integer, times this: their bits side by side in the highest byte, the first byte's
# highest. No two of the 64 partial products meet, so that nothing is carried.
_GATHER = 0x8040201008040201 - (1 << 64)
_SPREAD, _PICK = 0x0101010101010101, 0x0102040810204080


@dataclass(frozen=True, slots=True)
class Split:
    """The words that are not zero, and where they stood.

    Attributes:
        bits: (ceil(N / 8),) uint8, set where the word is not zero.
        values: The other words, in their order.
        counts: How many of the values each piece of the words has.
    """

    bits: Tensor
    values: Tensor
    counts: tuple[int, ...]


def mask_bits(words: Tensor, test: Test) -> Tensor:
    """The bits of ``test(words)``: (N,) words → (ceil(N / 8),) uint8."""
    bits = torch.empty((words.numel() + 7) // 8, dtype=torch.uint8, device=words.device)
    if words.is_cpu:
        array, packed = words.numpy(), bits.numpy()
        for piece, place in _pieces(array.size, _HOST_PIECE):
            packed[place] = np.packbits(test(array[piece]))
    else:
        _device_mask_bits(words, test, bits)
    return bits


def split_words(words: Tensor, max_values: int) -> Split | None:
    """Parts the words that are not zero from those that are; None when there are more than ``max_values`` of them.

    On a GPU this waits for the device once, to learn how much memory the values need.
    """
    return _host_split(words, max_values) if words.is_cpu else _device_split(words, max_values)


def fill_words(out: Tensor, bits: Tensor, word: int) -> None:
    """Sets every word of ``out`` (N,): to ``word`` where its bit is set, else to zero."""
    if out.is_cpu:
        array, packed = out.numpy(), bits.numpy()
        for piece, place in _pieces(array.size, _HOST_PIECE):
            part = array[piece]
            np.multiply(np.unpackbits(packed[place], count=part.size).view(np.int8), array.dtype.type(word), out=part)
    else:
        _device_fill(out, bits, word)


def join_words(out: Tensor, split: Split) -> None:
    """Sets every word of ``out`` (N,) to what it was when it was split."""
    (_host_join if out.is_cpu else _device_join)(out, split)


def _pieces(size: int, piece: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the words, each with the slice of its bits."""
    for start in range(0, size, piece):
        stop = min(start + piece, size)
        yield slice(start, stop), slice(start // 8, (stop + 7) // 8)


# -- numpy -----------------------------------------------------------------------------------------------------------


def _host_split(words: Tensor, max_values: int) -> Split | None:
    bits = torch.empty((words.numel() + 7) // 8, dtype=torch.uint8, device=words.device)
    array, packed = words.numpy(), bits.numpy()
    counts = []
    for piece, place in _pieces(array.size, _HOST_PIECE):
        mask = array[piece] != 0
        packed[place] = np.packbits(mask)
        counts.append(int(np.count_nonzero(mask)))
    if sum(counts) > max_values:
        return None
    values = torch.empty(sum(counts), dtype=words.dtype, device=words.device)
    kept, start = values.numpy(), 0
    for (piece, _), count in zip(_pieces(array.size, _HOST_PIECE), counts, strict=True):
        part = array[piece]
        # Comparing once more is a tenth of this loop. compress() is three to six times as fast as part[mask].
        np.compress(part != 0, part, out=kept[start : start + count])
        start += count
    return Split(bits, values, tuple(counts))


def _host_join(out: Tensor, split: Split) -> None:
    array, packed, kept = out.numpy(), split.bits.numpy(), split.values.numpy()
    start = 0
    for (piece, place), count in zip(_pieces(array.size, _HOST_PIECE), split.counts, strict=True):
        part = array[piece]
        part.fill(0)
        mask = np.unpackbits(packed[place], count=part.size).view(np.bool_)
        # Positions rather than the mask itself, whose branches cost five times as much at half density.
        part[np.flatnonzero(mask)] = kept[start : start + count]
        start += count


# -- torch -----------------------------------------------------------------------------------------------------------


def _device_mask_bits(words: Tensor, test: Test, bits: Tensor) -> None:
    for piece, place in _pieces(words.numel(), _DEVICE_PIECE):
        bits[place] = _to_bits(test(words[piece]))


def _device_split(words: Tensor, max_values: int) -> Split | None:
    bits = torch.empty((words.numel() + 7) // 8, dtype=torch.uint8, device=words.device)
    masks = []
    for piece, place in _pieces(words.numel(), _DEVICE_PIECE):
        masks.append(words[piece] != 0)
        bits[place] = _to_bits(masks[-1])
    # The one place that waits for the device: the counts of all pieces at once.
    counts = torch.stack([mask.sum() for mask in masks]).tolist() if masks else []
    if sum(counts) > max_values:
        return None
    values = torch.empty(sum(counts), dtype=words.dtype, device=words.device)
    start = 0
    for (piece, _), mask, count in zip(_pieces(words.numel(), _DEVICE_PIECE), masks, counts, strict=True):
        torch.index_select(words[piece], 0, _positions(mask, count), out=values[start : start + count])
        start += count
    return Split(bits, values, tuple(counts))


def _device_fill(out: Tensor, bits: Tensor, word: int) -> None:
    for piece, place in _pieces(out.numel(), _DEVICE_PIECE):
        part = out[piece]
        torch.mul(_from_bits(bits[place], part.numel()), word, out=part)


def _device_join(out: Tensor, split: Split) -> None:
    out.zero_()
    start = 0
    for (piece, place), count in zip(_pieces(out.numel(), _DEVICE_PIECE), split.counts, strict=True):
        mask = _from_bits(split.bits[place], len(out[piece]))
        out[piece].index_copy_(0, _positions(mask, count), split.values[start : start + count])
        start += count


def _positions(mask: Tensor, count: int) -> Tensor:
    """Where the mask is set. With the count known, nothing has to be asked of the device."""
    return torch.nonzero_static(mask, size=count).view(-1)


def _to_bits(mask: Tensor) -> Tensor:
    ragged = -mask.numel() % 8
    if ragged:
        mask = torch.cat([mask, mask.new_zeros(ragged)])
    return mask.view(torch.int64).mul(_GATHER).view(torch.uint8).view(-1, 8)[:, 7]


def _from_bits(bits: Tensor, size: int) -> Tensor:
    spread = bits.to(torch.int64).mul_(_SPREAD).bitwise_and_(_PICK)
    return spread.view(torch.uint8)[:size] != 0
