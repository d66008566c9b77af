"""Fragments of tensor-core products: which element of a tile a register holds, and how registers
are packed for the next product.

The accumulator of a product of a warp, 16 rows and N columns, keeps in register ``4 j + 2 r + c``
of lane l the element

    row = l // 4 + 8 r        column = 8 j + 2 (l % 4) + c

for mma.sync as for each warp of wgmma. It is also how the A operand of the next product wants pairs
of columns, once they are packed: P need not move between threads.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.lang import cuda, i32, inline

ROWS = 2  # of a thread, 8 apart
ALL_LANES = 0xFFFFFFFF


@inline
def first_column():
    """Column of this thread's register 0."""
    return i32(cuda.threadIdx.x % 4 * 2)


@inline
def place_of_key(key):
    """Row of shared memory in which a key of a tile is stored, where lanes are to hold neighbouring
    keys.

    Of 32 keys, lane l gets those from ``8 (l % 4)`` on: column ``8 j + 2 (l % 4) + c`` of the
    fragment is the key ``32 (j // 4) + 8 (l % 4) + 2 (j % 4) + c``.
    """
    return i32((key & ~0x1E) | (key & 0x06) << 2 | (key & 0x18) >> 2)


@inline
def first_key():
    """Key of this thread's register 0 in such a tile."""
    return i32(cuda.threadIdx.x % 4 * 8)


def build_key_rows(tiles):
    """``place(key)`` and ``key_of(place)`` where keys are the rows of `tiles` tiles, 1 or 2, of a
    warp: of 16 `tiles` keys, lane l gets those from ``2 tiles (l // 4)`` on; row ``16 m + 8 r + l
    // 4`` is the key ``2 tiles (l // 4) + 2 m + r``.
    """
    SIZE, WIDTH = 16 * tiles, 2 * tiles

    @inline
    def place(key):
        of_lane = key % WIDTH
        return i32(key - key % SIZE + of_lane * 8 + key % SIZE // WIDTH)

    @inline
    def key_of(place):
        return i32(place - place % SIZE + place % 8 * WIDTH + place % SIZE // 8)

    return place, key_of


@inline
def row_maximum(x):
    """Over the four lanes of a row."""
    x = ptx.maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))
    return ptx.maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))


@inline
def row_sum(x):
    """Over the four lanes of a row."""
    x += cuda.shfl_xor_sync(ALL_LANES, x, 1)
    return x + cuda.shfl_xor_sync(ALL_LANES, x, 2)


def build_pack(count, bfloat16, turing=False):
    """``pack(p, x)``: pairs of float32 to words of two 16-bit floats, rounded to nearest even;
    ``pack2`` for one pair.
    """
    COUNT, BFLOAT16, TURING = count, bfloat16, turing

    @inline
    def pack2(x, y):
        if BFLOAT16:
            return ptx.pack_bfloat16(x, y)
        if TURING:
            return ptx.pack_float16_on_turing(x, y)
        return ptx.pack_float16(x, y)

    @inline
    def pack(p, x):
        for j in range(COUNT):
            p[j] = pack2(x[2 * j], x[2 * j + 1])

    return pack, pack2
