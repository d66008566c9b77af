"""Which piece of the problem a block works on."""

from numba import cuda, njit
from numba.cuda import types


@njit
def work_item(index, blocks, heads, batch1):
    """(batch0, batch1, head, row block) of a one-dimensional grid; blocks of one head are neighbours, the last block first.

    With a causal mask the last rows see the most keys, so the longest work starts first.
    """
    block = blocks - 1 - index % blocks
    index //= blocks
    head = index % heads
    index //= heads
    return index // batch1, index % batch1, head, block


@cuda.jit(device=True)
def packed_item(index, offsets, total, block):
    """(0, sequence, head, row block) for sequences that lie one after the other in `total` rows, with boundaries known to the device alone.

    Sequence s owns the numbers from ``offsets[s] // block + s`` on: at least as many as it has blocks, at most one more.
    """
    sequences = offsets.shape[0] - 1
    numbers = total // block + sequences
    head, number = index // numbers, index % numbers
    first, last = 0, sequences - 1
    while first < last:  # the last sequence that begins at or before `number`
        middle = (first + last + 1) // 2
        if types.int64(offsets[middle]) // block + middle <= number:
            first = middle
        else:
            last = middle - 1
    return 0, first, head, max(number - (types.int64(offsets[first]) // block + first), 0)
