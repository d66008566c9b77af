"""What a function of the score adds for each head and distance, where that is all that it does: one
number serves all scores of a diagonal.

Kernels begin the sums of a tile of S with these numbers, to which tensor cores then add products;
the loops after that are those of plain attention. So the numbers are in units of raw products.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, device, f32, i32, i64, inline, once, types, u32, u64


def build(score_mod, threads):
    """Kernel ``relative(numbers, extras, inverse)``: ``numbers[h, x]`` is what the function adds to
    a score whose key is so many after its query as x is after the middle, times `inverse`; a block
    of `threads` has neighbours of a head.
    """
    function, THREADS = device(score_mod.function), threads

    def relative(numbers, extras, inverse):
        distances = i32(numbers.shape[1])
        blocks = u32(u32(i32(distances + (THREADS - 1))) // u32(THREADS))  # of a head
        head = i32(u32(cuda.blockIdx.x) // blocks)
        x = i32(u32(cuda.blockIdx.x) % blocks * u32(THREADS) + u32(cuda.threadIdx.x))
        distance = i32(x - distances // 2)
        i, j = max(i32(-distance), i32(0)), max(distance, i32(0))
        if x < distances:
            numbers[index(head), index(x)] = f32(function(f32(0), i32(0), head, i, j)) * inverse

    signature = types.void(array("float32", 2), types.Tuple(()), f32)
    return relative, signature, {"launch_bounds": (threads, 1)}


@once
def build_address(block_m):
    """``address_of(numbers, head, row0, col0)``: where the numbers of a tile begin that has
    `block_m` rows from row0 on, and columns from col0 on: that with number ``block_m - i + j``
    belongs to its row i and column j.
    """
    BLOCK_M = block_m

    @inline
    def address_of(numbers, head, row0, col0):
        distances = numbers.shape[1]
        first = i64(distances // 2 + col0 - row0 - BLOCK_M)
        return u64(ptx.global_address(numbers) + u64(4) * u64(i64(head) * distances + first))

    return address_of
