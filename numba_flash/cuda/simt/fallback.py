"""Heads that another tier has left, which it knows when it has run: a block of threads goes through
work items, of which most have nothing to do, since few blocks that look are gone sooner than many.
"""

from numba_flash.cuda.runtime.lang import cuda, device, i32, once


@once
def build_any_fallback(is_fallback, threads):
    """``any_fallback(items, q, k, extras)``: whether ``is_fallback(number, q, k, extras)`` holds
    for one of a block's items, of so many in all; all of its `threads` take part.
    """
    THREADS, IS_FALLBACK = threads, is_fallback

    @device
    def any_fallback(items, q, k, extras):
        found, blocks = i32(0), i32(cuda.gridDim.x)
        first = i32(cuda.blockIdx.x + blocks * cuda.threadIdx.x)
        for number in range(first, items, i32(blocks * THREADS)):
            found |= i32(1) if IS_FALLBACK(number, q, k, extras) else i32(0)
        return cuda.syncthreads_or(found) != 0

    return any_fallback
