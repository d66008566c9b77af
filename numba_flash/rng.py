"""Dropout's random bits: Philox4x32-10 (Salmon et al., SC'11, doi:10.1145/2063384.2063405), a function of a position and not of a state.

The functions are written for unsigned 64-bit numbers that hold 32-bit words, so that the CPU, the GPU and (as ``.py_func``, on whole
arrays) NumPy run the same statements.
"""

import numpy as np
from numba import njit

from numba_flash.options import Generator, dropout_threshold

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
WORD, HALF, LANES = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(3)


@njit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """The four words of the counter ``(c0, c1, c2, c3)`` under the key ``(k0, k1)``."""
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & WORD, (p0 >> HALF) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


@njit
def word(seed, offset, head, i, j):
    """Random word of the score (i, j) of a head: word ``j % 4`` of the counter ``(j // 4, i, head, offset)`` under the key `seed`."""
    j = np.uint64(j)
    w0, w1, w2, w3 = philox4x32(
        j >> np.uint64(2), np.uint64(i) & WORD, np.uint64(head) & WORD, np.uint64(offset), np.uint64(seed) & WORD, np.uint64(seed) >> HALF
    )
    lane = j & LANES
    low = w0 if lane == np.uint64(0) else w1
    high = w2 if lane == LANES - np.uint64(1) else w3
    return low if lane < LANES - np.uint64(1) else high


@njit
def keep(seed, offset, threshold, head, i, j):
    """True if the probability of query i and key j survives; `head` is b * Hq + h."""
    return word(seed, offset, head, i, j) >= np.uint64(threshold)


def keep_all(state: Generator, dropout: float, heads: np.ndarray, nq: int, nk: int) -> np.ndarray:
    """`keep` for every position from the first of `state` on: boolean array ``(*heads.shape, nq, nk)`` by NumPy."""
    head = heads.astype(np.uint64)[..., None, None]
    i, j = np.arange(nq, dtype=np.uint64)[:, None], np.arange(-(-nk // 4), dtype=np.uint64)
    i, j = i + np.uint64(state.first_query), j + np.uint64(state.first_key // 4)
    numbers = [np.uint64(x) for x in (state.offset, state.seed & 0xFFFFFFFF, state.seed >> 32)]
    words = np.broadcast_arrays(*philox4x32.py_func(j, i, head, *numbers))
    shape = (*heads.shape, nq, 4 * j.size)
    return np.stack(words, axis=-1).reshape(shape)[..., :nk] >= np.uint64(dropout_threshold(dropout))
