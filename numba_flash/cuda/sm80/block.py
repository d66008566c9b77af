"""What a block of threads of the forward pass works on: its rows of queries, their head, and what
they may see of its keys.
"""

from typing import Any, NamedTuple

from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.score.score import Head
from numba_flash.cuda.work.pages import Cache
from numba_flash.cuda.work.row_blocks import build_query_block, row_block_of_decode
from numba_flash.cuda.work.sequence import build_sequence


class Block(NamedTuple):
    """Of queries.

    Attributes
    ----------
    at : Head
        Of the scores.
    b1, kv_head : int
        The second index of the arrays, the first being ``at.b0``, and the head of k and v.
    q, k, v, o, lse : arrays
        Of the head, (n, head_dim) and (n,); of a packed sequence, where it lies. Of few queries,
        q, o and lse of all heads whose queries are rows, (group, n, ...). In pages k and v are a
        `numba_flash.cuda.work.pages.Cache` each.
    row0 : int
        The first query. Of few queries this and others are rows, as
        `numba_flash.cuda.score.fragment.build_row` has them, and the head is the first of the
        group.
    queries, keys : int
        How many there are in the sequence.
    rows : int
        Of the results: queries beyond those of the sequence have results too, unless it is packed.
    low, high : int
        The band, for key - query.
    invalid : bool
        The lengths are impossible.
    q0 : int
        First query of the sequence in the arrays.
    kv_split : int
        Of the keys.
    """

    at: Head
    b1: int
    kv_head: int
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    row0: int
    queries: int
    keys: int
    rows: int
    low: int
    high: int
    invalid: bool
    q0: int
    kv_split: int


@once
def build_block(options, banded, block_m, key_bytes, kv_splits, group=0):
    """``block_of(q, k, v, o, lse, extras, low, high, kv_splits)``: the `Block` of this block of
    threads; `key_bytes` are those of a key and its value. With `kv_splits`, several share its keys.
    Of few queries, those of `group` heads are rows.
    """
    BLOCK_M, KV_SPLITS, SEQUENCES, PACKED = block_m, kv_splits, options.sequences, options.packed
    GROUP, DECODE = group, group > 0
    PAGED, SIZE = options.paged is not None, options.paged.size if options.paged else 1
    query_block_of = build_query_block(options, banded, block_m, key_bytes)
    sequence_of = build_sequence(options)

    @inline
    def block_of(q, k, v, o, lse, extras, low, high, kv_splits):
        nq, nk, heads = i32(q.shape[3]), i32(k.shape[3]), i32(q.shape[2])
        if PAGED:
            nk = i32(extras.page_table.shape[2] * SIZE)
        number, part = i32(cuda.blockIdx.x), i32(0)
        if KV_SPLITS:
            number, part = i32(u32(number) // u32(kv_splits)), i32(u32(number) % u32(kv_splits))
        if DECODE:
            blocks = u32(u32(nq * GROUP + (BLOCK_M - 1)) // u32(BLOCK_M))
            sizes = blocks, u32(k.shape[2]), u32(q.shape[1])
            b0, b1, kv_head, block = row_block_of_decode(u32(number), *sizes)
            h = i32(kv_head * GROUP)
        else:
            b0, b1, h, block = query_block_of(number, extras, q.shape, nk)
        at = Head(b0, b1, b0 * q.shape[1] + b1, h, heads)
        invalid, rows, q0 = False, nq, i32(0)
        if SEQUENCES:
            sequence = sequence_of(extras, b0, b1, nq, nk)
        if PACKED:
            b1 = 0
        if DECODE:
            group, o0 = slice(h, h + GROUP), part * q.shape[0] + b0
            q_head = q[b0, b1, group]
        else:  # kv_head here, not above: there 150 bytes more of registers go to memory
            kv_head = i32(u32(h) // u32(u32(heads) // u32(k.shape[2])))
            q_head = q[b0, b1, h]
        if PAGED:
            k_head, v_head = k[0, :, kv_head], v[0, :, kv_head]
        else:
            k_head, v_head = k[b0, b1, kv_head], v[b0, b1, kv_head]
        if DECODE:
            o_head, lse_head = o[o0, b1, group], lse[o0, b1, group]
        else:
            o_head, lse_head = o[part * q.shape[0] + b0, b1, h], lse[part * q.shape[0] + b0, b1, h]
        row0, low, high = i32(block * BLOCK_M), i32(low), i32(high)
        if SEQUENCES:
            nq, nk, q0 = i32(sequence.queries), i32(sequence.keys), i32(sequence.q0)
            q_head = q_head[sequence.q0 : sequence.q0 + (GROUP if DECODE else nq)]
            if PAGED:
                table = extras.page_table[b0, b1]
                k_head, v_head = Cache(k_head, table, nk), Cache(v_head, table, nk)
            else:
                k_head = k_head[sequence.k0 : sequence.k0 + nk]
                v_head = v_head[sequence.k0 : sequence.k0 + nk]
            low, high = i32(low + sequence.shift), i32(high + sequence.shift)
            invalid = sequence.invalid
            if PACKED:
                rows = nq
                o_head = o_head[sequence.q0 : sequence.q0 + nq]
                lse_head = lse_head[sequence.q0 : sequence.q0 + nq]
        if DECODE:
            nq, rows = i32(nq * GROUP), i32(rows * GROUP)
        heads_of = (q_head, k_head, v_head)
        return Block(
            at, b1, kv_head, *heads_of, o_head, lse_head, row0, nq, nk, rows, low, high, invalid,
            q0, part,
        )  # fmt: skip

    return block_of
