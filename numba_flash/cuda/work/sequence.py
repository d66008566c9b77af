"""Where the sequence of a batch element lies: lengths (padded batches) and offsets (packed ones),
read on the device, or lengths that are numbers among a kernel's arguments.
"""

from typing import NamedTuple

from numba_flash.arguments.options import AS_NUMBERS
from numba_flash.cuda.arguments import MOST_LENGTHS
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import device, i64, once


class Sequence(NamedTuple):
    """One sequence.

    Attributes
    ----------
    q0, queries, k0, keys : int64
        First query and key in the arrays, and how many there are.
    shift : int64
        How far the band shifts against that of the longest possible sequence.
    invalid : bool
        The lengths are impossible: nothing of the sequence is read, and its results are NaN.
    """

    q0: int
    queries: int
    k0: int
    keys: int
    shift: int
    invalid: bool


@once
def build_pick(count):
    """``pick(values, i)``: element i of `count` values, a power of two, without a branch."""
    HALF = count // 2
    if count == 1:
        return device(lambda values, i: values[0])
    pick_half = build_pick(HALF)

    @device
    def pick(values, i):
        low, high = pick_half(values[:HALF], i), pick_half(values[HALF:], i)
        return high if i & HALF else low

    return pick


@once
def build_sequence(options):
    """``sequence(extras, b0, b1, nq, nk)``: the `Sequence` of a batch element in arrays of `nq`
    queries and `nk` keys.
    """
    PACKED, FOLLOWS = options.packed, options.follows
    HAS_Q, HAS_KV = options.q_lengths is not None, options.kv_lengths is not None
    NUMBERS, pick = options.kv_lengths == AS_NUMBERS, build_pick(MOST_LENGTHS)

    @device
    def sequence(extras, b0, b1, nq, nk):
        q0, queries = i64(0), i64(nq)
        k0, keys = i64(0), i64(nk)
        invalid = False
        if PACKED:
            q0, k0 = i64(extras.q_lengths[index(b1)]), i64(extras.kv_lengths[index(b1)])
            queries = i64(extras.q_lengths[index(b1 + 1)]) - q0
            keys = i64(extras.kv_lengths[index(b1 + 1)]) - k0
        else:
            if HAS_Q:
                queries = i64(extras.q_lengths[index(b0), index(b1)])
            if NUMBERS:  # of one leading axis
                keys = i64(pick(extras.kv_lengths, b1))
            elif HAS_KV:
                keys = i64(extras.kv_lengths[index(b0), index(b1)])
        if q0 < 0 or k0 < 0 or queries < 0 or keys < 0 or q0 + queries > nq or k0 + keys > nk:
            q0, queries = i64(0), i64(0)
            k0, keys = i64(0), i64(0)
            invalid = True
        shift = (keys - nk) - (queries - nq) if FOLLOWS else i64(0)
        return Sequence(q0, queries, k0, keys, shift, invalid)

    return sequence
