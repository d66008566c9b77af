"""The lists of `numba_flash.cuda.tile_lists` of a mask of blocks, made from these: nothing is
written down pair by pair.
"""

from typing import Any, NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.lang import cuda, i32, i64, inline, types, u32, u64
from numba_flash.cuda.number import array, index
from numba_flash.cuda.score import build_elements
from numba_flash.cuda.sequence import build_sequence
from numba_flash.cuda.tile_lists import WARP, append, which_list

AT_ONCE = 4  # tiles that a lane looks at before it uses the first


class Look(NamedTuple):
    """What a lane looks at.

    Attributes
    ----------
    found, kinds : array
        What it finds of each tile, and that in two bits of each; registers.
    head : array
        Of the mask.
    block, first : int
        The list's block, and the lane's first tile.
    queries, keys, low, high : int
        Of the sequence.
    """

    found: Any
    kinds: Any
    head: Any
    block: int
    first: int
    queries: int
    keys: int
    low: int
    high: int


def build(options, block_m, block_n, transposed, warps):
    """Kernel ``block_lists(tiles, bits, extras, nq, nk, low, high)``, as `tile_lists.build` says;
    a warp makes a list, each lane looks at some of its tiles at once.
    """
    BLOCK_M, BLOCK_N, TRANSPOSED, WARPS = block_m, block_n, transposed, warps
    WITHIN = options.blocks.divided_by(block_m, block_n)  # no tile lies in several blocks
    sequence_of = build_sequence(options)
    row_of, column_of = build_elements(options.blocks, inline)

    @inline
    def look_at(head, row0, row1, col0, col1, there):
        """What the mask leaves of a tile, if it is there: 0 nothing, 1 something, 3 all; of a tile
        that lies in a block, the block's element.
        """
        row, column = i32(row_of(row0)), i32(column_of(col0))
        if WITHIN:
            at = u64(i64(row) * i64(head.strides[0]) + i64(column) * i64(head.strides[1]))
            address = u64(ptx.global_address(head) + at)
            return i32(ptx.fetch_byte(address, u32(1) if there else u32(0)))
        kind, every = i32(0), i32(3)
        if there:
            for r in range(row, i32(row_of(i32(row1 - 1))) + 1):
                for c in range(column, i32(column_of(i32(col1 - 1))) + 1):
                    seen = head[index(r), index(c)]
                    kind = i32(1) if seen else kind
                    every = every if seen else i32(1)
        return i32(kind * every)

    @inline
    def look(n, x):
        across = i32(x.first + n * WARP)
        row0 = i32((across if TRANSPOSED else x.block) * BLOCK_M)
        col0 = i32((x.block if TRANSPOSED else across) * BLOCK_N)
        row1, col1 = i32(row0 + BLOCK_M), i32(col0 + BLOCK_N)
        clear = row1 <= x.queries and col1 <= x.keys
        clear = clear and mask.all_visible(row0, row1, col0, col1, x.low, x.high)
        row1, col1 = min(row1, x.queries), min(col1, x.keys)
        start, stop = mask.kv_range(row0, row1, x.keys, x.low, x.high)
        there = row0 < x.queries and col0 < stop and col1 > start and start < stop
        x.found[n] = look_at(x.head, row0, row1, col0, col1, there)
        x.kinds[0] = i32(x.kinds[0] | i32(i32(3 if clear else 1) << i32(2 * n)))

    @inline
    def judge(n, x):
        kind = (i32(3) if x.found[n] != i32(0) else i32(0)) if WITHIN else i32(x.found[n])
        x.kinds[0] = i32(x.kinds[0] & ~i32(i32(kind ^ i32(3)) << i32(2 * n)))

    look_at_once, judge_all = ptx.repeated(AT_ONCE, look), ptx.repeated(AT_ONCE, judge)

    def block_lists(tiles, bits, extras, nq, nk, low, high):
        found, kinds = cuda.local.array(AT_ONCE, i32), cuda.local.array(1, i32)  # registers
        warp, lane = i32(cuda.threadIdx.x // WARP), i32(cuda.threadIdx.x % WARP)
        which = which_list(u32(i32(cuda.blockIdx.x) * WARPS + warp), tiles.shape)
        b0, b1, block = which.b0, which.b1, i32(which.block)
        if b0 < u32(tiles.shape[0]):
            sequence = sequence_of(extras, b0, b1, nq, nk)
            queries, keys = i32(sequence.queries), i32(sequence.keys)
            low, high = i32(low + sequence.shift), i32(high + sequence.shift)
            head = extras.mask[index(b0), index(b1), index(which.head)]
            count, across = i32(0), i32(tiles.shape[4]) - 1
            for first in range(0, across, AT_ONCE * WARP):
                kinds[0] = i32(0)
                own = i32(first + lane)
                looked = Look(found, kinds, head, block, own, queries, keys, low, high)
                look_at_once(looked)
                judge_all(looked)
                for n in range(AT_ONCE):
                    if first + n * WARP < across:
                        kind = i32(kinds[0] >> i32(2 * n)) & i32(3)
                        count = append(tiles, bits, which, i32(first + n * WARP), i32(kind), count)
            if lane == 0:
                tiles[index(b0), index(b1), index(which.head), index(block), 0] = count

    lists, words = array(types.int32, 5), array(types.uint32, 5)
    signature = types.void(lists, words, extras_type(options), *[types.int64] * 4)
    return block_lists, signature, {"launch_bounds": (WARP * warps, 1)}
