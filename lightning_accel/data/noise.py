"""Normal random numbers that NumPy and CuPy compute alike: a function of a key and of each number's place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lightning_accel.data.tensor_arrays import Array

_AT_A_TIME = 1 << 20  # pairs of numbers, so that what is in between stays small


def normal(xp: Any, key: int, shape: tuple[int, ...]) -> Array:
    """Standard normal numbers of ``shape``, float32, the same for the same ``key`` of 64 bits.

    A counter run through SplitMix64's output function (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014), and pairs of what comes out through Box and Muller's transform (1958).
    """
    count = math.prod(shape)
    numbers = xp.empty(count + count % 2, np.float32).reshape(2, -1)
    pairs = numbers.shape[1]
    for begin in range(0, pairs, _AT_A_TIME):
        end = min(begin + _AT_A_TIME, pairs)
        bits = _mixed(xp.arange(begin, end, dtype=np.uint64), key)
        # 32 bits each, moved off zero, whose logarithm is none.
        radius = ((bits >> np.uint64(32)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
        turn = (bits & np.uint64(0xFFFFFFFF)).astype(np.float32) * np.float32(2 * math.pi * 2**-32)
        radius = xp.sqrt(-2 * xp.log(xp.minimum(radius, np.float32(1))))
        numbers[0, begin:end] = radius * xp.cos(turn)
        numbers[1, begin:end] = radius * xp.sin(turn)
    return numbers.reshape(-1)[:count].reshape(shape)


def _mixed(counter: Array, key: int) -> Array:
    """64 random bits for each number of the counter, which is overwritten."""
    counter *= np.uint64(0x9E3779B97F4A7C15)
    counter += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        counter ^= counter >> np.uint64(shift)
        counter *= np.uint64(factor)
    counter ^= counter >> np.uint64(31)
    return counter
