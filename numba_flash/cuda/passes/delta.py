"""Before the backward pass: delta = rowsum(dO * O) - dlse (FlashAttention-2, Dao, arXiv:2307.08691,
Algorithm 2, line 4).
"""

from numba_flash.arguments.options import PLAIN
from numba_flash.cuda.arguments import FLAGS, extras_type
from numba_flash.cuda.number import ACCUMULATOR, array, build_convert, index
from numba_flash.cuda.runtime.lang import cuda, inline, types
from numba_flash.cuda.work import row_blocks


def build(dtype, head_dim_v, has_dlse, lanes, rows, flagged=False):
    """Kernel ``delta_kernel(do, o, dlse, delta, extras)``: `lanes` threads add up each of `rows`
    rows of a block.

    do, o : (b0, b1, heads, n, head_dim_v).
    dlse, delta : (b0, b1, heads, n), in the accumulation dtype; dlse is not read unless the kernel
        `has_dlse`.
    flagged : only of heads (b0, b1, head) whose ``extras.flags`` are not 0, a block for each head.
    """
    HEAD_DIM_V, LANES, ROWS, HAS_DLSE = head_dim_v, lanes, rows, has_dlse
    ACC = ACCUMULATOR[dtype]
    load, _ = build_convert(dtype)

    @inline
    def work(number, do, o, dlse, delta):
        sum_smem = cuda.shared.array((ROWS, LANES), ACC)  # each thread's part of its row's sum
        lane, row = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        blocks = (o.shape[3] + ROWS - 1) // ROWS
        b0, b1, h, block = row_blocks.row_block(number, blocks, o.shape[2], o.shape[1])
        do_head, o_head, delta_head = do[b0, b1, h], o[b0, b1, h], delta[b0, b1, h]
        i = block * ROWS + row
        partial = ACC(0)
        if i < o.shape[3]:
            for d in range(lane, HEAD_DIM_V, LANES):
                partial += load(do_head[index(i), index(d)]) * load(o_head[index(i), index(d)])
        sum_smem[index(row), index(lane)] = partial
        cuda.syncthreads()  # the row's threads see each other's sums
        if lane == 0 and i < o.shape[3]:
            total = ACC(0)
            for t in range(LANES):
                total += sum_smem[index(row), index(t)]
            if HAS_DLSE:
                total -= dlse[index(b0), index(b1), index(h), index(i)]
            delta_head[index(i)] = total

    def delta_kernel(do, o, dlse, delta, extras):
        work(cuda.blockIdx.x, do, o, dlse, delta)

    def delta_kernel_fallback(do, o, dlse, delta, extras):
        at = row_blocks.row_block(cuda.blockIdx.x, 1, o.shape[2], o.shape[1])
        if extras.flags[index(at.b0), index(at.b1), index(at.head)] != 0:
            blocks = (o.shape[3] + ROWS - 1) // ROWS
            for number in range(cuda.blockIdx.x * blocks, (cuda.blockIdx.x + 1) * blocks):
                work(number, do, o, dlse, delta)
                cuda.syncthreads()  # sums have been read

    kernel = delta_kernel_fallback if flagged else delta_kernel
    extras = extras_type(PLAIN, more=FLAGS if flagged else ())
    signature = types.void(*[array(dtype, 5)] * 2, *[array(ACC, 4)] * 2, extras)
    return kernel, signature, {"launch_bounds": (lanes * rows, 1)}
