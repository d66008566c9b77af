"""The arrays that `numba_flash.cuda.passes.write_planes` reads: which rows of which head a block of
threads has, and how a warp reads them.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, device, i32, i64, inline, once, u32, u64

LANES, SIDE = 4, 8  # of a warp: so many read a row together, and so many rows are read at a time
STEP = 4 * LANES  # columns that they read at a time
QUERIES, KEYS, VALUES, GRADIENTS = range(4)


class Part(NamedTuple):
    """Of q, k, v or do: one head.

    Attributes
    ----------
    x : array
        (n, columns).
    kind : int
        QUERIES, KEYS, VALUES or GRADIENTS.
    b0, b1, head, kv_head, columns : int
        Where it is, the head of k that it belongs to, and how long its rows are.
    of_head, count : int
        The number of the first part that has the same power, and how many there are.
    first, stop : int
        Its rows that count: others are not read.
    """

    x: Any
    kind: int
    b0: int
    b1: int
    head: int
    kv_head: int
    columns: int
    of_head: int
    count: int
    first: int
    stop: int


@once
def build_part(options, head_dim, head_dim_v):
    """``part_of(number, q, k, v, do, extras)``: the `Part` of that number; all heads of q come
    first, then those of k, then those of v, then those of do, if they are wanted.
    """
    D, DV, PACKED = head_dim, head_dim_v, options.packed
    HAS_Q, HAS_KV = options.q_lengths is not None, options.kv_lengths is not None

    @device
    def part_of(number, q, k, v, do, extras):
        heads_q = i32(q.shape[0] * q.shape[1] * q.shape[2])
        heads_k = i32(k.shape[0] * k.shape[1] * k.shape[2])
        x, kind, columns, start = q, i32(QUERIES), i32(D), i32(0)
        if number >= heads_q + 2 * heads_k:
            x, kind, columns, start = do, i32(GRADIENTS), i32(DV), i32(heads_q + 2 * heads_k)
        elif number >= heads_q + heads_k:
            x, kind, columns, start = v, i32(VALUES), i32(DV), i32(heads_q + heads_k)
        elif number >= heads_q:
            x, kind, columns, start = k, i32(KEYS), i32(D), heads_q
        of_queries = kind == QUERIES or kind == GRADIENTS
        heads, batch1, rows = u32(x.shape[2]), u32(x.shape[1]), i32(x.shape[3])
        own_number = u32(number - start)
        pair = u32(own_number // heads)
        head = i32(own_number - pair * heads)
        b0 = i32(pair // batch1)
        b1 = i32(pair - u32(b0) * batch1)
        count = i32(heads // u32(k.shape[2]))
        first, stop = i32(0), rows
        if PACKED:
            last = extras.q_lengths.shape[0] - 1
            first, stop = i32(extras.kv_lengths[0]), i32(extras.kv_lengths[index(last)])
            if of_queries:
                first, stop = i32(extras.q_lengths[0]), i32(extras.q_lengths[index(last)])
        else:
            if HAS_Q and of_queries:
                stop = i32(extras.q_lengths[index(b0), index(b1)])
            if HAS_KV and not of_queries:
                stop = i32(extras.kv_lengths[index(b0), index(b1)])
        first, stop = max(first, i32(0)), min(stop, rows)
        own, kv_head = x[b0, b1, head], i32(u32(head) // u32(count))
        of_head = i32(number - (head - kv_head * count))
        return Part(own, kind, b0, b1, head, kv_head, columns, of_head, count, first, stop)

    return part_of


@once
def build_read(steps, wide):
    """``read(held, x, i, columns, there)``: this lane's numbers of row i of x, as they lie in
    memory; ``held[4 s + e]`` is that of column ``STEP s + 4 (lane % LANES) + e``, 0 where there is
    none. Rows are `wide`: they lie at multiples of 16 bytes, and so many.
    """
    STEPS, WIDE, fetch = steps, wide, ptx.fetch(4)

    @inline
    def read(held, x, i, columns, there):
        first = i32(cuda.threadIdx.x % LANES * 4)
        if WIDE:
            row = u64(ptx.global_address(x) + u64(i64(i) * x.strides[0]) + u64(4 * first))
            for s in range(STEPS):
                here = there and first + s * STEP < columns
                fetch(held, i32(4 * s), u64(row + u64(4 * STEP * s)), u32(1) if here else u32(0))
        else:
            for s in range(STEPS):
                for e in range(4):
                    d, bits = i32(first + s * STEP + e), u32(0)
                    if there and d < columns:
                        bits = ptx.as_uint32(x[index(i), index(d)])
                    held[4 * s + e] = bits

    return read
