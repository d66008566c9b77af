"""Dropout's random bits: Philox4x32-7 (Salmon et al., SC'11, doi:10.1145/2063384.2063405), a function of a position and not of a state.

Seven rounds are the fewest that pass all tests of BigCrush (table 2 there). A score has 16 bits, so that a counter serves eight keys.

The functions are written for unsigned 64-bit numbers that hold 32-bit words, so that the CPU, the GPU and (as ``.py_func``, on whole
arrays) NumPy run the same statements.
"""

import numpy as np
from numba import njit

from numba_flash.arguments.options import SHARING, Generator, dropout_threshold

ROUNDS = 7
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
WORD, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
BITS, OF_SCORE = np.uint64(16), np.uint64(0xFFFF)
NO_WORDS = (np.uint64(0),) * 4


@njit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """The four words of the counter ``(c0, c1, c2, c3)`` under the key ``(k0, k1)``."""
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> HALF) ^ c1 ^ k0, p1 & WORD, (p0 >> HALF) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


@njit
def bits_of(words, j):
    """Of the words of key j's counter, its 16 bits: half ``j % 2`` (0 is the lower one) of word ``j % 8 // 2``."""
    lane = np.uint64(j) >> np.uint64(1) & np.uint64(3)
    low = words[0] if lane == np.uint64(0) else words[1]
    high = words[2] if lane == np.uint64(2) else words[3]
    word = low if lane < np.uint64(2) else high
    return word >> (np.uint64(j) & np.uint64(1)) * BITS & OF_SCORE


@njit
def words_of(seed, offset, head, i, eight):
    """The words of query i and keys ``8 eight`` to ``8 eight + 7`` of a head: the counter ``(eight, i, head, offset)``, the key `seed`."""
    low, high = np.uint64(seed) & WORD, np.uint64(seed) >> HALF
    return philox4x32(np.uint64(eight), np.uint64(i) & WORD, np.uint64(head) & WORD, np.uint64(offset), low, high)


@njit
def bits(seed, offset, head, i, j):
    """Random bits of the score (i, j) of a head."""
    return bits_of(words_of(seed, offset, head, i, np.uint64(j) >> np.uint64(3)), j)


@njit
def keep(seed, offset, threshold, head, i, j):
    """True if the probability of query i and key j survives; `head` is b * Hq + h."""
    return bits(seed, offset, head, i, j) >= np.uint64(threshold)


def keep_all(state: Generator, dropout: float, heads: np.ndarray, nq: int, nk: int) -> np.ndarray:
    """`keep` for every position from the first of `state` on: boolean array ``(*heads.shape, nq, nk)`` by NumPy."""
    head = heads.astype(np.uint64)[..., None, None]
    i, j = np.arange(nq, dtype=np.uint64)[:, None], np.arange(-(-nk // SHARING), dtype=np.uint64)
    i, j = i + np.uint64(state.first_query), j + np.uint64(state.first_key // SHARING)
    numbers = [np.uint64(x) for x in (state.offset, state.seed & 0xFFFFFFFF, state.seed >> 32)]
    words = np.broadcast_arrays(*philox4x32.py_func(j, i, head, *numbers))
    halves = np.stack(words, axis=-1, dtype="<u4", casting="same_kind").view("<u2")  # the lower one first
    return halves.reshape(*heads.shape, nq, SHARING * j.size)[..., :nk] >= np.uint16(dropout_threshold(dropout))
