"""The lists of `numba_flash.cuda.tile_lists` of a mask of blocks, made from these: nothing is
written down pair by pair.
"""

from numba_flash import mask
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.lang import cuda, i32, inline, types, u32
from numba_flash.cuda.number import array, index
from numba_flash.cuda.score import build_elements
from numba_flash.cuda.sequence import build_sequence
from numba_flash.cuda.tile_lists import WARP, append, which_list


def build(options, block_m, block_n, transposed, warps):
    """Kernel ``block_lists(tiles, bits, extras, nq, nk, low, high)``, as `tile_lists.build` says;
    a warp makes a list, each lane looks at a tile.
    """
    BLOCK_M, BLOCK_N, TRANSPOSED, WARPS = block_m, block_n, transposed, warps
    WITHIN = options.blocks.divided_by(block_m, block_n)  # no tile lies in several blocks
    sequence_of = build_sequence(options)
    row_of, column_of = build_elements(options.blocks, inline)

    @inline
    def look(head, row0, row1, col0, col1):
        """What the mask leaves of a tile: 0 nothing, 1 something, 3 all."""
        row, column = i32(row_of(row0)), i32(column_of(col0))
        if WITHIN:
            return i32(3) if head[index(row), index(column)] else i32(0)
        kind, every = i32(0), i32(3)
        for r in range(row, i32(row_of(i32(row1 - 1))) + 1):
            for c in range(column, i32(column_of(i32(col1 - 1))) + 1):
                seen = head[index(r), index(c)]
                kind = i32(1) if seen else kind
                every = every if seen else i32(1)
        return i32(kind * every)

    def block_lists(tiles, bits, extras, nq, nk, low, high):
        warp, lane = i32(cuda.threadIdx.x // WARP), i32(cuda.threadIdx.x % WARP)
        which = which_list(u32(i32(cuda.blockIdx.x) * WARPS + warp), tiles.shape)
        b0, b1, block = which.b0, which.b1, i32(which.block)
        if b0 < u32(tiles.shape[0]):
            sequence = sequence_of(extras, b0, b1, nq, nk)
            queries, keys = i32(sequence.queries), i32(sequence.keys)
            low, high = i32(low + sequence.shift), i32(high + sequence.shift)
            head = extras.mask[index(b0), index(b1), index(which.head)]
            count = i32(0)
            for first in range(0, i32(tiles.shape[4]) - 1, WARP):
                across = i32(first + lane)
                row0 = i32((across if TRANSPOSED else block) * BLOCK_M)
                col0 = i32((block if TRANSPOSED else across) * BLOCK_N)
                row1, col1 = i32(row0 + BLOCK_M), i32(col0 + BLOCK_N)
                clear = row1 <= queries and col1 <= keys
                clear = clear and mask.all_visible(row0, row1, col0, col1, low, high)
                row1, col1 = min(row1, queries), min(col1, keys)
                start, stop = mask.kv_range(row0, row1, keys, low, high)
                kind = i32(0)
                if row0 < queries and col0 < stop and col1 > start and start < stop:
                    kind = look(head, row0, row1, col0, col1)
                kind = kind if clear else min(kind, i32(1))
                count = append(tiles, bits, which, i32(first), i32(kind), count)
            if lane == 0:
                tiles[index(b0), index(b1), index(which.head), index(block), 0] = count

    lists, words = array(types.int32, 5), array(types.uint32, 5)
    signature = types.void(lists, words, extras_type(options), *[types.int64] * 4)
    return block_lists, signature, {"launch_bounds": (WARP * warps, 1)}
