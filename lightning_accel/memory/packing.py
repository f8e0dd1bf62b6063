"""Lossless codecs for saved tensors: masks to one bit per element, sparse tensors to a bit mask and nonzero values.

"Zero" means that all bits are zero: a negative zero is a value, and a NaN keeps its payload. A tensor is restored with
the same bits, dtype, device, shape and strides. Other modules decide which tensors to pack.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_accel.memory.bitpacking import fill_words, join_words, mask_bits, split_words
from lightning_accel.ops.nonzeros import WORDS, passes_relu, word_of

PACKABLE = frozenset(
    (
        *(torch.bool, torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    )
)
"""The dtypes that can be packed: all real ones of whole bytes."""

_RUNS, _RUN_LENGTH = 256, 16


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory layout of a tensor without gaps or overlaps."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout | None:
        """Returns the layout of ``tensor``; None if it has gaps (a slice) or overlaps (an expanded view)."""
        expected = 1
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and stride != expected and tensor.numel() > 0:
                return None
            expected *= size
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """Returns a new, uninitialised tensor of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class PackedBits:
    """A tensor as one bit per element, set where it is not zero, and its nonzero elements: equal ones, or all."""

    layout: Layout
    bits: Tensor  # (ceil(N / 8),) uint8, in memory order
    word: int = 0  # the bit pattern of equal elements
    values: Tensor | None = None  # the bit patterns of all, in memory order; None if they are equal
    counts: list[int] = field(default_factory=list)  # the number of values in each piece

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + (0 if self.values is None else self.values.nbytes)

    def unpack(self) -> Tensor:
        tensor = self.layout.empty()
        if self.values is None:
            fill_words(_words(tensor), self.bits, self.word)
        else:
            join_words(_words(tensor), self.bits, self.values, self.counts)
        return tensor


@dataclass(frozen=True, slots=True)
class Sample:
    """Statistics of a few thousand elements of a tensor."""

    density: float  # share of nonzero elements, 0 to 1
    word: int | None  # the bit pattern of all nonzero elements; None if they differ


def is_packable(tensor: Tensor) -> bool:
    """Returns whether this module can pack ``tensor``: it has a real dtype and no gaps or overlaps in memory."""
    return tensor.dtype in PACKABLE and not tensor.is_neg() and Layout.of(tensor) is not None


def pack_bits(mask: Tensor) -> PackedBits:
    """Packs booleans of any shape, eight to a byte."""
    return PackedBits(_layout(mask), mask_bits(_words(mask), lambda words: words != 0), 1)


def pack_above_zero(result: Tensor) -> PackedBits:
    """Keeps what a ReLU's backward pass needs of its result: a tensor of 1 where the gradient passes, 0 elsewhere.

    Torch stops the gradient where ``result <= 0``, so it passes at NaN. For float64, float32, float16 and bfloat16.
    """
    bits = mask_bits(_words(result), passes_relu(result.dtype))
    return PackedBits(_layout(result), bits, word_of(1.0, result.dtype))


def pack_two_valued(tensor: Tensor, word: int) -> PackedBits | None:
    """Packs a tensor of zeros and one other bit pattern, such as a CPU's dropout noise; None if it has more."""
    words = _words(tensor)
    bits = mask_bits(words, lambda words: words == word)
    if not torch.equal(bits, mask_bits(words, lambda words: words != 0)):
        return None
    return PackedBits(_layout(tensor), bits, word)


def pack_nonzeros(tensor: Tensor, max_bytes: float) -> PackedBits | None:
    """Packs a tensor as one bit per element and the nonzero values; None if this needs over ``max_bytes``."""
    values_bytes = max_bytes - (tensor.numel() + 7) // 8
    found = split_words(_words(tensor), int(values_bytes // tensor.element_size()))
    if found is None:
        return None
    bits, values, counts = found
    return PackedBits(_layout(tensor), bits, values=values, counts=counts)


def sample(tensor: Tensor) -> Sample:
    """Examines up to 4096 elements, in short runs spread over the memory. Waits for a GPU."""
    words = _words(tensor)
    if len(words) > _RUNS * _RUN_LENGTH:
        last = len(words) - _RUN_LENGTH
        # Steps by the golden ratio avoid the periods of rows, channels and images.
        starts = torch.arange(_RUNS, device=words.device) * int(0.6180339887 * last) % (last + 1)
        words = words[(starts[:, None] + torch.arange(_RUN_LENGTH, device=words.device)).view(-1)]
    others = words[words != 0]
    low, high = torch.stack([others.min(), others.max()]).tolist() if len(others) else (0, 1)
    return Sample(density=len(others) / len(words), word=int(low) if low == high else None)


def _layout(tensor: Tensor) -> Layout:
    layout = Layout.of(tensor)
    assert layout is not None, "is_packable() comes first"
    return layout


def _words(tensor: Tensor) -> Tensor:
    """Returns the bit patterns of a dense tensor in memory order, sharing its memory: (N,)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(WORDS[tensor.element_size()])
