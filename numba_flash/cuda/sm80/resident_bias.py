"""A thread's part of a bias that it needs again and again: in shared memory, where what it reads at
a time lies side by side with that of its neighbours.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import i32, inline, once, u32
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.fetch import held
from numba_flash.cuda.sm80.tiles import KEYS

VECTOR = 16  # bytes that a thread reads at a time


class OwnBias(NamedTuple):
    """A thread's part of the bias on its way to shared memory."""

    words: Any
    smem: int
    column: int
    keys: int


class Four(NamedTuple):
    """Words of the bias: of two rows, 8 apart, two each."""

    a: int
    b: int
    c: int
    d: int


class OfBias(NamedTuple):
    """Functions of a thread; see `build_bias`."""

    hides: Any
    keep: Any
    words_of: Any
    value: Any


@once
def build_bias(options, tile):
    """``hides(part, words)``: one of a part's keys has a bias of -inf; ``keep(part, held)``: that
    becomes the bias of keys beyond the last, and all of it goes to shared memory;
    ``words_of(number, m, bias)``: four words of half a part, for 16 rows; ``value(words, r, x)``:
    row r and element x of them.
    """
    M_TILES, THREADS = tile.m_tiles, tile.threads
    WORDS = held(options, fragment.runs_of_queries(M_TILES, KEYS)).words
    BFLOAT16 = options.bias == "bfloat16"
    HIDDEN = 0xFF80 if BFLOAT16 else 0xFC00  # -inf in 16 bits
    minima = ptx.minima_bfloat16 if BFLOAT16 else ptx.minima_float16
    element = fragment.build_unpack(BFLOAT16)

    @inline
    def hides(part, words):
        least = u32(0)
        for e in range(WORDS):
            least = minima(least, words[part * WORDS + e])
        lower, upper = u32(least & u32(0xFFFF)), u32(least >> u32(16))
        return lower == u32(HIDDEN) or upper == u32(HIDDEN)

    @inline
    def four(number, m, words):
        """Of half a part of the keys, and 16 rows."""
        first = number // 2 * WORDS + 8 * m + number % 2 * 2
        return Four(words[first], words[first + 1], words[first + 4], words[first + 5])

    @inline
    def words_of(number, m, bias):
        at = u32(bias + u32((number * M_TILES + m) * THREADS * VECTOR))
        return ptx.load_shared_words(at)

    @inline
    def keep(part, t):
        if i32(t.column + part * KEYS) >= t.keys:  # runs of keys are there as a whole, or not
            for e in range(WORDS):
                t.words[part * WORDS + e] = u32(HIDDEN << 16 | HIDDEN)
        for half in range(2):
            for m in range(M_TILES):
                at = u32(t.smem + u32(((part * 2 + half) * M_TILES + m) * THREADS * VECTOR))
                x = four(part * 2 + half, m, t.words)
                ptx.store_shared_vector(at, (x.a, x.b, x.c, x.d))

    @inline
    def value(words, r, x):
        return element(words[2 * r + x // 2], x)

    return OfBias(hides, keep, words_of, value)
