"""The lists of `numba_flash.cuda.work.tile_lists` of a mask of blocks, made from these: nothing is
written down pair by pair.
"""

from numba_flash import mask
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, i32, inline, types, u32
from numba_flash.cuda.score.score import build_elements
from numba_flash.cuda.work.sequence import build_sequence
from numba_flash.cuda.work.tile_lists import WARP, append, which_list


def build_list(options, block_m, block_n, transposed):
    """``make_list(number, tiles, bits, extras, nq, nk, low, high)``: a warp makes the list of that
    number, each lane looks at a tile; nothing, if there are not so many.
    """
    BLOCK_M, BLOCK_N, TRANSPOSED = block_m, block_n, transposed
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

    @inline
    def make_list(number, tiles, bits, extras, nq, nk, low, high):
        lane, which = i32(cuda.threadIdx.x % WARP), which_list(number, tiles.shape)
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

    return make_list


def build(options, block_m, block_n, transposed, warps):
    """Kernel ``block_lists(tiles, bits, extras, nq, nk, low, high)``: as of `tile_lists`."""
    WARPS = warps
    make_list = build_list(options, block_m, block_n, transposed)

    def block_lists(tiles, bits, extras, nq, nk, low, high):
        number = u32(i32(cuda.blockIdx.x) * WARPS + i32(cuda.threadIdx.x // WARP))
        make_list(number, tiles, bits, extras, nq, nk, low, high)

    lists, words = array(types.int32, 5), array(types.uint32, 5)
    signature = types.void(lists, words, extras_type(options), *[types.int64] * 4)
    return block_lists, signature, {"launch_bounds": (WARP * warps, 1)}


def build_both(options, block_m, block_n, warps):
    """Kernel ``both_lists(of_keys, of_queries, bits, extras, nq, nk, low, high)``: the same for
    each block of keys, and behind that for each block of queries; `bits` are not there.
    """
    WARPS = warps
    list_of_keys = build_list(options, block_m, block_n, True)
    list_of_queries = build_list(options, block_m, block_n, False)

    def both_lists(of_keys, of_queries, bits, extras, nq, nk, low, high):
        number = u32(i32(cuda.blockIdx.x) * WARPS + i32(cuda.threadIdx.x // WARP))
        first = of_keys.shape[0] * of_keys.shape[1] * of_keys.shape[2] * of_keys.shape[3]
        if number < u32(first):
            list_of_keys(number, of_keys, bits, extras, nq, nk, low, high)
        else:
            number = u32(number - u32(first))
            list_of_queries(number, of_queries, bits, extras, nq, nk, low, high)

    lists, words = array(types.int32, 5), array(types.uint32, 5)
    signature = types.void(lists, lists, words, extras_type(options), *[types.int64] * 4)
    return both_lists, signature, {"launch_bounds": (WARP * warps, 1)}
