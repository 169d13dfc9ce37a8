"""Bits of a 64-bit key spread over all 64 bits: the finalizer of splitmix64, on whole arrays.

Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014); the constants
are those of Vigna's public-domain splitmix64.c. It is a bijection, so two keys never meet in it,
and every output bit depends on every
input bit: any slice of the result may serve as a hash. Who takes which slice is agreed here,
because two users of one slice would spoil each other (all keys of one of 4 partitions agree modulo
4, and would fill 1/4 of a hash table that looks at the same bits):

    user                     looks at
    partition.owner_of       the value modulo the number of partitions, so mostly the low bits
    index.KeyIndex           the highest bits, and those from 17 up
    initializer              all bits, as the seed of another splitmix64
    admission.Doorkeeper     the value mixed once more
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# 2**64 / golden ratio, odd: the step of the splitmix64 counter
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix64(values: npt.NDArray[np.int64] | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's output for each state in `values` (any shape, 64-bit integers); arithmetic is
    modulo 2**64.
    """
    mixed = values.view(np.uint64) + GOLDEN_GAMMA
    shifted = mixed >> _SHIFT_1
    mixed ^= shifted
    mixed *= _FACTOR_1
    np.right_shift(mixed, _SHIFT_2, out=shifted)
    mixed ^= shifted
    mixed *= _FACTOR_2
    np.right_shift(mixed, _SHIFT_3, out=shifted)
    mixed ^= shifted
    return mixed
