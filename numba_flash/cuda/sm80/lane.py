"""Where a lane reads matrices in shared memory that its warp multiplies."""

from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32


@once
def build_lane(pitch):
    """``beside(tile)`` and ``below(tile)``: this lane's address for ldmatrix, of 16 x 16 elements
    whose third matrix lies beside the first, or below it.
    """
    PITCH = pitch

    @inline
    def beside(tile):
        lane = i32(cuda.threadIdx.x % 32)
        return u32(tile + u32(lane % 16 * PITCH + lane // 16 * 16))

    @inline
    def below(tile):
        lane = i32(cuda.threadIdx.x % 32)
        row = lane // 16 * 8 + lane % 8
        return u32(tile + u32(row * PITCH + lane // 8 % 2 * 16))

    return beside, below


@once
def build_lane_of_lines(row_bytes):
    """The same where rows are swizzled lines, as `numba_flash.cuda.ptx.Matrices` has them."""
    ROW_BYTES = row_bytes

    @inline
    def beside(tile):
        lane = i32(cuda.threadIdx.x % 32)
        return u32(tile + u32(lane % 16 * ROW_BYTES + (lane // 16 ^ lane % 8) * 16))

    @inline
    def below(tile):
        lane = i32(cuda.threadIdx.x % 32)
        row = lane // 16 * 8 + lane % 8
        return u32(tile + u32(row * ROW_BYTES + (lane // 8 % 2 ^ lane % 8) * 16))

    return beside, below
